"""Rice codes of the gaps between indices (format packed), in blocks that can be decoded independently."""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from sparsecoll.kernels.cpu.lanes import load64, store64, trailing_zeros
from sparsecoll.kernels.keys import Array
from sparsecoll.kernels.memory import empty
from sparsecoll.kernels.reference.rice import RICE_BLOCKS, RICE_LARGEST, RICE_PAD, RICE_SAMPLES

FOUR = 14  # the largest parameter for which four remainders and seven more bits fit into 64 bits
PLAIN = 40  # up to this parameter the sums of a block cannot overflow 64 bits

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
    """(k, sum of the quotients). The length is convex in k: descend from the k of geometrically distributed gaps."""
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
    """The size in bytes of a sample of the gaps, coded in blocks of this size."""
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
def _write_unary(gaps, count, k, out, offset):  # type: ignore[no-untyped-def]
    word = np.uint64(0)
    edge, one = 0, -1
    for j in range(count):
        one += np.int64(gaps[j] >> np.uint64(k)) + 1
        while one - edge >= 64:
            store64(out, offset + (edge >> 3), word)
            word = np.uint64(0)
            edge += 64
        word |= np.uint64(1) << np.uint64(one - edge)
    store64(out, offset + (edge >> 3), word)


@_jit
def _write_remainders(gaps, count, k, out, offset):  # type: ignore[no-untyped-def]
    """Every store writes 8 bytes; the next one overwrites those beyond its own bits."""
    mask = (np.uint64(1) << np.uint64(k)) - np.uint64(1)
    left, fill, j = np.uint64(0), 0, 0
    if k <= FOUR:
        k1, k2, k3 = np.uint64(k), np.uint64(2 * k), np.uint64(3 * k)
        while j + 4 <= count:
            four = (gaps[j] & mask) | ((gaps[j + 1] & mask) << k1)
            four |= ((gaps[j + 2] & mask) << k2) | ((gaps[j + 3] & mask) << k3)
            left |= four << np.uint64(fill)
            fill += 4 * k
            store64(out, offset, left)
            offset += fill >> 3
            left >>= np.uint64(fill & ~7)
            fill &= 7
            j += 4
    while j < count:
        left |= (gaps[j] & mask) << np.uint64(fill)
        fill += k
        store64(out, offset, left)
        offset += fill >> 3
        left >>= np.uint64(fill & ~7)
        fill &= 7
        j += 1
    store64(out, offset, left)


@_jit
def _rice_encode(indices, table, block, gaps, out):  # type: ignore[no-untyped-def]
    offset = 0
    for number in range(table.size):
        start = number * block
        count = min(block, indices.size - start)
        k, unary = np.int64(table[number] >> 10), np.int64(table[number] & 1023)
        _gaps(indices, start, count, gaps)
        _write_unary(gaps, count, k, out, offset)
        _write_remainders(gaps, count, k, out, offset + unary)
        offset += unary + ((count * k + 7) >> 3)


@_jit
def _read_unary(payload, offset, unary, count, ones):  # type: ignore[no-untyped-def]
    """Write the positions of the 1 bits; return whether there are `count` of them."""
    found = 0
    for at in range(0, unary, 8):
        word = load64(payload, offset + at)
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
def _read_plain(payload, offset, k, ones, index, out):  # type: ignore[no-untyped-def]
    mask = (np.uint64(1) << np.uint64(k)) - np.uint64(1)
    bit, low = 0, np.uint64(0)
    for j in range(out.size):
        low += (load64(payload, offset + (bit >> 3)) >> np.uint64(bit & 7)) & mask
        bit += k
        out[j] = np.uint64(index + 1 + j + ((ones[j] - j) << k)) + low
    return np.uint64(index + out.size + ((ones[out.size - 1] - out.size + 1) << k)) + low


@_jit
def _read_checked(payload, offset, k, ones, index, limit, out):  # type: ignore[no-untyped-def]
    mask = (np.uint64(1) << np.uint64(k)) - np.uint64(1)
    before = -1
    for j in range(out.size):
        bit = j * k
        low = (load64(payload, offset + (bit >> 3)) >> np.uint64(bit & 7)) & mask
        quotient = ones[j] - before - 1
        before = ones[j]
        if quotient > limit >> k or (np.uint64(quotient) << np.uint64(k)) + low >= np.uint64(limit - index - 1):
            return np.uint64(limit)
        index += np.int64((np.uint64(quotient) << np.uint64(k)) + low) + 1
        out[j] = index
    return np.uint64(index)


@_jit
def _rice_decode(table, payload, block, first, limit, ones, out):  # type: ignore[no-untyped-def]
    index, offset = first - 1, 0
    for number in range(table.size):
        start = number * block
        count = min(block, out.size - start)
        k, unary = np.int64(table[number] >> 10), np.int64(table[number] & 1023)
        if k > RICE_LARGEST or not _read_unary(payload, offset, unary, count, ones):
            return False
        part = out[start : start + count]
        if k <= PLAIN:
            last = _read_plain(payload, offset + unary, k, ones, index, part)
        else:
            last = _read_checked(payload, offset + unary, k, ones, index, limit, part)
        if last >= np.uint64(limit):
            return False
        index = np.int64(last)
        offset += unary + ((count * k + 7) >> 3)
    return True


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
    out[-RICE_PAD:] = 0
    _rice_encode(indices, table, block, np.empty(block, np.uint64), out)


def rice_decode(
    table: Array, payload: Array, block: int, first: int, count: int, limit: int, dtype: Any
) -> Array | None:
    out = empty(count, dtype)
    return out if _rice_decode(table, payload, block, first, limit, np.empty(block, np.int64), out) else None
