"""The sum of sparse vectors, one window of the index space after the other, in the second-level cache.

With AVX-512 or AVX2 and floats, a window initially holds -0 everywhere. No sum can be -0 if +0 is added to each value,
so the sums themselves show which coordinates have entries, and a block of them at a time is written out and reset.
Otherwise a bit for each coordinate shows it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparsecoll.kernels import reference
from sparsecoll.kernels.cpu.codecs import from_float16
from sparsecoll.kernels.cpu.lanes import LANES, VECTORS, array_at, emit_block, jit, trailing_zeros
from sparsecoll.kernels.cpu.sums import end
from sparsecoll.kernels.keys import Array
from sparsecoll.kernels.memory import empty

WINDOW = 1 << 15  # indices summed at a time: 128 KiB of float32
SHIFT = LANES.bit_length() - 1
GROUPS = WINDOW >> SHIFT
CROWD = 512  # entries in a window from which on lanes are faster than bits


@jit
def _marked(indices, values, starts, stops, sums, marks, summary, out_indices, out_sums):  # type: ignore[no-untyped-def]
    """For each window: add all parts into `sums`, one after the other, then write the sums in index order."""
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


@jit
def _unmarked(index_at, value_at, sizes, starts, ends, sums, bits, touched, words, out_indices, out_bits):  # type: ignore[no-untyped-def]
    """As _marked, for floats, with lanes. `sums`, of which `bits` is a view, holds -0 everywhere before and after."""
    count = 0
    parts = sizes.size
    zero = sums.dtype.type(0)
    while True:
        base = np.uint64(0)
        found = False
        for p in range(parts):
            if starts[p] < sizes[p]:
                first = np.uint64(array_at(index_at[p], sizes[p], out_indices)[starts[p]])
                if not found or first < base:
                    base = first
                    found = True
        if not found:
            return count
        entries = 0
        last = np.uint64(0)  # beyond the window's last entry
        for p in range(parts):
            ends[p] = starts[p]
            if starts[p] < sizes[p]:
                indices = array_at(index_at[p], sizes[p], out_indices)
                ends[p] = end(indices, starts[p], base + np.uint64(WINDOW))
                entries += ends[p] - starts[p]
                if ends[p] > starts[p]:
                    last = max(last, np.uint64(indices[ends[p] - 1]) - base)
        groups = (np.int64(last) >> SHIFT) + 1
        crowded = 2 * entries > groups
        for p in range(parts):
            indices = array_at(index_at[p], sizes[p], out_indices)
            values = array_at(value_at[p], sizes[p], sums)
            if crowded:
                for i in range(starts[p], ends[p]):
                    sums[np.int64(np.uint64(indices[i]) - base)] += values[i] + zero
            else:
                for i in range(starts[p], ends[p]):
                    j = np.int64(np.uint64(indices[i]) - base)
                    sums[j] += values[i] + zero
                    touched[j >> SHIFT] = 1
            starts[p] = ends[p]
        if crowded:
            for group in range(groups):
                count = emit_block(bits, group << SHIFT, base, out_indices, out_bits, count)
        else:
            for w in range((groups + 7) >> 3):
                word = words[w]
                if word != 0:
                    words[w] = 0
                    while word != 0:
                        group = (w << 3) + (np.int64(trailing_zeros(word)) >> 3)
                        word &= word - np.uint64(1)
                        count = emit_block(bits, group << SHIFT, base, out_indices, out_bits, count)


def merge_sum(parts: Sequence[tuple[Array, Array]], dtype: np.dtype[np.generic]) -> tuple[Array, Array]:
    parts = [part for part in parts if part[0].size] or list(parts[:1])
    if not parts or parts[0][0].size == 0:
        return reference.merge_sum(parts, dtype)
    if len(parts) == 1:
        return parts[0][0], parts[0][1].astype(dtype) + dtype.type(0)  # -0 becomes +0, as in any sum that starts at +0
    indices = [np.ascontiguousarray(i) for i, _ in parts]
    values = [_as(v, dtype) for _, v in parts]
    sizes = np.array([i.size for i in indices])
    room = int(sizes.sum())
    span = max(int(i[-1]) for i in indices) - min(int(i[0]) for i in indices) + 1
    lanes = VECTORS and dtype.kind == "f" and dtype.itemsize >= 4 and room * WINDOW >= CROWD * span
    out_indices, out_sums = empty(room + LANES * lanes, indices[0].dtype), empty(room + LANES * lanes, dtype)
    if lanes:
        kind = np.dtype(f"u{dtype.itemsize}")
        index_at = np.array([i.ctypes.data for i in indices])
        value_at = np.array([v.ctypes.data for v in values])
        sums, touched = np.full(WINDOW, -0.0, dtype), np.zeros(GROUPS, np.uint8)
        state = (
            sizes,
            np.zeros_like(sizes),
            np.empty_like(sizes),
            sums,
            sums.view(kind),
            touched,
            touched.view(np.uint64),
        )
        count = _unmarked(index_at, value_at, *state, out_indices, out_sums.view(kind))
    else:
        stops = np.cumsum(sizes)
        sums = np.zeros(WINDOW, dtype)
        marks, summary = np.zeros(WINDOW >> 6, np.uint64), np.zeros(WINDOW >> 12, np.uint64)
        joined = np.concatenate(indices), np.concatenate(values)
        count = _marked(*joined, stops - sizes, stops, sums, marks, summary, out_indices, out_sums)
    return out_indices[:count], out_sums[:count]


def _as(values: Array, dtype: np.dtype[np.generic]) -> Array:
    if values.dtype == np.float16 and dtype == np.float32:
        return from_float16(values)
    return np.ascontiguousarray(values, dtype)
