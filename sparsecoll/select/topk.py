"""The exact top k, and everything above a given threshold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparsecoll.select.base import Selector, Vector, as_vector, check_k, checked
from sparsecoll.vector import SparseVector


def topk(x: Any, k: int) -> SparseVector:
    """The k entries of largest magnitude, ties by lower index; zeros are never taken.

    Args:
        x: 1-D NumPy array (n values) or a vector.
        k: at least 0; more than n takes every nonzero.

    Raises:
        ValueError: k negative, or a NaN among the values taken (NaN has no order).

    >>> topk(np.array([1.0, -3.0, 2.0, 3.0]), 2).indices
    array([1, 3], dtype=uint32)
    """
    check_k(k)
    return checked(as_vector(x).topk(k))


def threshold(x: Any, t: float) -> SparseVector:
    """All entries with magnitude >= t; t = 0 takes the nonzeros.

    Raises:
        ValueError: t negative or NaN, or a NaN among the values taken.

    >>> threshold(np.array([1.0, -3.0, 2.0]), 2.0).values
    array([-3.,  2.])
    """
    if not t >= 0:
        raise ValueError(f"t: expected at least 0, got {t}")
    return checked(as_vector(x).threshold(t))


@dataclass
class TopK(Selector):
    """Exactly the k largest magnitudes (or all nonzeros, where there are fewer), ties by lower index. One pass."""

    name = "topk"

    def select(self, x: Vector, k: int) -> SparseVector:
        return topk(x, k)
