"""Sums: of sparse vectors, into dense ones, and what two lists of indices share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba as nb
import numpy as np
from numba.cpython.unsafe import numbers

from sparsecoll.kernels import reference
from sparsecoll.kernels.cpu.codecs import from_float16
from sparsecoll.kernels.memory import empty
from sparsecoll.kernels.reference import Array

WINDOW = 1 << 15  # indices summed at a time by merge_sum: 128 KiB of float32 stay in the second-level cache

trailing_zeros: Any = numbers.trailing_zeros
_jit: Any = nb.njit(nogil=True, cache=True)


@_jit
def _merge_sum(indices, values, starts, stops, sums, marks, summary, out_indices, out_sums):  # type: ignore[no-untyped-def]
    """Window by window: add every part into `sums` (part by part, so in rank order), then emit in index order."""
    count = 0
    parts = starts.size
    window = np.uint64(sums.size)
    while True:
        base = indices[0]
        found = False
        for p in range(parts):
            if starts[p] < stops[p] and (not found or indices[starts[p]] < base):
                base = indices[starts[p]]
                found = True
        if not found:
            return count
        for p in range(parts):
            i = starts[p]
            stop = stops[p]
            while i < stop:
                distance = np.uint64(indices[i]) - np.uint64(base)
                if distance >= window:
                    break
                j = np.int64(distance)
                sums[j] += values[i]
                marks[j >> 6] |= np.uint64(1) << np.uint64(j & 63)
                summary[j >> 12] |= np.uint64(1) << np.uint64((j >> 6) & 63)
                i += 1
            starts[p] = i
        for s in range(summary.size):
            row = summary[s]
            summary[s] = 0
            while row != 0:
                m = (s << 6) + np.int64(trailing_zeros(row))
                row &= row - np.uint64(1)
                word = marks[m]
                marks[m] = 0
                while word != 0:
                    j = (m << 6) + np.int64(trailing_zeros(word))
                    word &= word - np.uint64(1)
                    out_indices[count] = base + indices.dtype.type(j)
                    out_sums[count] = sums[j]
                    sums[j] = 0
                    count += 1


@_jit
def _scatter_add(dense, indices, values):  # type: ignore[no-untyped-def]
    for i in range(indices.size):
        dense[indices[i]] += values[i]


@_jit
def _scatter_subtract(dense, indices, values):  # type: ignore[no-untyped-def]
    for i in range(indices.size):
        dense[indices[i]] -= values[i]


@_jit
def _intersect(a, b, out):  # type: ignore[no-untyped-def]
    count = 0
    j = 0
    for i in range(a.size):
        while j < b.size and b[j] < a[i]:
            j += 1
        if j == b.size:
            break
        if b[j] == a[i]:
            out[count] = i
            count += 1
    return count


@_jit
def _difference(a, b, out):  # type: ignore[no-untyped-def]
    count, j = 0, 0
    for i in range(a.size):
        while j < b.size and b[j] < a[i]:
            j += 1
        if j == b.size or b[j] != a[i]:
            out[count] = i
            count += 1
    return count


@_jit
def _first_disorder(indices, length):  # type: ignore[no-untyped-def]
    if indices.size == 0:
        return -1
    bad = indices[0] >= length
    for i in range(1, indices.size):
        bad |= (indices[i] <= indices[i - 1]) | (indices[i] >= length)
    if not bad:
        return -1
    for i in range(indices.size):
        if indices[i] >= length or (i > 0 and indices[i] <= indices[i - 1]):
            return i
    return -1


def merge_sum(parts: Sequence[tuple[Array, Array]], dtype: np.dtype[np.generic]) -> tuple[Array, Array]:
    parts = [part for part in parts if part[0].size] or list(parts[:1])
    if not parts or parts[0][0].size == 0:
        return reference.merge_sum(parts, dtype)
    if len(parts) == 1:
        return parts[0][0], parts[0][1].astype(dtype) + dtype.type(0)  # -0 becomes +0, as in any sum that starts at +0
    sizes = np.array([i.size for i, _ in parts])
    stops = np.cumsum(sizes)
    indices = np.concatenate([i for i, _ in parts], out=empty(int(stops[-1]), parts[0][0].dtype))
    values = empty(indices.size, dtype)
    for stop, (_, v) in zip(stops, parts, strict=True):
        halves = v.dtype == np.float16 and dtype == np.float32
        values[stop - v.size : stop] = from_float16(v) if halves else v
    sums = np.zeros(WINDOW, dtype)
    marks, summary = np.zeros(WINDOW >> 6, np.uint64), np.zeros(WINDOW >> 12, np.uint64)
    out_indices, out_sums = empty(indices.size, indices.dtype), empty(values.size, dtype)
    count = _merge_sum(indices, values, stops - sizes, stops, sums, marks, summary, out_indices, out_sums)
    return out_indices[:count], out_sums[:count]


def scatter_add(dense: Array, indices: Array, values: Array) -> None:
    if dense.dtype == np.float16:
        reference.scatter_add(dense, indices, values)
    else:
        _scatter_add(dense, indices, values.astype(dense.dtype, copy=False))


def scatter_subtract(dense: Array, indices: Array, values: Array) -> None:
    if dense.dtype == np.float16:
        reference.scatter_subtract(dense, indices, values)
    else:
        _scatter_subtract(dense, indices, values.astype(dense.dtype, copy=False))


def intersect(a: Array, b: Array) -> Array:
    out = np.empty(min(a.size, b.size), np.int64)
    return out[: _intersect(a, b, out)]


def difference(a: Array, b: Array) -> Array:
    out = np.empty(a.size, np.int64)
    return out[: _difference(a, b, out)]


def first_disorder(indices: Array, length: int) -> int:
    return int(_first_disorder(indices, np.uint64(length)))
