"""The largest values of each chunk of a vector (compressor chunktopk): a block of threads for each chunk."""

from __future__ import annotations

import numpy as np

from sparsecoll.kernels.gpu import device
from sparsecoll.kernels.gpu.device import Array, launch, types
from sparsecoll.kernels.keys import Chunks, Pass, Taken, index_dtype


def chunk_topk(values: Array, work: Pass, chunks: Chunks) -> tuple[int, Array, Array, Array]:
    """As in the reference; the host reads the number of values and `wrong`."""
    count, blocks, index = chunks.counts.size, chunks.blocks.size - 1, index_dtype(values.size)
    slots = np.concatenate([np.zeros(1, np.int64), np.cumsum(chunks.counts)])
    edges, starts, at = (device.to_device(a) for a in (chunks.edges, chunks.blocks, slots))
    places, found = device.empty(int(slots[-1]), index), device.empty(count, np.uint64)
    wrong = device.zeros(1, np.uint64)
    macros, grid = types(values, index), {"blocks": min(max(count, 1), device.BLOCKS)}
    addend, scale = (None, 1.0) if work.add is None else work.add
    addend = None if addend is None else addend.astype(values.dtype, copy=False)
    formed = (values, work.source, addend, np.float64(scale))
    launch("chunks", "chunk_select", count, *formed, edges, at, count, places, found, wrong, macros=macros, **grid)
    ends = np.cumsum(found).astype(np.int64)
    first, total = ~int(wrong[0]) & (2**64 - 1), int(ends[-1]) if count else 0
    indices, codes = device.empty(total, index), device.empty(total, np.uint8)
    packed, levels = device.empty(-(-total // 4), np.uint8), device.zeros((blocks, 2), np.float32)
    if first < values.size:
        return first, indices, packed, levels
    given = (values, starts, blocks, at, found, ends, places, indices, codes, levels)
    launch("chunks", "chunk_quantize", count, *given, macros=macros, **grid)
    launch("chunks", "chunk_pack", total, codes, total, packed)
    return -1, indices, packed, levels


def chunk_sum(parts: list[Taken], starts: Array, divisor: float, out: Array, add: bool) -> None:
    if not add:
        out[:] = 0
    begins = device.to_device(starts)
    for indices, codes, levels in parts:
        given = (indices, codes, levels, indices.size, begins, starts.size, np.float64(divisor), out)
        launch("chunks", "chunk_add", indices.size, *given, macros=types(out, indices))
