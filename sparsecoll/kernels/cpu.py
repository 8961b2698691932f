"""CPU kernels in Numba: nogil, cached on disk, one thread. Each equals its namesake in `reference` bit for bit.

Floats are handled as bit patterns wherever only their order matters, so float16 needs no arithmetic here; sums of
float16 are formed in float32 (see `vector.accumulator`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba as nb
import numpy as np
from numba.cpython.unsafe import numbers

from sparsecoll.kernels import reference
from sparsecoll.kernels.reference import (
    Array,
    bits_and_mask,
    index_dtype,
    key_of,
    magnitude_keys,
    magnitude_of,
    nan_key,
)

__all__ = [
    "bits_and_mask",
    "count_at_least",
    "first_disorder",
    "index_dtype",
    "intersect",
    "key_of",
    "kth_key",
    "magnitude_keys",
    "magnitude_of",
    "merge_sum",
    "nan_key",
    "scatter_add",
    "scatter_subtract",
    "select_at_least",
    "take_top",
    "topk",
]

WINDOW = 1 << 15  # indices summed at a time by merge_sum: 128 KiB of float32 stay in the second-level cache
SMALL = 1 << 13  # below this many values kth_key looks at all of them
SAMPLE = 1 << 15  # values that kth_key samples to bound the threshold

trailing_zeros: Any = numbers.trailing_zeros
_jit: Any = nb.njit(nogil=True, cache=True)


@_jit
def _count(bits, mask, key):  # type: ignore[no-untyped-def]
    count = 0
    for i in range(bits.size):
        count += (bits[i] & mask) >= key
    return count


@_jit
def _select(bits, mask, key, out):  # type: ignore[no-untyped-def]
    count = 0
    capacity = out.size
    for i in range(bits.size):
        if (bits[i] & mask) >= key:
            if count < capacity:
                out[count] = i
            count += 1
    return count


@_jit
def _candidates(bits, mask, key, out):  # type: ignore[no-untyped-def]
    count = 0
    capacity = out.size
    for i in range(bits.size):
        magnitude = bits[i] & mask
        if magnitude >= key:
            if count < capacity:
                out[count] = magnitude
            count += 1
    return count


@_jit
def _take_top(bits, mask, key, ties, out):  # type: ignore[no-untyped-def]
    count = 0
    capacity = out.size
    for i in range(bits.size):
        magnitude = bits[i] & mask
        if magnitude >= key:
            if magnitude == key:
                if ties == 0:
                    continue
                ties -= 1
            if count < capacity:
                out[count] = i
            count += 1
    return count


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


def _typed(values: Array, key: int) -> tuple[Array, Any, Any] | None:
    """(bits, mask, key) of one unsigned type; None if no value can reach the key."""
    bits, mask = bits_and_mask(values)
    if key > np.iinfo(bits.dtype).max:
        return None
    return bits, bits.dtype.type(mask), bits.dtype.type(key)


def _filled(kernel: Any, arguments: tuple[Any, ...], capacity: int, dtype: Any) -> Array:
    """Run a kernel that fills its last argument and returns the count; again with room if the guess was short."""
    out = np.empty(capacity, dtype)
    count = kernel(*arguments, out)
    if count > capacity:
        out = np.empty(count, dtype)
        kernel(*arguments, out)
    return out[:count]


def count_at_least(values: Array, key: int) -> int:
    typed = _typed(values, key)
    return 0 if typed is None else int(_count(*typed))


def select_at_least(values: Array, key: int, expected: int = 0) -> Array:
    typed = _typed(values, key)
    if typed is None:
        return np.empty(0, np.int64)
    return _filled(_select, typed, min(values.size, expected + (expected >> 3) + 64), np.int64)


def take_top(values: Array, key: int, ties: int, expected: int = 0) -> Array:
    typed = _typed(values, key)
    if typed is None:
        return np.empty(0, np.int64)
    return _filled(_take_top, (*typed, ties), min(values.size, expected + 64), np.int64)


def _lower_bound_key(values: Array, k: int) -> int:
    """A key that at least k values very likely reach, and not many more: a quantile of a strided sample."""
    sample = magnitude_keys(np.ascontiguousarray(values[:: max(1, values.size // SAMPLE)]))
    expected = k * sample.size / values.size
    rank = int(expected + 4 * np.sqrt(expected) + 4)
    if rank >= sample.size:
        return 0
    return int(np.partition(sample, sample.size - 1 - rank)[sample.size - 1 - rank])


def kth_key(values: Array, k: int) -> tuple[int, int]:
    if values.size <= SMALL or k > values.size // 2:
        candidates = magnitude_keys(values)
    else:
        bits, mask = bits_and_mask(values)
        capacity = min(values.size, k + (k >> 1) + 1024)
        arguments = (bits, bits.dtype.type(mask), bits.dtype.type(_lower_bound_key(values, k)))
        candidates = _filled(_candidates, arguments, capacity, bits.dtype)
        if candidates.size < k:  # the sample misled: periodic data, say
            candidates = magnitude_keys(values)
    place = candidates.size - k
    key = candidates.dtype.type(np.partition(candidates, place)[place])
    return int(key), k - int(np.count_nonzero(candidates > key))


def topk(values: Array, k: int) -> Array:
    if k >= values.size:
        return np.arange(values.size, dtype=np.int64)
    if k == 0:
        return np.empty(0, np.int64)
    key, ties = kth_key(values, k)
    return take_top(values, key, ties, expected=k)


def merge_sum(parts: Sequence[tuple[Array, Array]], dtype: np.dtype[np.generic]) -> tuple[Array, Array]:
    parts = [part for part in parts if part[0].size] or list(parts[:1])
    if not parts or parts[0][0].size == 0:
        return reference.merge_sum(parts, dtype)
    if len(parts) == 1:
        return parts[0][0], parts[0][1].astype(dtype) + dtype.type(0)  # -0 becomes +0, as in any sum that starts at +0
    sizes = np.array([i.size for i, _ in parts])
    stops = np.cumsum(sizes)
    indices = np.concatenate([i for i, _ in parts])
    values = np.empty(indices.size, dtype)
    for stop, (_, v) in zip(stops, parts, strict=True):
        values[stop - v.size : stop] = v
    sums = np.zeros(WINDOW, dtype)
    marks, summary = np.zeros(WINDOW >> 6, np.uint64), np.zeros(WINDOW >> 12, np.uint64)
    out_indices, out_sums = np.empty_like(indices), np.empty_like(values)
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


def first_disorder(indices: Array, length: int) -> int:
    return int(_first_disorder(indices, np.uint64(length)))
