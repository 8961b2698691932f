"""The pass of a selection over the values, compiled: it takes the entries above a threshold.

It can also replace a gradient by one with momentum, add scale * addend to the values before it selects, set the
selected values to zero, and do all this in other memory. Memory is read and written once: all of this happens in
registers, and moments are formed of a chunk while it is in the first-level cache.
"""

from __future__ import annotations

import numpy as np

from sparsecoll.kernels.cpu.lanes import BLOCK, compress_block, inlined, jit
from sparsecoll.kernels.reference.selection import MOMENT_LANES, MOMENT_ROWS

OFTEN = 10  # entries taken of a chunk; after more of them, branches would often be predicted wrongly in the next one
FAR = 1 << 20  # items of an array from which on it is not in a core's caches when a pass begins
CHUNK = 2048  # items per chunk; a multiple of MOMENT_LANES and of lanes.BLOCK
LINE = MOMENT_ROWS * MOMENT_LANES  # items of a line of moments; a multiple of CHUNK


@jit
def _add_moments(values, start, stop, sums, lines):  # type: ignore[no-untyped-def]
    """Add a chunk to `moments_of`; `sums` (4, MOMENT_LANES) holds the columns of the current line."""
    if start % LINE == 0:
        sums[:] = 0
    x1, x2, absolute, largest = sums[0], sums[1], sums[2], sums[3]
    for row in range(start, stop, MOMENT_LANES):
        items = values[row : min(row + MOMENT_LANES, stop)]
        for j in range(items.size):  # one sum at a time: loops over two arrays are vectorised
            x1[j] += np.float64(items[j])
        for j in range(items.size):
            x2[j] += np.float64(items[j]) * np.float64(items[j])
        for j in range(items.size):
            absolute[j] += abs(np.float64(items[j]))
        for j in range(items.size):
            x = abs(np.float64(items[j]))
            largest[j] = x if x > largest[j] else largest[j]
    if stop % LINE and stop != values.size:
        return
    half = MOMENT_LANES // 2
    while half:
        for number in range(3):
            lower, upper = sums[number, :half], sums[number, half : 2 * half]
            for j in range(half):
                lower[j] += upper[j]
        lower, upper = largest[:half], largest[half : 2 * half]
        for j in range(half):
            lower[j] = upper[j] if upper[j] > lower[j] else lower[j]
        half //= 2
    line = lines[start // LINE]
    line[0], line[1], line[2], line[3] = x1[0], x2[0], absolute[0], largest[0]


@inlined
def _take(bits, mask, key, work, indices, start, stop, out, count, often, far):  # type: ignore[no-untyped-def]
    """Append the selected items of a chunk to the outputs, which have room for all of it and BLOCK more."""
    first = stop - (stop - start) % BLOCK
    if often:  # a loop for each value: one loop takes 1.2 to 1.6 times as long where a tenth and more is taken
        for at in range(start, first, BLOCK):
            count = compress_block(bits, at, mask, key, work, indices, out, count, (True, far))
    else:
        for at in range(start, first, BLOCK):
            count = compress_block(bits, at, mask, key, work, indices, out, count, (False, far))
    for at in range(first, stop):
        count = compress_block(bits, at, mask, key, work, indices, out, count, None)
    return count


@jit
def select_chunks(numbers, bits, mask, indices, sums, lines, key, start, out_i, out_v, count, clear, *work):  # type: ignore[no-untyped-def]
    """Select from `start` on until the end, or until the outputs are nearly full: (where it stopped, the count).

    Moments are those of `numbers`, unless `sums` is None. `clear` and `work` are those of `compress_block`.
    """
    often, far, out = False, bits.size >= FAR, (out_i, out_v)
    while start < bits.size:
        stop = min(start + CHUNK, bits.size)
        if count + (stop - start) + BLOCK > out_i.size:
            break
        before = count
        if sums is None:
            count = _take(bits, mask, key, (*work, clear), indices, start, stop, out, count, often, far)
        else:
            if len(work) > 0:  # what this takes does not count
                _take(bits, mask, key, (*work, None), indices, start, stop, out, count, False, far)
            _add_moments(numbers, start, stop, sums, lines)
            count = _take(bits, mask, key, (clear,), indices, start, stop, out, count, often, False)
        often = count - before > OFTEN
        start = stop
    return start, count


@jit
def select_all(bits, mask, key, indices, start, out_i, out_v, count):  # type: ignore[no-untyped-def]
    """Select from `start` to the end; the outputs have room for all items."""
    return _take(bits, mask, key, (None,), indices, start, bits.size, (out_i, out_v), count, True, False)
