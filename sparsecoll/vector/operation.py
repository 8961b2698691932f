"""Operations: how the values that several ranks have at one index are combined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FOLD_OF = {
    "min": "min",
    "max": "max",
    "prod": "prod",
    "logical_and": "min",  # of 0 and 1, see `Operation.prepared`
    "logical_or": "max",
    "logical_xor": "differ",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_xor": "xor",
    "replace": "last",
}
OPERATIONS = ("sum", "mean", *FOLD_OF)


@dataclass(frozen=True)
class Operation:
    """An operation on the entries of all ranks, defined at each index that some rank stores.

    Attributes:
        name: one of OPERATIONS; "mean" combines as "sum" does, and results are divided at the end.
        zeros: whether ranks that do not store an index have a zero there; otherwise they do not take part. Sums are the
            same in both cases.
    """

    name: str = "sum"
    zeros: bool = False

    @property
    def sums(self) -> bool:
        """Whether values are added."""
        return self.name in ("sum", "mean")

    def fold(self, dtype: np.dtype[Any]) -> str | None:
        """Return what the kernels call the operation on values of `dtype`; None for a sum of numbers.

        Raises:
            TypeError: Values of this dtype have no such operation.
        """
        if self.name.startswith("bitwise") and dtype.kind not in "biu":
            raise TypeError(f"op: expected {self.name!r} only for bool and integers, got values of {dtype}")
        if self.sums:
            return "or" if dtype.kind == "b" else None
        return FOLD_OF[self.name]

    def neutral(self, dtype: np.dtype[Any]) -> Any:
        """Return the value that stands for a missing entry in an array of all values."""
        fold = None if self.zeros else self.fold(dtype)
        if fold in ("min", "max") and dtype.kind in "iu":
            return getattr(np.iinfo(dtype), "max" if fold == "min" else "min")
        if fold in ("min", "max") and dtype.kind != "b":
            return np.inf if fold == "min" else -np.inf
        if fold == "and" and dtype.kind != "b":
            return ~dtype.type(0)
        return fold in ("min", "prod", "and")

    def prepared(self, values: NDArray[Any], last: bool) -> NDArray[Any]:
        """Return the values that a rank contributes in place of its own.

        Args:
            last: whether the rank is the last one, whose zeros "replace" the others' values, too.
        """
        if self.name.startswith("logical"):
            true: NDArray[Any] = values != 0
            return true.astype(values.dtype)
        return np.zeros_like(values) if self.name == "replace" and self.zeros and not last else values


SUM = Operation()
