"""Sparse vectors added to dense ones, and the intersection and difference of index arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparsecoll.kernels import reference
from sparsecoll.kernels.cpu.codecs import from_float16
from sparsecoll.kernels.cpu.lanes import array_at, jit
from sparsecoll.kernels.keys import Array
from sparsecoll.kernels.memory import data_ptr, empty, readonly

PART = 1 << 11  # coordinates of a dense vector that are put together while they are in the first-level cache


@jit
def end(indices, start, limit):  # type: ignore[no-untyped-def]
    """The first position from `start` on whose index is at least `limit`, by exponential and binary search."""
    size = indices.size
    step = 1
    low = start
    while low + step < size and np.uint64(indices[low + step]) < limit:
        low += step
        step <<= 1
    high = min(low + step, size)
    while low < high:
        middle = (low + high) >> 1
        if np.uint64(indices[middle]) < limit:
            low = middle + 1
        else:
            high = middle
    return low


@jit
def _scatter_add(dense, indices, values, subtract):  # type: ignore[no-untyped-def]
    """dense[indices] += values; -= unless `subtract` is None."""
    for i in range(indices.size):
        if subtract is None:
            dense[indices[i]] += values[i]
        else:
            dense[indices[i]] -= values[i]


@jit
def add_below(indices, values, start, base, stop, part):  # type: ignore[no-untyped-def]
    """Add entries from `start` on, with indices below `stop`, to `part`, which begins at `base`; where they end."""
    i, size, one, zero = np.uint64(start), np.uint64(indices.size), np.uint64(1), part.dtype.type(0)
    while i < size and np.uint64(indices[i]) < stop:
        j = np.uint64(indices[i]) - base
        part[j] = (part[j] + values[i]) + zero  # of two NaN the first one stays, as in merge.py
        i += one
    return np.int64(i)


@jit
def _write_sum(dense, index_at, value_at, sizes, starts, together, divisor, inverse, like):  # type: ignore[no-untyped-def]
    """Write all values of the sum of vectors."""
    group = 0
    for start in range(0, dense.size, PART):
        part, base, left = dense[start : start + PART], np.uint64(start), False
        part[:] = 0
        while group < sizes.size and not left:
            for p in range(group, group + together):
                indices, values = array_at(index_at[p], sizes[p], like), array_at(value_at[p], sizes[p], dense)
                starts[p] = add_below(indices, values, starts[p], base, base + np.uint64(part.size), part)
                left |= starts[p] < sizes[p]
            group += 0 if left else together
        _divide(part, divisor, inverse)


@jit
def _divide(values, divisor, inverse):  # type: ignore[no-untyped-def]
    """values = 0 + values / divisor, by a product with the inverse where that is exact."""
    zero = values.dtype.type(0)
    if inverse is None:
        for i in range(values.size):
            values[i] = zero + values[i] / divisor
    else:
        for i in range(values.size):
            values[i] = zero + values[i] * inverse


@jit
def _common(a, b, wanted, out):  # type: ignore[no-untyped-def]
    """Write the positions in `a` of the indices that are in `b` (wanted = 1) or are not (wanted = 0); their number."""
    count, i, j = 0, 0, 0
    while i < a.size and j < b.size:
        x, y = a[i], b[j]
        out[count] = i
        count += (x == y) == wanted and x <= y
        i += x <= y
        j += y <= x
    if wanted == 0:
        while i < a.size:
            out[count] = i
            count += 1
            i += 1
    return count


@jit
def _is_unsorted(indices, length):  # type: ignore[no-untyped-def]
    bad = indices[0] >= length
    for i in range(1, indices.size):
        bad |= (indices[i] <= indices[i - 1]) | (indices[i] >= length)
    return bad


def as_contiguous(values: Array, dtype: np.dtype[np.generic]) -> Array:
    """Return values as a contiguous array of `dtype`, themselves if they are one."""
    if values.dtype == np.float16 and dtype == np.float32:
        return from_float16(values)
    return np.ascontiguousarray(values, dtype)


def scatter_add(dense: Array, indices: Array, values: Array, subtract: bool = False) -> None:
    if dense.dtype == np.float16:
        reference.scatter_add(dense, indices, values, subtract)
    else:
        _scatter_add(dense, indices, values.astype(dense.dtype, copy=False), subtract or None)


def write_dense(dense: Array, indices: Array, values: Array, divisor: int | None = None) -> None:
    if dense.dtype == values.dtype and divisor is not None and dense.dtype.char in "fd":
        write_sum(dense, [(indices, values)], divisor, 1)
    else:
        dense.view(np.uint8).fill(0)  # bytes are set without reading the memory first
        if divisor is None:
            dense[indices] = values
        else:
            scatter_add(dense, indices, np.divide(values, values.dtype.type(divisor)))


def write_sum(dense: Array, parts: Sequence[tuple[Array, Array]], divisor: int, together: int) -> None:
    indices = [np.ascontiguousarray(i) for i, _ in parts]
    values = [as_contiguous(v, dense.dtype) for _, v in parts]
    inverse = dense.dtype.type(1 / divisor) if divisor & (divisor - 1) == 0 else None  # exact for powers of two
    how = (together, dense.dtype.type(divisor), inverse, readonly(indices[0]))
    _write_sum(dense, *addresses(indices, values), *how)


def addresses(indices: Sequence[Array], values: Sequence[Array]) -> tuple[Array, ...]:
    """The addresses of indices and of values, the sizes, and zeros, for kernels that take any number of vectors."""
    sizes = np.array([i.size for i in indices])
    return *(np.array([data_ptr(a) for a in arrays]) for arrays in (indices, values)), sizes, np.zeros_like(sizes)


def where_in(a: Array, b: Array, invert: bool = False) -> Array:
    out = empty(a.size + 1, np.int64)
    return out[: _common(a, b, int(not invert), out)]


def first_unsorted(indices: Array, length: int) -> int:
    bad = indices.size and _is_unsorted(indices, np.uint64(length))
    return reference.first_unsorted(indices, length) if bad else -1
