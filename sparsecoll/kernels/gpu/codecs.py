"""Kernels of the wire formats: blocks of neighbouring indices, bitmaps, hashed slots, narrow floats."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsecoll.kernels.gpu import device
from sparsecoll.kernels.gpu.device import Array, launch, types
from sparsecoll.kernels.gpu.sums import popcount_ends
from sparsecoll.kernels.reference.codecs import ranges_from


def block_ranges(indices: Array, gap: int) -> tuple[Array, Array]:
    return ranges_from(indices, np.flatnonzero(_block_steps(indices, gap, None)).astype(np.int64, copy=False))


def _block_steps(indices: Array, gap: int, step: Array | None) -> Array:
    head = device.empty(indices.size, np.uint8)
    launch("codecs", "block_steps", indices.size, indices, indices.size, gap, step, head, macros=types(indices=indices))
    return head


def block_write(indices: Array, values: Array, gap: int, out: Array) -> None:
    out[:] = 0
    step = device.empty(indices.size, np.int64)
    _block_steps(indices, gap, step)
    launch("codecs", "put", indices.size, out, np.cumsum(step), values, indices.size, macros=types(values))


def block_indices(starts: Array, lengths: Array, positions: Array, dtype: Any = np.uint64) -> Array:
    ends, positions = np.cumsum(lengths.astype(np.int64)), positions.astype(np.int64, copy=False)
    out = device.empty(positions.size, np.uint64)
    given = (starts.copy(), lengths.copy(), ends, starts.size, positions, positions.size, out)
    launch("codecs", "block_indices", positions.size, *given)
    return out.astype(dtype, copy=False)


def bitmap_write(indices: Array, first: int, out: Array) -> None:
    out[:] = 0
    given = (indices, indices.size, first, out.view(np.uint32))
    launch("codecs", "bitmap_write", indices.size, *given, macros=types(indices=indices))


def bitmap_read(words: Array, first: int, count: int, dtype: Any) -> Array | None:
    halves = words.view(np.uint32)
    out, ends = device.empty(count, dtype), popcount_ends(halves)
    if (int(ends[-1]) if halves.size else 0) != count:
        return None
    launch("codecs", "bitmap_read", halves.size, halves, ends, halves.size, first, out, macros=types(indices=out))
    return out


def hash_slots(indices: Array, slots: int, multipliers: tuple[int, int, int]) -> Array:
    out = device.empty(indices.size, np.int64)
    given = (indices, indices.size, slots, *multipliers, out)
    launch("codecs", "hash_slots", indices.size, *given, macros=types(indices=indices))
    return out


def slots_write(slots: Array, out: Array) -> None:
    out[:] = 0
    launch("codecs", "slots_write", slots.size, slots, slots.size, out.view(np.uint64))
    out -= 1


def _converted(kernel: str, values: Array, dtype: Any, macros: tuple[str, ...] = ()) -> Array:
    out = device.empty(values.size, dtype)
    launch("codecs", kernel, values.size, values, values.size, out, macros=macros)
    return out


def to_bfloat16(values: Array) -> Array:
    return _converted("to_bfloat16", values, np.uint16)


def to_float16(values: Array) -> Array:
    return _converted("to_float16", values, np.float16, (f"-DFROM={device.code(values.dtype)}",))


def from_float16(stored: Array) -> Array:
    return _converted("from_float16", stored, np.float32)
