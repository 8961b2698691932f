"""Kernels of the wire formats: blocks of neighbouring indices, bitmaps, hashed slots, narrow floats."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsecoll.kernels.keys import Array
from sparsecoll.kernels.memory import empty

__all__ = ["bitmap_read", "bitmap_write", "block_indices", "block_ranges", "block_write", "blocks_fit"]
__all__ += ["from_bfloat16", "from_float16", "hash_slots", "numbers_read", "numbers_write", "scatter_add_marked"]
__all__ += ["slots_write", "to_bfloat16", "to_float16"]


def block_ranges(indices: Array, gap: int) -> tuple[Array, Array]:
    """The start and the length (uint64) of each block: more than `gap` coordinates lie between two of them."""
    far = np.ones(indices.size, bool)
    far[1:] = np.diff(indices) > gap + 1
    return ranges_from(indices, np.flatnonzero(far))


def ranges_from(indices: Array, heads: Array) -> tuple[Array, Array]:
    """`block_ranges`, of which `heads` are the positions at which a block begins."""
    starts, lasts = indices[heads].astype(np.uint64), np.concatenate([heads[1:] - 1, heads[:1] + indices.size - 1])
    return starts, indices[lasts].astype(np.uint64) - starts + np.uint64(1)


def blocks_fit(starts: Array, lengths: Array, total: int, length: int) -> bool:
    """Whether blocks of `total` values are in order, apart from each other, and inside a vector; any numbers."""
    ends = starts + lengths
    fit = bool((lengths <= total).all() and (lengths > 0).all() and (starts < length).all() and (ends <= length).all())
    return fit and int(lengths.sum()) == total and not (starts[1:] < ends[:-1]).any()


def block_write(indices: Array, values: Array, gap: int, out: Array) -> None:
    """Write the values of all blocks one after the other, zeros in their gaps."""
    out[:] = 0
    steps = np.diff(indices.astype(np.int64), prepend=-1)
    steps = np.where(steps > gap + 1, 1, steps)
    steps[:1] = 0
    out[np.cumsum(steps)] = values


def block_indices(starts: Array, lengths: Array, positions: Array, dtype: Any = np.uint64) -> Array:
    """The index at each ascending position in the concatenation of all blocks. `starts`, `lengths`: uint64."""
    indices = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths.astype(np.int64))
    indices += np.arange(indices.size, dtype=np.uint64)
    return indices[positions].astype(dtype, copy=False)


def numbers_write(numbers: Array, width: int, out: Array) -> None:
    """Write the `width` lowest bytes of each uint64."""
    out.reshape(-1, width)[:] = numbers.view(np.uint8).reshape(-1, 8)[:, :width]


def numbers_read(data: Array, width: int) -> Array:
    """The uint64 of which numbers_write has written the `width` lowest bytes."""
    wide = empty(data.size // width * 8, np.uint8, data)
    wide[:] = 0
    wide.reshape(-1, 8)[:, :width] = data.reshape(-1, width)
    return wide.view(np.uint64)


def bitmap_write(indices: Array, first: int, out: Array) -> None:
    """Set bit (index - first) of the uint64 words of `out`, the rest 0."""
    bits = np.zeros(64 * out.size, np.uint8)
    bits[indices.astype(np.uint64) - np.uint64(first)] = 1
    out[:] = np.packbits(bits, bitorder="little").view("<u8")


def bitmap_read(words: Array, first: int, count: int, dtype: Any) -> Array | None:
    """The indices whose bits are set; None unless there are `count` of them."""
    set_bits = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    return (set_bits.astype(np.uint64) + np.uint64(first)).astype(dtype) if set_bits.size == count else None


def hash_slots(indices: Array, slots: int, multipliers: tuple[int, int, int]) -> Array:
    """int64 slot in [0, slots) of each index: ((a*low + b*high + c) mod 2^64 >> 32) * slots >> 32.

    low and high are the index's 32-bit halves; with random 64-bit a, b, c the 32 upper bits are strongly universal
    (Dietzfelbinger's multiply-shift for pairs, as in Thorup, "High Speed Hashing for Integers and Strings", section 3).
    """
    a, b, c = (np.uint64(m) for m in multipliers)
    wide = indices.astype(np.uint64)
    with np.errstate(over="ignore"):
        mixed = a * (wide & np.uint64(2**32 - 1)) + b * (wide >> np.uint64(32)) + c
    return (((mixed >> np.uint64(32)) * np.uint64(slots)) >> np.uint64(32)).astype(np.int64)


def slots_write(slots: Array, out: Array) -> None:
    """out[slot of entry i] = i, for i ascending: a later entry overwrites an earlier one. int64; unused slots: -1."""
    out[:] = -1
    out[slots] = np.arange(slots.size)  # NumPy keeps the last value of a repeated index


def scatter_add_marked(dense: Array, indices: Array, values: Array) -> int:
    """dense[index] += value in the order given, for indices below n; returns how many others there were."""
    inside = indices < np.uint64(dense.size)
    with np.errstate(over="ignore", invalid="ignore"):
        np.add.at(dense, indices[inside].astype(np.int64), values[inside].astype(dense.dtype))
    return int(indices.size - np.count_nonzero(inside))


def to_bfloat16(values: Array) -> Array:
    """float32 as the upper halves of their bits (uint16): rounded to nearest even, finite ones stay finite."""
    bits = values.view(np.uint32)
    narrow = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    special = (bits & 0x7F800000) == 0x7F800000
    narrow[special] = (bits[special] >> 16).astype(np.uint16) | ((bits[special] & 0xFFFF) != 0)
    narrow[((narrow & 0x7FFF) == 0x7F80) & ~special] -= 1
    return narrow


def from_bfloat16(stored: Array) -> Array:
    """The float32 that uint16 upper halves stand for."""
    return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_float16(values: Array) -> Array:
    """float32 or float64 as float16: rounded to nearest even, finite ones cut to the largest finite value."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        narrow = values.astype(np.float16)
    over = np.isinf(narrow) & np.isfinite(values)
    narrow[over] = np.copysign(np.float16(65504), values[over]).astype(np.float16)
    return narrow


def from_float16(stored: Array) -> Array:
    """float16 as float32."""
    return stored.astype(np.float32)
