"""CLT-k, cyclic local top-k (Chen and others, "ScaleCom: Scalable Sparsified Gradient Compression", NeurIPS 2020)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sparsecoll.algorithms.base import Algorithm, Reduction
from sparsecoll.algorithms.dense import Dense
from sparsecoll.formats.packed import PackedIndices
from sparsecoll.select import Vector
from sparsecoll.transport.all_ranks import spread
from sparsecoll.transport.channel import Channel
from sparsecoll.vector import DenseVector, SparseVector

INDICES = PackedIndices()


@dataclass
class CLTk(Algorithm):
    """The exact sum of all ranks' values at the k largest entries of one rank, the leader; ranks lead in turn.

    1. The leader, rank t mod P in call t, selects its k largest entries (with the `selector`, if there is one) and
       broadcasts their indices.
    2. All ranks sum the values that they have at these indices, as `dense` does: no rank sends an index.

    The result has k entries however many ranks there are, and no rank but the leader selects. It approximates the top k
    of the sum as far as ranks have their large entries at the same indices, as accumulated gradients do.

    Volume: at most k words of indices, and 2k(P-1)/P of values, in ceil(log2 P) messages of the broadcast and those of
    `dense`. Memory: k entries.

    Args:
        k: as in `sparsecoll.Algorithm`.
        selector: as in `sparsecoll.Algorithm`; used by the leader.
    """

    name = "cltk"
    semantics = "approximate_top_k"

    _calls: int = field(default=0, init=False, repr=False)

    def select(self, x: Vector, k: int, ranks: int = 1) -> Vector:  # type: ignore[override]
        """Return x: the leader selects in the call."""
        return x

    def replicated_state(self) -> tuple[int, int]:
        return self._calls, 0

    def __call__(self, channel: Channel, x: Vector, k: int) -> Reduction:
        leader, message = self._calls % channel.size, np.empty(0, np.uint8)
        with channel.phase("indices"):
            if channel.rank == leader:
                message = INDICES.encode(super().select(x, k))
            indices = INDICES.decode(spread(channel.transport, message, leader), x.length).indices
        with channel.phase("values"):
            sums = Dense()(channel, DenseVector(_values_at(x, indices)), 0)
        self._calls += 1

        def at_indices(values: Vector) -> SparseVector:
            return SparseVector.from_sorted_unchecked(indices, values.values, x.length)

        return Reduction(at_indices(sums.value), lambda: at_indices(sums.contributed).drop_zeros())


def _values_at(x: Vector, indices: NDArray[np.integer]) -> NDArray[np.generic]:
    """Return the values that x has at some ascending indices, zero where it has none."""
    if isinstance(x, DenseVector):
        return x.take(indices).values
    values = DenseVector.zeros(indices.size, x.dtype, x)
    found = x.intersect(SparseVector.from_sorted_unchecked(indices, values.values, x.length))
    values.values[np.searchsorted(indices, found.indices)] = found.values
    return values.values
