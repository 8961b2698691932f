"""What a selector is, and what all of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from sparsecoll.errors import NonFiniteError
from sparsecoll.vector import SMALLEST, DenseVector, SparseVector

Vector = SparseVector | DenseVector


@dataclass
class Selector(ABC):
    """A way to choose about k entries of a vector. A dataclass of its options; state is in fields with init=False.

    A selector calls the methods of vectors only (`topk`, `threshold`, `sample`, `magnitude_stats`, `take`), so that it
    runs in the pass over memory in which `Residual.take` adds the gradient to the residual and clears the selection.
    """

    name: ClassVar[str]

    @abstractmethod
    def select(self, x: Vector, k: int) -> SparseVector:
        """About k entries of x, never zeros.

        Raises:
            NonFiniteError: a NaN among the values taken (NaN has no order).
        """

    def forget(self) -> None:
        """Drop what is kept between calls."""
        for option in fields(self):
            if isinstance(getattr(self, option.name), Selector):
                getattr(self, option.name).forget()
        fresh = vars(replace(self))
        vars(self).clear()
        vars(self).update(fresh)

    def state_dict(self) -> dict[str, Any]:
        """What a later run needs to go on with the same choices; plain Python values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - a selector without state keeps this
        """Take back what `state_dict` gave."""


def as_vector(x: Any) -> Vector:
    """A vector as it is, an array as a DenseVector."""
    return x if isinstance(x, (SparseVector, DenseVector)) else DenseVector(x)


def check_k(k: int) -> None:
    """Raise ValueError if k is negative."""
    if k < 0:
        raise ValueError(f"k: expected at least 0, got {k}")


def check_order(x: SparseVector) -> SparseVector:
    """x, unless it holds a NaN: then NonFiniteError."""
    if x.has_nan():
        raise NonFiniteError("x: expected values that can be ordered by magnitude, got NaN among the selected entries")
    return x


def checked(x: SparseVector) -> SparseVector:
    """x without explicit zeros, itself if there are none; NonFiniteError if it holds a NaN."""
    lowest, highest = x.key_range()
    if x.nnz and highest >= x.nan_key():
        return check_order(x)
    return x if lowest > 0 or x.nnz == 0 else x.threshold(SMALLEST, x.nnz)
