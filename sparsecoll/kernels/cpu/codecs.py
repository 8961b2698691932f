"""Kernels of the wire formats: blocks of neighbouring indices, bitmaps, hashed slots, narrow floats."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsecoll.kernels import reference
from sparsecoll.kernels.cpu.lanes import VECTORS, jit, load64, narrowed, store64, trailing_zeros, widened
from sparsecoll.kernels.keys import Array
from sparsecoll.kernels.memory import empty, filled, readonly

INFINITY, LARGEST_HALF = np.float32(np.inf), np.float32(65504)


@jit
def _count_blocks(indices, gap):  # type: ignore[no-untyped-def]
    count = min(indices.size, 1)
    for i in range(1, indices.size):
        count += indices[i] - indices[i - 1] > gap
    return count


@jit
def _block_ranges(indices, gap, starts, lengths):  # type: ignore[no-untyped-def]
    block = 0  # the next one, whose start is written until it has begun: no branch
    for i in range(indices.size):
        index = np.uint64(indices[i])
        starts[block] = index
        block += i == 0 or indices[i] - indices[i - 1] > gap
        lengths[block - 1] = index
    for i in range(lengths.size):
        lengths[i] += np.uint64(1) - starts[i]


@jit
def _blocks_fit(starts, lengths, total, length):  # type: ignore[no-untyped-def]
    fit, end, held = True, np.uint64(0), np.uint64(0)
    for i in range(starts.size):
        fit &= (starts[i] >= end) & (starts[i] < length) & (lengths[i] <= total) & (lengths[i] > np.uint64(0))
        end = starts[i] + lengths[i]
        held += lengths[i]
        fit &= end <= length
    return fit and held == total


@jit
def numbers_write(numbers, width, out):  # type: ignore[no-untyped-def]
    whole = max(0, numbers.size - 8)
    for i in range(whole):  # what is written too much, the next ones overwrite
        store64(out, i * width, numbers[i])
    for i in range(whole, numbers.size):
        for byte in range(width):
            out[i * width + byte] = numbers[i] >> np.uint64(8 * byte)


@jit
def _numbers_read(data, width, out):  # type: ignore[no-untyped-def]
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - 8 * width)
    whole = max(0, out.size - 8)
    for i in range(whole):
        out[i] = load64(data, i * width) & mask
    for i in range(whole, out.size):
        out[i] = 0
        for byte in range(width):
            out[i] |= np.uint64(data[i * width + byte]) << np.uint64(8 * byte)


@jit
def _block_write(indices, values, gap, out):  # type: ignore[no-untyped-def]
    offset = 0
    for i in range(indices.size):
        if i > 0:
            step = np.int64(indices[i] - indices[i - 1])
            offset += step if step <= gap + 1 else 1
        out[offset] = values[i]


@jit
def _block_indices(starts, lengths, positions, out):  # type: ignore[no-untyped-def]
    block, begin = 0, 0
    end = np.int64(lengths[0]) if lengths.size else 0
    for i in range(positions.size):
        position = np.int64(positions[i])
        while position >= end:
            block += 1
            begin, end = end, end + np.int64(lengths[block])
        out[i] = starts[block] + np.uint64(position - begin)


@jit
def _bitmap_write(indices, first, out):  # type: ignore[no-untyped-def]
    for i in range(indices.size):
        bit = np.uint64(indices[i]) - first
        out[np.int64(bit >> np.uint64(6))] |= np.uint64(1) << (bit & np.uint64(63))


@jit
def _bitmap_read(words, first, out):  # type: ignore[no-untyped-def]
    count = 0
    for w in range(words.size):
        word = words[w]
        base = first + np.uint64(64 * w)
        while word != 0:
            if count == out.size:
                return count + 1
            out[count] = base + np.uint64(trailing_zeros(word))
            word &= word - np.uint64(1)
            count += 1
    return count


@jit
def _hash_slots(indices, slots, a, b, c, out):  # type: ignore[no-untyped-def]
    half = np.uint64(32)
    for i in range(indices.size):
        wide = np.uint64(indices[i])
        mixed = a * (wide & np.uint64(0xFFFFFFFF)) + b * (wide >> half) + c
        out[i] = ((mixed >> half) * slots) >> half


@jit
def _scatter_add_marked(dense, indices, values):  # type: ignore[no-untyped-def]
    marked = 0
    for i in range(indices.size):
        if indices[i] < dense.size:
            dense[np.int64(indices[i])] += dense.dtype.type(values[i])
        else:
            marked += 1
    return marked


@jit
def _to_bfloat16(bits, out):  # type: ignore[no-untyped-def]
    for i in range(bits.size):
        b = bits[i]
        upper = np.uint32(b >> np.uint32(16))
        near = np.uint32(b + np.uint32(np.uint32(0x7FFF) + np.uint32(upper & np.uint32(1))))  # narrow: vectorised
        near = np.uint32(near >> np.uint32(16))
        near = np.uint32(near - np.uint32(np.uint32(near & np.uint32(0x7FFF)) == np.uint32(0x7F80)))
        kept = np.uint32(upper | np.uint32(np.uint32(b & np.uint32(0xFFFF)) != np.uint32(0)))
        special = np.uint32(b & np.uint32(0x7F800000)) == np.uint32(0x7F800000)
        out[i] = kept if special else near


@jit
def _to_float16(values, out):  # type: ignore[no-untyped-def]
    for i in range(values.size):
        x = values[i]
        out[i] = narrowed(min(max(x, -LARGEST_HALF), LARGEST_HALF) if abs(x) < INFINITY else x)


@jit
def _from_float16(stored, out):  # type: ignore[no-untyped-def]
    for i in range(stored.size):
        out[i] = widened(stored[i])


def block_ranges(indices: Array, gap: int) -> tuple[Array, Array]:
    most = indices.dtype.type(gap + 1)
    count = _count_blocks(indices, most)
    starts, lengths = empty(count + 1, np.uint64), empty(count, np.uint64)
    _block_ranges(indices, most, starts, lengths)
    return starts[:count], lengths


def blocks_fit(starts: Array, lengths: Array, total: int, length: int) -> bool:
    return bool(_blocks_fit(starts, lengths, np.uint64(total), np.uint64(length)))


def numbers_read(data: Array, width: int) -> Array:
    return filled(data.size // width, np.uint64, _numbers_read, data, width)


def block_write(indices: Array, values: Array, gap: int, out: Array) -> None:
    out[:] = 0
    bits = np.dtype(f"u{out.dtype.itemsize}")
    _block_write(indices, values.view(bits), gap, out.view(bits))


def block_indices(starts: Array, lengths: Array, positions: Array, dtype: Any = np.uint64) -> Array:
    return filled(positions.size, dtype, _block_indices, starts, lengths, positions)


def bitmap_write(indices: Array, first: int, out: Array) -> None:
    out[:] = 0
    _bitmap_write(indices, np.uint64(first), out)


def bitmap_read(words: Array, first: int, count: int, dtype: Any) -> Array | None:
    out = empty(count, dtype)
    return out if _bitmap_read(words, np.uint64(first), out) == count else None


def hash_slots(indices: Array, slots: int, multipliers: tuple[int, int, int]) -> Array:
    numbers = (np.uint64(number) for number in (slots, *multipliers))
    return filled(indices.size, np.int64, _hash_slots, indices, *numbers)


def scatter_add_marked(dense: Array, indices: Array, values: Array) -> int:
    if np.float16 in (dense.dtype, values.dtype):
        return reference.scatter_add_marked(dense, indices, values)
    return int(_scatter_add_marked(dense, indices, values))


def to_bfloat16(values: Array) -> Array:
    return filled(values.size, np.uint16, _to_bfloat16, values.view(np.uint32))


def to_float16(values: Array) -> Array:
    if not VECTORS or values.dtype != np.float32:
        return reference.to_float16(values)
    return filled(values.size, np.uint16, _to_float16, readonly(np.ascontiguousarray(values))).view(np.float16)


def from_float16(stored: Array) -> Array:
    if not VECTORS:
        return reference.from_float16(stored)
    bits = readonly(np.ascontiguousarray(stored)).view(np.uint16)
    return filled(stored.size, np.float32, _from_float16, bits)
