"""What the wire formats compute: Rice-coded gaps, blocks of near indices, bitmaps, hashed slots, narrow floats."""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba.cpython.unsafe import numbers

from sparsecoll.kernels import reference
from sparsecoll.kernels.cpu import lanes
from sparsecoll.kernels.cpu.lanes import LANES, load64, narrow_block, store64, widen_block
from sparsecoll.kernels.memory import empty
from sparsecoll.kernels.reference import NEAR, RICE_BLOCKS, RICE_LARGEST, RICE_SAMPLES, Array

FOUR = 14  # largest parameter with which four remainders and seven bits left over fit 64 bits
PLAIN = 40  # up to this parameter a block's sums cannot overflow 64 bits

trailing_zeros: Any = numbers.trailing_zeros
_jit: Any = nb.njit(nogil=True, cache=True)


@_jit
def _gaps(indices, start, count, gaps):  # type: ignore[no-untyped-def]
    block = indices[start : start + count]
    one = indices.dtype.type(1)
    gaps[0] = block[0] - indices[start - 1] - one if start > 0 else 0
    for j in range(1, count):
        gaps[j] = block[j] - block[j - 1] - one


@_jit
def _quotients(gaps, count, k):  # type: ignore[no-untyped-def]
    total = np.uint64(0)
    for gap in gaps[:count]:
        total += gap >> np.uint64(k)
    return np.int64(total)


@_jit
def _parameter(gaps, count):  # type: ignore[no-untyped-def]
    """(k, sum of the quotients). The length is convex in k: walk to its minimum from the one for geometric gaps."""
    mean = 0.69 * _quotients(gaps, count, 0) / count
    k = 0
    while k < RICE_LARGEST and mean >= 2.0:
        mean *= 0.5
        k += 1
    total = _quotients(gaps, count, k)
    while k > 0:
        lower = _quotients(gaps, count, k - 1)
        if lower > total + count:
            break
        total, k = lower, k - 1
    while k < RICE_LARGEST:
        upper = _quotients(gaps, count, k + 1)
        if upper + count >= total:
            break
        total, k = upper, k + 1
    return k, total


@_jit
def _rice_sample(indices, block, gaps):  # type: ignore[no-untyped-def]
    """Bytes of a sample of the gaps, coded in blocks of this size."""
    total, largest = 0, RICE_BLOCKS[0]
    runs = max(1, indices.size // largest)
    step = -(-runs // min(RICE_SAMPLES, -(-runs // 16)))
    for run in range(0, runs, step):
        for start in range(run * largest, min((run + 1) * largest, indices.size), block):
            count = min(block, indices.size - start)
            _gaps(indices, start, count, gaps)
            k, quotients = _parameter(gaps, count)
            total += 2 + ((count + quotients + 7) >> 3) + ((count * k + 7) >> 3)
    return total


@_jit
def _rice_table(indices, block, gaps, table):  # type: ignore[no-untyped-def]
    for number in range(table.size):
        start = number * block
        count = min(block, indices.size - start)
        _gaps(indices, start, count, gaps)
        k, total = _parameter(gaps, count)
        table[number] = (k << 10) | ((count + total + 7) >> 3)


@_jit
def _write_unary(gaps, count, k, out, place):  # type: ignore[no-untyped-def]
    word = np.uint64(0)
    edge, one = 0, -1
    for j in range(count):
        one += np.int64(gaps[j] >> np.uint64(k)) + 1
        while one - edge >= 64:
            store64(out, place + (edge >> 3), word)
            word = np.uint64(0)
            edge += 64
        word |= np.uint64(1) << np.uint64(one - edge)
    store64(out, place + (edge >> 3), word)


@_jit
def _write_remainders(gaps, count, k, out, place):  # type: ignore[no-untyped-def]
    """Every store writes 8 bytes; what is beyond its own bits is written over by the next."""
    mask = (np.uint64(1) << np.uint64(k)) - np.uint64(1)
    left, fill, j = np.uint64(0), 0, 0
    if k <= FOUR:
        k1, k2, k3 = np.uint64(k), np.uint64(2 * k), np.uint64(3 * k)
        while j + 4 <= count:
            four = (gaps[j] & mask) | ((gaps[j + 1] & mask) << k1)
            four |= ((gaps[j + 2] & mask) << k2) | ((gaps[j + 3] & mask) << k3)
            left |= four << np.uint64(fill)
            fill += 4 * k
            store64(out, place, left)
            place += fill >> 3
            left >>= np.uint64(fill & ~7)
            fill &= 7
            j += 4
    while j < count:
        left |= (gaps[j] & mask) << np.uint64(fill)
        fill += k
        store64(out, place, left)
        place += fill >> 3
        left >>= np.uint64(fill & ~7)
        fill &= 7
        j += 1
    store64(out, place, left)


@_jit
def _rice_encode(indices, table, block, gaps, out):  # type: ignore[no-untyped-def]
    place = 0
    for number in range(table.size):
        start = number * block
        count = min(block, indices.size - start)
        k, unary = np.int64(table[number] >> 10), np.int64(table[number] & 1023)
        _gaps(indices, start, count, gaps)
        _write_unary(gaps, count, k, out, place)
        _write_remainders(gaps, count, k, out, place + unary)
        place += unary + ((count * k + 7) >> 3)


@_jit
def _read_unary(payload, place, unary, count, ones):  # type: ignore[no-untyped-def]
    """Positions of the 1 bits; whether there are `count` of them."""
    found = 0
    for at in range(0, unary, 8):
        word = load64(payload, place + at)
        if unary - at < 8:
            word &= (np.uint64(1) << np.uint64(8 * (unary - at))) - np.uint64(1)
        base = 8 * at
        while word != 0:
            if found == count:
                return False
            ones[found] = base + trailing_zeros(word)
            word &= word - np.uint64(1)
            found += 1
    return found == count


@_jit
def _read_plain(payload, place, k, ones, index, out):  # type: ignore[no-untyped-def]
    mask = (np.uint64(1) << np.uint64(k)) - np.uint64(1)
    bit, low = 0, np.uint64(0)
    for j in range(out.size):
        low += (load64(payload, place + (bit >> 3)) >> np.uint64(bit & 7)) & mask
        bit += k
        out[j] = np.uint64(index + 1 + j + ((ones[j] - j) << k)) + low
    return np.uint64(index + out.size + ((ones[out.size - 1] - out.size + 1) << k)) + low


@_jit
def _read_checked(payload, place, k, ones, index, limit, out):  # type: ignore[no-untyped-def]
    mask = (np.uint64(1) << np.uint64(k)) - np.uint64(1)
    before = -1
    for j in range(out.size):
        bit = j * k
        low = (load64(payload, place + (bit >> 3)) >> np.uint64(bit & 7)) & mask
        quotient = ones[j] - before - 1
        before = ones[j]
        if quotient > limit >> k or (np.uint64(quotient) << np.uint64(k)) + low >= np.uint64(limit - index - 1):
            return np.uint64(limit)
        index += np.int64((np.uint64(quotient) << np.uint64(k)) + low) + 1
        out[j] = index
    return np.uint64(index)


@_jit
def _rice_decode(table, payload, block, first, limit, ones, out):  # type: ignore[no-untyped-def]
    index, place = first - 1, 0
    for number in range(table.size):
        start = number * block
        count = min(block, out.size - start)
        k, unary = np.int64(table[number] >> 10), np.int64(table[number] & 1023)
        if k > RICE_LARGEST or not _read_unary(payload, place, unary, count, ones):
            return False
        part = out[start : start + count]
        if k <= PLAIN:
            last = _read_plain(payload, place + unary, k, ones, index, part)
        else:
            last = _read_checked(payload, place + unary, k, ones, index, limit, part)
        if last >= np.uint64(limit):
            return False
        index = np.int64(last)
        place += unary + ((count * k + 7) >> 3)
    return True


@_jit
def _block_heads(indices, gap, out):  # type: ignore[no-untyped-def]
    count = 0
    for i in range(indices.size):
        out[count] = i
        count += i == 0 or np.uint64(indices[i] - indices[i - 1]) > np.uint64(gap + 1)
    return count


@_jit
def _block_write(indices, values, gap, out):  # type: ignore[no-untyped-def]
    place = 0
    for i in range(indices.size):
        if i > 0:
            step = np.int64(indices[i] - indices[i - 1])
            place += step if step <= gap + 1 else 1
        out[place] = values[i]


@_jit
def _block_indices(starts, lengths, positions, out):  # type: ignore[no-untyped-def]
    block, begin = 0, 0
    end = np.int64(lengths[0]) if lengths.size else 0
    for i in range(positions.size):
        place = np.int64(positions[i])
        while place >= end:
            block += 1
            begin, end = end, end + np.int64(lengths[block])
        out[i] = starts[block] + np.uint64(place - begin)


@_jit
def _bitmap_write(indices, first, out):  # type: ignore[no-untyped-def]
    for i in range(indices.size):
        place = np.uint64(indices[i]) - first
        out[np.int64(place >> np.uint64(6))] |= np.uint64(1) << (place & np.uint64(63))


@_jit
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


@_jit
def _hash_slots(indices, slots, a, b, c, out):  # type: ignore[no-untyped-def]
    half = np.uint64(32)
    for i in range(indices.size):
        wide = np.uint64(indices[i])
        mixed = a * (wide & np.uint64(0xFFFFFFFF)) + b * (wide >> half) + c
        out[i] = ((mixed >> half) * slots) >> half


@_jit
def _slots_write(slots, out):  # type: ignore[no-untyped-def]
    for i in range(slots.size):
        out[slots[i]] = i


@_jit
def _scatter_add_marked(dense, indices, values):  # type: ignore[no-untyped-def]
    marked = 0
    for i in range(indices.size):
        if indices[i] < dense.size:
            dense[np.int64(indices[i])] += dense.dtype.type(values[i])
        else:
            marked += 1
    return marked


@_jit
def _to_bfloat16(bits, out):  # type: ignore[no-untyped-def]
    for i in range(bits.size):
        b = bits[i]
        upper = np.uint32(b >> np.uint32(16))
        near = np.uint32((b + np.uint32(0x7FFF) + (upper & np.uint32(1))) >> np.uint32(16))
        near -= np.uint32((near & np.uint32(0x7FFF)) == np.uint32(0x7F80))
        special = (b & np.uint32(0x7F800000)) == np.uint32(0x7F800000)
        out[i] = (upper | np.uint32((b & np.uint32(0xFFFF)) != 0)) if special else near


@_jit
def _from_bfloat16(stored, out):  # type: ignore[no-untyped-def]
    for i in range(stored.size):
        out[i] = np.uint32(stored[i]) << np.uint32(16)


@_jit
def _to_float16(values, out):  # type: ignore[no-untyped-def]
    for block in range(0, values.size, LANES):
        narrow_block(values, block, out)


@_jit
def _from_float16(stored, out):  # type: ignore[no-untyped-def]
    for block in range(0, stored.size, LANES):
        widen_block(stored, block, out)


@_jit
def _quantize(values, first, bits, bucket, seed, scales, out):  # type: ignore[no-untyped-def]
    levels = np.float32((1 << (bits - 1)) - 1)
    origin = first // bucket
    for i in range(values.size):
        x = abs(values[i])
        b = np.int64((first + np.uint64(i)) // bucket - origin)
        x = x if x < np.float32(np.inf) else np.float32(np.inf)
        scales[b] = max(scales[b], x)
    for i in range(values.size):
        index = first + np.uint64(i)
        scale = scales[np.int64(index // bucket - origin)]
        level = levels
        if scale < np.float32(np.inf):
            exact = abs(values[i]) / scale * levels if scale > 0 else np.float32(0)
            level = np.float32(np.rint(exact))
            if not abs(exact - level) < NEAR:
                z = (index + seed) * np.uint64(0x9E3779B97F4A7C15)
                z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
                z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
                level = np.float32(np.floor(exact + np.float32(z >> np.uint64(40)) * np.float32(2**-24)))
            level = min(level, levels)
        code = np.uint8(level) | (np.uint8(np.signbit(values[i])) << (bits - 1))
        place = i * bits
        out[place >> 3] |= np.uint8(code << (place & 7))


@_jit
def _dequantize(codes, first, bits, bucket, scales, out):  # type: ignore[no-untyped-def]
    levels = np.float32((1 << (bits - 1)) - 1)
    origin, low = first // bucket, (1 << (bits - 1)) - 1
    for i in range(out.size):
        code = np.int64(codes[(i * bits) >> 3]) >> ((i * bits) & 7)
        scale = scales[np.int64((first + np.uint64(i)) // bucket - origin)]
        value = np.float32(code & low) / levels * scale
        out[i] = -value if (code >> (bits - 1)) & 1 else value


def quantize(values: Array, first: int, bits: int, bucket: int, seed: int, scales: Array, out: Array) -> None:
    scales[:] = 0
    out[:] = 0
    _quantize(values, np.uint64(first), bits, np.uint64(bucket), np.uint64(seed), scales, out)


def dequantize(codes: Array, first: int, count: int, bits: int, bucket: int, scales: Array) -> Array:
    out = empty(count, np.float32)
    _dequantize(codes, np.uint64(first), bits, np.uint64(bucket), scales, out)
    return out


def rice_block(indices: Array) -> int:
    if indices.size == 0:
        return RICE_BLOCKS[0]
    gaps = np.empty(RICE_BLOCKS[0], indices.dtype)
    return min(RICE_BLOCKS, key=lambda block: int(_rice_sample(indices, block, gaps)))


def rice_table(indices: Array, block: int) -> Array:
    table = np.empty(-(-indices.size // block), np.uint16)
    _rice_table(indices, block, np.empty(block, indices.dtype), table)
    return table


def rice_encode(indices: Array, table: Array, block: int, out: Array) -> None:
    out[-reference.RICE_PAD :] = 0
    _rice_encode(indices, table, block, np.empty(block, np.uint64), out)


def rice_decode(
    table: Array, payload: Array, block: int, first: int, count: int, limit: int, dtype: Any
) -> Array | None:
    out = empty(count, dtype)
    return out if _rice_decode(table, payload, block, first, limit, np.empty(block, np.int64), out) else None


def block_heads(indices: Array, gap: int) -> Array:
    out = np.empty(indices.size + 1, np.int64)
    return out[: _block_heads(indices, gap, out)]


def block_write(indices: Array, values: Array, gap: int, out: Array) -> None:
    out[:] = 0
    bits = np.dtype(f"u{out.dtype.itemsize}")
    _block_write(indices, values.view(bits), gap, out.view(bits))


def block_indices(starts: Array, lengths: Array, positions: Array) -> Array:
    out = empty(positions.size, np.uint64)
    _block_indices(starts, lengths, positions, out)
    return out


def bitmap_write(indices: Array, first: int, out: Array) -> None:
    out[:] = 0
    _bitmap_write(indices, np.uint64(first), out)


def bitmap_read(words: Array, first: int, count: int, dtype: Any) -> Array | None:
    out = empty(count, dtype)
    return out if _bitmap_read(words, np.uint64(first), out) == count else None


def hash_slots(indices: Array, slots: int, multipliers: tuple[int, int, int]) -> Array:
    out = empty(indices.size, np.int64)
    _hash_slots(indices, np.uint64(slots), *(np.uint64(m) for m in multipliers), out)
    return out


def slots_write(slots: Array, out: Array) -> None:
    out[:] = -1
    _slots_write(slots, out)


def scatter_add_marked(dense: Array, indices: Array, values: Array) -> int:
    if np.float16 in (dense.dtype, values.dtype):
        return reference.scatter_add_marked(dense, indices, values)
    return int(_scatter_add_marked(dense, indices, values))


def to_bfloat16(values: Array) -> Array:
    out = empty(values.size, np.uint16)
    _to_bfloat16(values.view(np.uint32), out)
    return out


def from_bfloat16(stored: Array) -> Array:
    out = empty(stored.size, np.uint32)
    _from_bfloat16(stored, out)
    return out.view(np.float32)


def to_float16(values: Array) -> Array:
    if not lanes.AVAILABLE or values.dtype != np.float32 or not values.flags.c_contiguous:
        return reference.to_float16(values)
    whole = values.size - values.size % LANES
    out = empty(values.size, np.uint16)
    _to_float16(values[:whole].view(np.uint32), out)
    out[whole:] = reference.to_float16(values[whole:]).view(np.uint16)
    return out.view(np.float16)


def from_float16(stored: Array) -> Array:
    if not lanes.AVAILABLE or not stored.flags.c_contiguous:
        return reference.from_float16(stored)
    whole = stored.size - stored.size % LANES
    out = empty(stored.size, np.uint32)
    _from_float16(stored[:whole].view(np.uint16), out)
    floats = out.view(np.float32)
    floats[whole:] = stored[whole:]
    return floats
