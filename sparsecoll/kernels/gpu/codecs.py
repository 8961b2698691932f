"""Kernels of the wire formats: blocks of neighbouring indices, bitmaps, hashed slots, quantised and narrow floats."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsecoll.kernels.gpu import device
from sparsecoll.kernels.gpu.device import launch, types, u32, u64
from sparsecoll.kernels.gpu.sums import popcount_ends

Array = Any  # of CuPy


def block_heads(indices: Array, gap: int) -> Array:
    return np.flatnonzero(_block_steps(indices, gap, None)).astype(np.int64, copy=False)


def _block_steps(indices: Array, gap: int, step: Array | None) -> Array:
    head = device.empty(indices.size, np.uint8)
    launch("codecs", "block_steps", indices.size, indices, u64(indices.size), u64(gap), step, head,
           macros=types(indices=indices))  # fmt: skip
    return head


def block_write(indices: Array, values: Array, gap: int, out: Array) -> None:
    out[:] = 0
    step = device.empty(indices.size, np.int64)
    _block_steps(indices, gap, step)
    launch("codecs", "put", indices.size, out, np.cumsum(step), values, u64(indices.size), macros=types(values))


def block_indices(starts: Array, lengths: Array, positions: Array) -> Array:
    ends, positions = np.cumsum(lengths.astype(np.int64)), positions.astype(np.int64, copy=False)
    out = device.empty(positions.size, np.uint64)
    given = (starts.copy(), lengths.copy(), ends, u64(starts.size), positions, u64(positions.size), out)
    launch("codecs", "block_indices", positions.size, *given)
    return out


def bitmap_write(indices: Array, first: int, out: Array) -> None:
    out[:] = 0
    launch("codecs", "bitmap_write", indices.size, indices, u64(indices.size), u64(first), out.view(np.uint32),
           macros=types(indices=indices))  # fmt: skip


def bitmap_read(words: Array, first: int, count: int, dtype: Any) -> Array | None:
    halves = words.view(np.uint32)
    out, ends = device.empty(count, dtype), popcount_ends(halves)
    if (int(ends[-1]) if halves.size else 0) != count:
        return None
    launch("codecs", "bitmap_read", halves.size, halves, ends, u64(halves.size), u64(first), out,
           macros=types(indices=out))  # fmt: skip
    return out


def hash_slots(indices: Array, slots: int, multipliers: tuple[int, int, int]) -> Array:
    out = device.empty(indices.size, np.int64)
    given = (indices, u64(indices.size), u64(slots), *(u64(m) for m in multipliers), out)
    launch("codecs", "hash_slots", indices.size, *given, macros=types(indices=indices))
    return out


def slots_write(slots: Array, out: Array) -> None:
    out[:] = 0
    launch("codecs", "slots_write", slots.size, slots, u64(slots.size), out.view(np.uint64))
    out -= 1


def to_bfloat16(values: Array) -> Array:
    out = device.empty(values.size, np.uint16)
    launch("codecs", "to_bfloat16", values.size, values, u64(values.size), out)
    return out


def from_bfloat16(stored: Array) -> Array:
    out = device.empty(stored.size, np.float32)
    launch("codecs", "from_bfloat16", stored.size, stored, u64(stored.size), out)
    return out


def to_float16(values: Array) -> Array:
    out = device.empty(values.size, np.float16)
    macros = (f"-DFROM={device.code(values.dtype)}",)
    launch("codecs", "to_float16", values.size, values, u64(values.size), out, macros=macros)
    return out


def from_float16(stored: Array) -> Array:
    out = device.empty(stored.size, np.float32)
    launch("codecs", "from_float16", stored.size, stored, u64(stored.size), out)
    return out


def quantize(values: Array, first: int, bits: int, bucket: int, seed: int, scales: Array, out: Array) -> None:
    launch("codecs", "bucket_scales", values.size, values, u64(values.size), u64(first), u64(bucket),
           u64(scales.size), scales, blocks=min(scales.size, device.BLOCKS))  # fmt: skip
    launch("codecs", "quantize", out.size, values, u64(values.size), u64(first), u32(bits), u64(bucket), u64(seed),
           scales, out, u64(out.size))  # fmt: skip


def dequantize(codes: Array, first: int, count: int, bits: int, bucket: int, scales: Array) -> Array:
    out = device.empty(count, np.float32)
    given = (codes, u64(count), u64(first), u32(bits), u64(bucket), scales, out)
    launch("codecs", "dequantize", count, *given)
    return out


def add_signs(out: Array, bits: Array, start: int, scale: float) -> None:
    launch("codecs", "add_signs", out.size, out, u64(out.size), bits, u64(start), np.float64(scale), macros=types(out))
