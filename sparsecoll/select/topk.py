"""Selection of the exact top k, and of all entries above a given threshold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparsecoll.errors import check_integer, check_number
from sparsecoll.select.base import Selector, Vector, as_vector, checked
from sparsecoll.vector import RowSparse, SparseVector


def topk(x: Any, k: int) -> SparseVector:
    """Select the k entries of largest magnitude; ties go to the lower index, and zeros are never selected.

    Args:
        x: 1-D NumPy or CuPy array, SparseVector or DenseVector; or a RowSparse, see `RowSparse.topk`.
        k: number of entries, at least 0; if it is larger than the number of nonzeros, all of these are selected.

    Returns:
        SparseVector.

    Raises:
        ValueError: `k` is negative.
        NonFiniteError: There is a NaN among the selected values (NaN has no order).

    >>> topk(np.array([1.0, -3.0, 2.0, 3.0]), 2).indices
    array([1, 3], dtype=uint32)
    """
    k = check_integer("k", k, 0)
    return x.topk(k) if isinstance(x, RowSparse) else checked(as_vector(x).topk(k))  # type: ignore[return-value]


def threshold(x: Any, t: float) -> SparseVector:
    """Select all entries of magnitude >= t; t = 0 selects the nonzeros.

    Args:
        x: 1-D NumPy or CuPy array, SparseVector or DenseVector.
        t: threshold, at least 0.

    Returns:
        SparseVector.

    Raises:
        ValueError: `t` is negative or NaN.
        NonFiniteError: There is a NaN among the selected values.

    >>> threshold(np.array([1.0, -3.0, 2.0]), 2.0).values
    array([-3.,  2.])
    """
    check_number("t", t, "[0, inf]")
    return checked(as_vector(x).threshold(t))


@dataclass
class TopK(Selector):
    """Select exactly the k entries of largest magnitude (or all nonzeros, if fewer), in one pass over x.

    Ties go to the lower index.
    """

    name = "topk"

    def select(self, x: Vector, k: int) -> SparseVector:
        return topk(x, k)
