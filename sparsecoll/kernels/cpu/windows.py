"""The sum of sparse vectors whose entries are dense, one window of the index space after the other.

A window initially holds -0 everywhere. No sum can be -0 if +0 is added to it, so the sums themselves show which
coordinates have entries, and a block of them at a time is written out and reset.
"""

from __future__ import annotations

import numpy as np

from sparsecoll.kernels.cpu.lanes import BLOCK, VECTORS, array_at, emit_block, jit
from sparsecoll.kernels.cpu.sums import add_below, addresses
from sparsecoll.kernels.keys import Array
from sparsecoll.kernels.memory import empty

WINDOW = 1 << 16  # indices summed at a time: 256 KiB of float32
DENSE_FROM = 60 if VECTORS else 25  # a step of merging costs as much as DENSE_FROM / (bytes of an entry) coordinates


@jit
def lowest(index_at, sizes, starts, like):  # type: ignore[no-untyped-def]
    """The lowest index from `starts` on, and whether there is one."""
    index, found = np.uint64(0), False
    for p in range(sizes.size):
        if starts[p] < sizes[p]:
            first = np.uint64(array_at(index_at[p], sizes[p], like)[starts[p]])
            if not found or first < index:
                index, found = first, True
    return index, found


@jit
def _sum_windows(index_at, value_at, sizes, starts, sums, bits, out_indices, out_bits):  # type: ignore[no-untyped-def]
    """Sum all windows. `sums`, of which `bits` is a view, holds -0 everywhere before and after."""
    count = 0
    while True:
        base, found = lowest(index_at, sizes, starts, out_indices)
        if not found:
            return count
        last = np.uint64(0)  # the window's last entry
        for p in range(sizes.size):
            indices, values = array_at(index_at[p], sizes[p], out_indices), array_at(value_at[p], sizes[p], sums)
            stop = add_below(indices, values, starts[p], base, base + np.uint64(WINDOW), sums)
            if stop > starts[p]:
                last = max(last, np.uint64(indices[stop - 1]) - base)
            starts[p] = stop
        for start in range(0, np.int64(last) + 1, BLOCK):
            count = emit_block(bits, start, base, out_indices, out_bits, count)


def are_dense(indices: list[Array], dtype: np.dtype[np.generic]) -> bool:
    """Whether `sum_in_windows`, which visits every coordinate, is faster than merging the vectors."""
    entries = [i for i in indices if i.size]
    if dtype.kind != "f" or not entries:
        return False
    span = max(int(i[-1]) for i in entries) - min(int(i[0]) for i in entries) + 1
    steps = (len(entries) - 1).bit_length()
    return DENSE_FROM * steps * sum(i.size for i in entries) >= span * (entries[0].itemsize + dtype.itemsize)


def sum_in_windows(indices: list[Array], values: list[Array], dtype: np.dtype[np.generic]) -> tuple[Array, Array]:
    """merge_sum of contiguous arrays of one dtype each."""
    room = sum(i.size for i in indices) + BLOCK
    out_indices, out_sums = empty(room, indices[0].dtype), empty(room, dtype)
    kind = np.dtype(f"u{dtype.itemsize}")
    sums = np.full(WINDOW, -0.0, dtype)
    count = _sum_windows(*addresses(indices, values), sums, sums.view(kind), out_indices, out_sums.view(kind))
    return out_indices[:count], out_sums[:count]
