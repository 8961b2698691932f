"""Sums of values alone, at indices that all ranks have."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sparsecoll.algorithms.base import Algorithm, Reduction
from sparsecoll.algorithms.dense import Dense
from sparsecoll.formats.packed import PackedIndices
from sparsecoll.select import Vector
from sparsecoll.transport.channel import Channel
from sparsecoll.vector import DenseVector, SparseVector

INDICES = PackedIndices()


@dataclass
class AtAgreedIndices(Algorithm):
    """Sums at indices on which the ranks agree in the call: derive a dataclass, and define `__call__`."""

    semantics = "approximate_top_k"

    _calls: int = field(default=0, init=False, repr=False)

    def select(self, x: Vector, k: int, ranks: int = 1) -> Vector:  # type: ignore[override]
        """Return x: entries are selected in the call."""
        return x

    def replicated_state(self) -> tuple[int, int]:
        return self._calls, 0

    def _refuse_selector(self) -> None:
        if self.selector is not None:
            raise ValueError(
                f"selector: expected None with {self.name}, which selects by itself, got {self.selector!r}"
            )


def sum_at(channel: Channel, x: Vector, indices: NDArray[np.integer]) -> Reduction:
    """Return the sum over the ranks of the values that x has at some indices, zero where it has none.

    Args:
        indices: ascending and unique, of `index_dtype(length)`, the same on all ranks.

    Volume: 2m(P-1)/P words for m indices, as `dense` for a vector of m values; no index travels.
    """
    reduction = Dense()(channel, DenseVector(_values_at(x, indices)), 0)

    def contributed() -> SparseVector:
        values = reduction.contributed
        assert isinstance(values, DenseVector)
        return SparseVector.from_sorted_unchecked(indices, values.values, x.length).drop_zeros()

    assert isinstance(reduction.value, DenseVector)
    return Reduction(SparseVector.from_sorted_unchecked(indices, reduction.value.values, x.length), contributed)


def _values_at(x: Vector, indices: NDArray[np.integer]) -> NDArray[np.generic]:
    if isinstance(x, DenseVector):
        return x.take(indices).values
    values = DenseVector.zeros(indices.size, x.dtype, x)
    found = x.intersect(SparseVector.from_sorted_unchecked(indices, values.values, x.length))
    values.values[np.searchsorted(indices, found.indices)] = found.values
    return values.values
