"""Sums: of sparse vectors, into dense ones, and what two lists of indices share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparsecoll.kernels.keys import Array

__all__ = ["first_unsorted", "merge_sum", "scatter_add", "where_in", "write_dense", "write_sum"]


def merge_sum(parts: Sequence[tuple[Array, Array]], dtype: np.dtype[np.generic]) -> tuple[Array, Array]:
    """Sum of sparse vectors given as (ascending unique indices, values), added in the order of `parts` from +0.

    Returns (indices, sums in `dtype`). Entries that cancel to zero stay: positions depend on indices alone.
    """
    if not parts:
        return np.empty(0, np.uint32), np.empty(0, dtype)
    indices, inverse = np.unique(np.concatenate([i for i, _ in parts]), return_inverse=True)
    sums = np.zeros(indices.size, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        np.add.at(sums, inverse.reshape(-1), np.concatenate([v.astype(dtype) for _, v in parts]))
    return indices, sums


def scatter_add(dense: Array, indices: Array, values: Array, subtract: bool = False) -> None:
    """dense[indices] += values, or -= with `subtract`, in place; indices are unique."""
    with np.errstate(over="ignore", invalid="ignore"):
        dense[indices] = (np.subtract if subtract else np.add)(dense[indices], values.astype(dense.dtype))


def write_dense(dense: Array, indices: Array, values: Array, divisor: int | None = None) -> None:
    """dense = values at ascending unique indices, 0 elsewhere; with a divisor 0 + values / divisor, for floats."""
    dense[:] = 0
    if divisor is None:
        dense[indices] = values
        return
    with np.errstate(over="ignore", invalid="ignore"):
        scatter_add(dense, indices, np.divide(values, values.dtype.type(divisor)))


def write_sum(dense: Array, parts: Sequence[tuple[Array, Array]], divisor: int, together: int) -> None:
    """dense = 0 + (sum of sparse vectors) / divisor, in float32 or float64; the sum is that of `merge_sum`.

    The vectors are given in groups of `together`; the indices of a group are below those of the next one.
    """
    dense[:] = 0
    for indices, values in parts:
        scatter_add(dense, indices, values)
    with np.errstate(over="ignore", invalid="ignore"):
        dense /= dense.dtype.type(divisor)
    dense += 0


def where_in(a: Array, b: Array, invert: bool = False) -> Array:
    """Positions (int64, ascending) in `a` of the indices that are in `b`, or that are not; both ascending, unique."""
    return np.flatnonzero(np.isin(a, b, assume_unique=True, invert=invert))


def first_unsorted(indices: Array, length: int) -> int:
    """Position of the first index that is not above its predecessor or is >= length; -1 if there is none."""
    bad = indices >= np.uint64(length)
    bad[1:] |= indices[1:] <= indices[:-1]
    return int(np.argmax(bad)) if bad.any() else -1
