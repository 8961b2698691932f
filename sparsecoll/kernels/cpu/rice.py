"""Rice codes of the gaps between indices (format packed), in blocks that can be decoded independently."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsecoll.kernels import reference
from sparsecoll.kernels.cpu.lanes import inlined, jit, load64, popcount, store64, trailing_zeros
from sparsecoll.kernels.keys import Array
from sparsecoll.kernels.memory import empty
from sparsecoll.kernels.reference.rice import RICE_BLOCKS, RICE_LARGEST, RICE_PAD, rice_runs

FOUR = 14  # the largest parameter for which four remainders and seven more bits fit into 64 bits
PLAIN = 40  # up to this parameter the sums of a block cannot overflow 64 bits; larger ones are left to the reference


@jit
def _gaps(indices, start, count, gaps):  # type: ignore[no-untyped-def]
    """Write the gaps of a block; return their sum."""
    block = indices[start : start + count]
    one = indices.dtype.type(1)
    gaps[0] = 0
    if start > 0:  # one expression with a 0 of another type would be a float64
        gaps[0] = block[0] - indices[start - 1] - one
    for j in range(1, count):
        gaps[j] = block[j] - block[j - 1] - one
    return np.uint64(gaps[0]) + np.uint64(block[count - 1] - block[0]) - np.uint64(count - 1)


@jit
def _quotients(gaps, count, k):  # type: ignore[no-untyped-def]
    """The sums of the quotients for k - 1, k and k + 1; k is 1 at least. They fit the type of the indices."""
    kind = gaps.dtype.type
    shift = kind((k - 1) & (63 if kind(1 << 32) else 31))  # one that fits for sure keeps the loop in the narrow type
    lower, total, upper = kind(0), kind(0), kind(0)
    block = gaps[:count]
    for j in range(block.size):
        quotient = kind(block[j] >> shift)
        lower = kind(lower + quotient)
        total = kind(total + (quotient >> kind(1)))
        upper = kind(upper + (quotient >> kind(2)))
    return np.int64(lower), np.int64(total), np.int64(upper)


@jit
def _parameter(gaps, count, sum_of_gaps):  # type: ignore[no-untyped-def]
    """(k, sum of the quotients). The length is convex in k: descend from the k of geometrically distributed gaps."""
    mean = 0.69 * sum_of_gaps / count
    k = 1
    while k < RICE_LARGEST and mean >= 4.0:
        mean *= 0.5
        k += 1
    while True:
        lower, total, upper = _quotients(gaps, count, k)
        if lower <= total + count:
            if k == 1:
                return 0, lower
            k -= 1
        elif upper + count < total and k < RICE_LARGEST:
            k += 1
        else:
            return k, total


@jit
def _rice_table(indices, step, block, gaps, table):  # type: ignore[no-untyped-def]
    """Of one run of RICE_BLOCKS[0] gaps in `step`."""
    blocks = RICE_BLOCKS[0] // block  # of a run
    for number in range(table.size):
        start = (number // blocks * step * blocks + number % blocks) * block
        count = min(block, indices.size - start)
        k, total = _parameter(gaps, count, _gaps(indices, start, count, gaps))
        table[number] = (k << 10) | ((count + total + 7) >> 3)


@inlined
def _flush(out, offset, left, fill):  # type: ignore[no-untyped-def]
    """Write the `fill` lowest bits of `left`; the next offset, and the unfinished byte there and its number of bits."""
    store64(out, offset, left)
    return offset + np.int64(fill >> np.uint64(3)), left >> (fill & ~np.uint64(7)), fill & np.uint64(7)


@jit
def _write_unary(gaps, count, k, out, offset):  # type: ignore[no-untyped-def]
    """Every store writes 8 bytes; the next one overwrites those beyond its own bits, of which `left` has at most 7."""
    shift, one = np.uint64(k), np.uint64(1)
    left, fill, j = np.uint64(0), np.uint64(0), 0
    while j < count:
        if j + 4 <= count:
            first = np.uint64(gaps[j]) >> shift
            second = first + (np.uint64(gaps[j + 1]) >> shift) + one
            third = second + (np.uint64(gaps[j + 2]) >> shift) + one
            fourth = third + (np.uint64(gaps[j + 3]) >> shift) + one
            if fourth < np.uint64(56):
                left |= ((one << first) | (one << second) | (one << third) | (one << fourth)) << fill
                offset, left, fill = _flush(out, offset, left, fill + fourth + one)
                j += 4
                continue
        fill += np.uint64(gaps[j]) >> shift
        while fill >= np.uint64(56):
            store64(out, offset, left)
            offset += 7
            left >>= np.uint64(56)
            fill -= np.uint64(56)
        offset, left, fill = _flush(out, offset, left | (one << fill), fill + one)
        j += 1


@jit
def _write_remainders(gaps, count, k, out, offset):  # type: ignore[no-untyped-def]
    k1, k2, k3 = np.uint64(k), np.uint64(2 * k), np.uint64(3 * k)
    mask = (np.uint64(1) << k1) - np.uint64(1)
    left, fill = np.uint64(0), np.uint64(0)
    step = 4 if k <= FOUR else 1
    for j in range(0, count, step):
        more = np.uint64(gaps[j]) & mask
        if step == 4:  # those beyond `count` are zero
            more |= (np.uint64(gaps[j + 1]) & mask) << k1
            more |= ((np.uint64(gaps[j + 2]) & mask) << k2) | ((np.uint64(gaps[j + 3]) & mask) << k3)
        offset, left, fill = _flush(out, offset, left | (more << fill), fill + np.uint64(step) * k1)


@jit
def _rice_encode(indices, table, block, gaps, out):  # type: ignore[no-untyped-def]
    offset = np.int64(0)
    for number in range(table.size):
        start = number * block
        count = min(block, indices.size - start)
        k, unary = np.int64(table[number] >> 10), np.int64(table[number] & 1023)
        _gaps(indices, start, count, gaps)
        gaps[count : count + 3] = 0
        _write_unary(gaps, count, k, out, offset)
        _write_remainders(gaps, count, k, out, offset + unary)
        offset += unary + ((count * k + 7) >> 3)


@jit
def _read_unary(payload, offset, unary, count, ones):  # type: ignore[no-untyped-def]
    """Write the positions of the 1 bits, and up to three more items; return whether there are `count` of them."""
    found, one = 0, np.uint64(1)
    for at in range(0, unary, 8):
        word = load64(payload, offset + at)
        if unary - at < 8:
            word &= (one << np.uint64(8 * (unary - at))) - one
        base, stop = np.uint64(8 * at), found + np.int64(popcount(word))
        if stop > count:
            return False
        for i in range(found, stop, 4):
            for d in range(4):
                ones[i + d] = base + np.uint64(trailing_zeros(word))
                word &= word - one
        found = stop
    return found == count


@jit
def _read_plain(payload, offset, k, ones, index, out):  # type: ignore[no-untyped-def]
    """Add each remainder, the quotients before it and the number of its gap; the last index."""
    k1, mask = np.uint64(k), (np.uint64(1) << np.uint64(k)) - np.uint64(1)
    total, bit, j = np.uint64(index + 1) + mask, 0, 0
    if k <= FOUR:
        while j + 4 <= out.size:
            word = ~(load64(payload, offset + (bit >> 3)) >> np.uint64(bit & 7))
            bit += 4 * k
            for d in range(4):
                total -= word & mask
                out[j + d] = total + (ones[j + d] << k1)
                word >>= k1
            j += 4
    while j < out.size:
        total -= ~(load64(payload, offset + (bit >> 3)) >> np.uint64(bit & 7)) & mask
        bit += k
        out[j] = total + (ones[j] << k1)
        j += 1
    return total + (ones[out.size - 1] << k1)


@jit
def _rice_decode(table, payload, block, first, limit, ones, out):  # type: ignore[no-untyped-def]
    index, offset = first - 1, np.int64(0)
    for number in range(table.size):
        start = number * block
        count = min(block, out.size - start)
        k, unary = np.int64(table[number] >> 10), np.int64(table[number] & 1023)
        if k > PLAIN:
            return -1
        if not _read_unary(payload, offset, unary, count, ones):
            return 0
        last = _read_plain(payload, offset + unary, k, ones, index, out[start : start + count])
        if last >= np.uint64(limit):
            return 0
        index = np.int64(last)
        offset += unary + ((count * k + 7) >> 3)
    return 1


@jit
def _rice_offsets(table, count, block, out):  # type: ignore[no-untyped-def]
    out[0] = 0
    for number in range(table.size):
        entry, gaps = np.int64(table[number]), min(block, count - block * number)
        out[number + 1] = out[number] + (entry & 1023) + ((gaps * (entry >> 10) + 7) >> 3)


def rice_block(indices: Array) -> int:
    runs = rice_runs(indices.size)
    count = min(len(runs) * RICE_BLOCKS[0], indices.size)
    tables = {block: _table(indices, runs.step, block, count) for block in RICE_BLOCKS}
    return min(tables, key=lambda block: tables[block].nbytes + int(rice_offsets(tables[block], count, block)[-1]))


def _table(indices: Array, step: int, block: int, count: int) -> Array:
    table = np.empty(-(-count // block), np.uint16)
    _rice_table(indices, step, block, np.empty(block, indices.dtype), table)
    return table


def rice_table(indices: Array, block: int) -> Array:
    return _table(indices, 1, block, indices.size)


def rice_offsets(table: Array, count: int, block: int) -> Array:
    out = np.empty(table.size + 1, np.int64)
    _rice_offsets(table, count, block, out)
    return out


def rice_encode(indices: Array, table: Array, block: int, out: Array) -> None:
    out[-RICE_PAD:] = 0
    _rice_encode(indices, table, block, np.empty(block + 3, indices.dtype), out)


def rice_decode(
    table: Array, payload: Array, block: int, first: int, count: int, limit: int, dtype: Any
) -> Array | None:
    out = empty(count, dtype)
    done = _rice_decode(table, payload, block, first, limit, np.empty(block + 3, np.uint64), out)
    if done < 0:
        return reference.rice_decode(table, payload, block, first, count, limit, dtype)
    return out if done else None
