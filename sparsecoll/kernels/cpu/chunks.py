"""The largest values of each chunk of a vector, as a sign and one of two magnitudes (compressor chunktopk).

A chunk is read, added to and searched while it is in the first-level cache; its values are quantized, and their errors
written, when its block of chunks is complete, while that is in the second-level cache. The chunk before gives a key
that about twice as many values reach as are selected: only these are searched for the smallest selected one.
"""

from __future__ import annotations

import math

import numpy as np

from sparsecoll.kernels.cpu.lanes import array_at, at_least, inlined, jit, magnitude_key, popcount, trailing_zeros
from sparsecoll.kernels.keys import Array, Chunks, Pass, Taken, bits_and_mask, index_dtype, nan_key
from sparsecoll.kernels.memory import data_ptr, empty, readonly
from sparsecoll.kernels.reference.chunks import CLASSES, DIGITS, LARGEST, STEPS

LANES = 64  # of `at_least`


@jit
def _form(own, start, source, addend, scale):  # type: ignore[no-untyped-def]
    """A chunk of `kernels.form`."""
    if addend is None:
        if source is not None:
            own[:] = source[start : start + own.size]
    elif source is None:
        added = addend[start : start + own.size]
        for j in range(own.size):
            own[j] += scale * added[j]
    else:
        given, added = source[start : start + own.size], addend[start : start + own.size]
        for j in range(own.size):
            own[j] = given[j] + scale * added[j]


@inlined
def _count(bits, words, mask, key):  # type: ignore[no-untyped-def]
    count = np.int64(0)
    for word in range(words):
        count += np.int64(popcount(at_least(bits, LANES * word, mask, key)))
    return count


@jit
def _gather(bits, words, mask, key, places):  # type: ignore[no-untyped-def]
    """Write the positions of values that reach the key; their number."""
    count = np.int64(0)
    for number in range(words):
        word = at_least(bits, LANES * number, mask, key)
        stop = count + np.int64(popcount(word))
        for i in range(count, max(stop, count + 1), 4):  # most often once, whatever the number
            for d in range(4):
                places[i + d] = LANES * number + np.int64(trailing_zeros(word))
                word &= word - np.uint64(1)
        count = stop
    return count


@jit
def _search(bits, words, mask, low, high, count, least, most):  # type: ignore[no-untyped-def]
    """A key that `least` values and at most `most` reach, or as few as ties allow: (key, their number, number above).

    `count` values, at least `least`, reach `low`; none, or too few, reach `high`.
    """
    kind, above = bits.dtype.type, np.int64(0)
    while count > most and high - low > kind(1):
        middle = kind(low + kind(kind(high - low) >> kind(1)))
        found = _count(bits, words, mask, middle)
        if found >= least:
            low, count = middle, found
        else:
            high, above = middle, found
    return low, count, above


@jit
def _take(bits, words, mask, wanted, guess, infinity, places, keys, base, out, done):  # type: ignore[no-untyped-def]
    """Append the indices of the largest values of a chunk to `out`: (their number, the smallest key); -1 for NaN."""
    kind = bits.dtype.type
    count = _gather(bits, words, mask, guess, places)
    if count < wanted or count > 8 * wanted + LANES:
        low, found = kind(1), _count(bits, words, mask, kind(1))
        if found > wanted:
            low, found, _ = _search(bits, words, mask, low, infinity, found, wanted, 4 * wanted)
        count = _gather(bits, words, mask, low, places)
        guess = low
    largest = kind(0)
    for j in range(count):
        keys[j] = magnitude_key(bits[places[j]], mask)
        largest = max(largest, keys[j])
    if largest >= infinity:
        return -1, guess
    some = (count + LANES - 1) // LANES
    keys[count : LANES * some] = 0
    key, left = guess, wanted
    if count > wanted:
        key, found, above = _search(keys, some, mask, guess, kind(largest + kind(1)), count, wanted, wanted)
        left = wanted - above if found > wanted else wanted
    number = np.int64(0)
    for j in range(count):
        out[done + number] = base + places[j]
        tie = np.int64(keys[j] == key)
        number += np.int64(keys[j] > key) | (tie & np.int64(left > 0))
        left -= tie
    return number, key


@jit
def _two_levels(own, bits, mask, shift, indices, members, sums, levels):  # type: ignore[no-untyped-def]
    """Write the two magnitudes; return the lowest key, shifted, that has the larger one."""
    kind, n = bits.dtype.type, indices.size
    members[:], sums[:], levels[:] = 0, 0, 0
    if n == 0:
        return np.int64(0)
    largest = kind(0)
    for j in range(n):
        largest = max(largest, magnitude_key(bits[indices[j]], mask))
    first = np.int64(largest >> shift) - (CLASSES - 1)
    magnitude = 0.0
    for j in range(n):
        magnitude = max(magnitude, np.float64(abs(own[indices[j]])))
    exponent = min(DIGITS - math.frexp(magnitude)[1], 1000)
    factor = math.ldexp(1.0, exponent)
    for j in range(n):
        at = indices[j]
        which = max(np.int64(magnitude_key(bits[at], mask) >> shift) - first, 0)
        members[which] += 1
        sums[which] += np.int64(np.float64(abs(own[at])) * factor)
    s = np.int64(0)
    for j in range(CLASSES):
        s += sums[j]
    lower, below, boundary, low, high = 0, np.int64(0), 0, 0.0, np.float64(s) / n
    best = np.float64(s) * np.float64(s) / n
    for j in range(1, CLASSES):
        lower, below = lower + members[j - 1], below + sums[j - 1]
        if 0 < lower < n:
            a, b = np.float64(below), np.float64(s - below)
            explained = a * a / lower + b * b / (n - lower)
            if explained > best:
                best, boundary, low, high = explained, j, a / lower, b / (n - lower)
    unit = math.ldexp(1.0, -exponent)
    levels[0], levels[1] = min(low * unit, LARGEST), min(high * unit, LARGEST)
    return first + boundary if boundary else np.int64(0)


@jit
def _chunk_topk(values, bits, source, addend, scale, mask, shift, infinity, chunks, buffers, indices, codes, levels):  # type: ignore[no-untyped-def]
    (edges, blocks, counts), (places, keys, padded, members, sums) = chunks, buffers
    kind, done, key = bits.dtype.type, np.int64(0), bits.dtype.type(0)
    margin = kind(kind(STEPS << shift) >> kind(3))
    for b in range(blocks.size - 1):
        first = done
        for c in range(blocks[b], blocks[b + 1]):
            start, size = edges[c], edges[c + 1] - edges[c]
            _form(values[start : start + size], start, source, addend, scale)
            own, words = bits[start : start + size], (size + LANES - 1) // LANES
            if size % LANES:
                padded[:size], padded[size : LANES * words] = own, 0
                own = padded
            guess = kind(key - margin) if key > margin else kind(1)
            number, key = _take(own, words, mask, counts[c], guess, infinity, places, keys, start, indices, done)
            if number < 0:
                for j in range(start, start + size):
                    if magnitude_key(bits[j], mask) >= infinity:
                        return j, done
            done += number
        block = indices[first:done]
        boundary = _two_levels(values, bits, mask, shift, block, members, sums, levels[b])
        low, high = values.dtype.type(levels[b, 0]), values.dtype.type(levels[b, 1])
        for i in range(first, done):
            at = indices[i]
            upper = np.int64(magnitude_key(bits[at], mask) >> shift) >= boundary
            x, level = values[at], high if upper else low
            values[at] = x + level if x < 0 else x - level
            code = np.uint8(upper) | (np.uint8(2) if x < 0 else np.uint8(0))
            codes[i >> 2] = np.uint8(codes[i >> 2] | np.uint8(code << np.uint8(2 * (i & 3))))
    return -1, done


@jit
def _chunk_sum(index_at, code_at, level_at, sizes, done, starts, divisor, add, like, out):  # type: ignore[no-untyped-def]
    """One block of chunks after the other, which all parts find in the second-level cache."""
    (like_i, like_c, like_m), kind, signed = like, out.dtype.type, np.empty(4, out.dtype)
    for b in range(starts.size):
        stop = starts[b + 1] if b + 1 < starts.size else out.size
        if not add:
            out[starts[b] : stop] = 0
        for p in range(sizes.size):
            indices, codes = array_at(index_at[p], sizes[p], like_i), array_at(code_at[p], (sizes[p] + 3) >> 2, like_c)
            levels, i = array_at(level_at[p], 2 * starts.size, like_m), done[p]
            signed[0], signed[1] = kind(levels[2 * b]) / divisor, kind(levels[2 * b + 1]) / divisor
            signed[2], signed[3] = -signed[0], -signed[1]
            while i < indices.size and indices[i] < np.uint64(stop):
                out[indices[i]] += signed[(codes[i >> 2] >> np.uint8(2 * (i & 3))) & np.uint8(3)]
                i += 1
            done[p] = i


def chunk_topk(values: Array, work: Pass, chunks: Chunks) -> tuple[int, Array, Array, Array]:
    bits, mask = bits_and_mask(values)
    kind, most = bits.dtype.type, int(chunks.counts.sum())
    room = int(np.diff(chunks.edges).max(initial=0)) + 2 * LANES
    found = (np.empty(room, np.int64), np.empty(room, bits.dtype), np.empty(room, bits.dtype))
    buffers = (*found, np.empty(CLASSES, np.int64), np.empty(CLASSES, np.int64))
    indices, codes = empty(most + 1, index_dtype(values.size)), np.zeros(-(-most // 4), np.uint8)
    levels = np.zeros((chunks.blocks.size - 1, 2), np.float32)
    source = None if work.source is None else readonly(work.source)
    addend, scale = (None, 1.0) if work.add is None else work.add
    addend = None if addend is None else readonly(addend.astype(values.dtype, copy=False))
    shift = kind(np.finfo(values.dtype).nmant - int(math.log2(STEPS)))
    given = (values.dtype.type(scale), kind(mask), shift, kind(nan_key(values.dtype) - 1))
    wrong, count = _chunk_topk(values, bits, source, addend, *given, tuple(chunks), buffers, indices, codes, levels)
    return wrong, indices[:count], codes[: -(-count // 4)], levels


def chunk_sum(parts: list[Taken], starts: Array, divisor: float, out: Array, add: bool) -> None:
    columns = [[data_ptr(array) for array in column] for column in zip(*parts, strict=True)] or [[], [], []]
    at = [np.array(column, np.int64) for column in columns]
    sizes, like = np.array([part[0].size for part in parts], np.int64), [np.empty(0, index_dtype(out.size))]
    like += [np.empty(0, np.uint8), np.empty(0, np.float32)]
    _chunk_sum(*at, sizes, np.zeros_like(sizes), starts, out.dtype.type(divisor), add, tuple(like), out)
