"""Rice codes of the gaps between indices (format packed): a block of threads codes a block of gaps."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsecoll.kernels.gpu import device
from sparsecoll.kernels.gpu.device import Array, launch, types, u32
from sparsecoll.kernels.reference.rice import RICE_BLOCKS, rice_runs

SHARES = 13  # blocks of threads for each run of the sample, as in rice.cu


def rice_block(indices: Array) -> int:
    """As in the reference; the host reads the lengths only."""
    runs, lengths = rice_runs(indices.size), device.zeros(len(RICE_BLOCKS), np.uint64)
    given = (indices, indices.size, runs.step, lengths)
    launch("rice", "rice_sample", indices.size, *given, macros=types(indices=indices), blocks=SHARES * len(runs))
    return RICE_BLOCKS[int(lengths.get().argmin())]


def rice_table(indices: Array, block: int) -> Array:
    table = device.empty(-(-indices.size // block), np.uint16)
    given = (indices, indices.size, u32(block), table)
    launch("rice", "rice_table", indices.size, *given, macros=types(indices=indices), blocks=table.size)
    return table


def rice_offsets(table: Array, count: int, block: int) -> Array:
    offsets = device.zeros(1, np.int64) if count == 0 else device.empty(table.size + 1, np.int64)
    launch("rice", "rice_offsets", count, table, table.size, count, u32(block), offsets, blocks=1)
    return offsets


def rice_encode(indices: Array, table: Array, block: int, out: Array) -> None:
    words = device.zeros(-(-out.size // 4), np.uint32)  # aligned, which `out` may not be
    given = (indices, indices.size, u32(block), table, rice_offsets(table, indices.size, block), words)
    launch("rice", "rice_encode", indices.size, *given, macros=types(indices=indices), blocks=table.size)
    out[:] = words.view(np.uint8)[: out.size]


def rice_decode(
    table: Array, payload: Array, block: int, first: int, count: int, limit: int, dtype: Any
) -> Array | None:
    indices = device.empty(count, dtype)
    if count == 0:
        return indices
    steps, damaged = device.empty(count, np.uint64), device.zeros(1, np.uint32)
    given = (table, payload, rice_offsets(table, count, block), u32(block), count, steps, damaged)
    launch("rice", "rice_decode", count, *given, blocks=table.size)
    ends = np.cumsum(steps)
    launch("rice", "rice_indices", count, ends, count, first, limit, indices, damaged, macros=types(indices=indices))
    return None if int(damaged[0]) else indices
