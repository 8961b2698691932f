"""The pass of a selection over the values, compiled: it takes the entries above a threshold.

It can also replace a gradient by one with momentum, add scale * addend to the values before it selects, set the
selected values to zero, and do all this in other memory. A chunk stays in the first-level cache between these steps, so
that memory is read and written once.
"""

from __future__ import annotations

import numpy as np

from sparsecoll.kernels.cpu.additions import add_range, sum_range, velocity_range
from sparsecoll.kernels.cpu.lanes import (
    BLOCK,
    compress_block,
    inlined,
    jit,
    magnitude_key,
    prefetch_range,
)
from sparsecoll.kernels.reference.selection import MOMENT_LANES, MOMENT_ROWS

OFTEN = 10  # entries taken of a chunk; after more of them, branches would often be predicted wrongly in the next one
FAR = 1 << 20  # items of an array from which on it is not in a core's caches when a pass begins
AHEAD = 1024  # items from a block to the one that is loaded meanwhile
CHUNK = 2048  # items per chunk; a multiple of MOMENT_LANES and of lanes.BLOCK
LINE = MOMENT_ROWS * MOMENT_LANES  # items of a line of moments; a multiple of CHUNK


@jit
def _copy(values, out, start, stop):  # type: ignore[no-untyped-def]
    target, source = out[start:stop], values[start:stop]
    for i in range(target.size):
        target[i] = source[i]


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
def _prefetch(bits, new_velocity, start):  # type: ignore[no-untyped-def]
    """Have the processor load a block of what the pass writes: stores wait longer for memory than loads."""
    prefetch_range(bits, start, start + BLOCK)
    if new_velocity is not None:
        prefetch_range(new_velocity, start, start + BLOCK)


@inlined
def _take(  # type: ignore[no-untyped-def]
    bits,
    origin,
    mask,
    key,
    indices,
    addend,
    scale,
    velocity,
    new_velocity,
    factor,
    nesterov,
    first,
    start,
    stop,
    out_i,
    out_v,
    count,
    clear,
    often,
    far,
):
    """Append the selected items of a chunk to the outputs, which have room for all of it and BLOCK more.

    Items below `first` are handled BLOCK at a time; blocks with none are skipped unless some are so `often`. Unless
    `origin` is None, these items are read there, and written to `bits`.
    """
    if often:  # a loop for each value: one loop takes 1.2 to 1.6 times as long where a tenth and more is taken
        for at in range(start, first, BLOCK):
            if far and origin is None:
                _prefetch(bits, new_velocity, at + AHEAD)
            count = compress_block(
                bits,
                origin,
                at,
                mask,
                key,
                indices,
                addend,
                scale,
                velocity,
                new_velocity,
                factor,
                out_i,
                out_v,
                count,
                clear,
                nesterov,
                True,
            )
    else:
        for at in range(start, first, BLOCK):
            if far and origin is None:
                _prefetch(bits, new_velocity, at + AHEAD)
            count = compress_block(
                bits,
                origin,
                at,
                mask,
                key,
                indices,
                addend,
                scale,
                velocity,
                new_velocity,
                factor,
                out_i,
                out_v,
                count,
                clear,
                nesterov,
                False,
            )
    for i in range(first, stop):
        x = bits[i]
        if magnitude_key(x, mask) >= key:
            if indices is None:
                out_i[count] = i
            else:
                out_i[count] = indices[i]
            out_v[count] = x
            count += 1
            if clear is not None:
                bits[i] = 0
    return count


@jit
def _move(gradient, velocity, factor, nesterov, new_velocity, out, start, stop):  # type: ignore[no-untyped-def]
    """Write the new velocity and what replaces the gradient."""
    if nesterov is None:
        sum_range(gradient, velocity, factor, new_velocity, start, stop)
        _copy(new_velocity, out, start, stop)
    else:
        velocity_range(velocity, gradient, factor, new_velocity, start, stop)
        sum_range(gradient, new_velocity, out.dtype.type(1), out, start, stop)


@jit
def select_chunks(  # type: ignore[no-untyped-def]
    values,
    bits,
    origin,
    source,
    mask,
    key,
    indices,
    addend,
    added,
    scale,
    sums,
    lines,
    start,
    out_i,
    out_v,
    count,
    clear,
    velocity,
    new_velocity,
    factor,
    nesterov,
):
    """Select from `start` on until the end, or until the outputs are nearly full: (where it stopped, the count).

    `source` and `added` are the bit patterns of `origin` and `addend` where `_take` adds them, else None. It then also
    replaces a gradient by that with momentum, unless `velocity` is None.
    """
    often, far = False, bits.size >= FAR
    while start < bits.size:
        stop = min(start + CHUNK, bits.size)
        if count + (stop - start) + BLOCK > out_i.size:
            break
        first = stop - (stop - start) % BLOCK
        if velocity is not None:
            _move(values if origin is None else origin, velocity, factor, nesterov, new_velocity, values, first, stop)
            add_range(values, addend, scale, first, stop)
        elif origin is not None:
            if addend is not None:
                sum_range(origin, addend, scale, values, start if added is None else first, stop)
            else:
                _copy(origin, bits, start, stop)
        elif addend is not None:
            add_range(values, addend, scale, start if added is None else first, stop)
        if sums is not None:
            _add_moments(values, start, stop, sums, lines)
        before = count
        count = _take(
            bits,
            source,
            mask,
            key,
            indices,
            added,
            scale,
            velocity,
            new_velocity,
            factor,
            nesterov,
            first,
            start,
            stop,
            out_i,
            out_v,
            count,
            clear,
            often,
            far,
        )
        often = count - before > OFTEN
        start = stop
    return start, count


@jit
def select_all(bits, mask, key, indices, start, out_i, out_v, count):  # type: ignore[no-untyped-def]
    """Select from `start` to the end; the outputs have room for all items."""
    first = bits.size - (bits.size - start) % BLOCK
    stop = bits.size
    return _take(
        bits,
        None,
        mask,
        key,
        indices,
        None,
        None,
        None,
        None,
        None,
        None,
        first,
        start,
        stop,
        out_i,
        out_v,
        count,
        None,
        True,
        False,
    )
