"""The k-th largest magnitude key, found by counting the keys' leading digits, and the k largest of some entries."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsecoll.kernels.cpu.lanes import BLOCK, jit, magnitude_key
from sparsecoll.kernels.cpu.selection_pass import CHUNK, select_all
from sparsecoll.kernels.keys import Array
from sparsecoll.kernels.memory import empty, readonly

BINS = 1 << 11  # of a digit; their counts stay in the first-level cache


@jit
def range_of(bits, mask):  # type: ignore[no-untyped-def]
    """The lowest and the highest key."""
    low = magnitude_key(bits[0], mask)
    high = low
    for i in range(bits.size):
        m = magnitude_key(bits[i], mask)
        low = min(low, m)
        high = max(high, m)
    return low, high


@jit
def _digit(bits, mask, k, bins):  # type: ignore[no-untyped-def]
    """Of the keys' range, the part with the k-th largest key: (least key, log2 of its width, rank, count).

    `bins` are zero.
    """
    low, high = range_of(bits, mask)
    least, shift, above = np.uint64(low), np.uint64(0), 0
    for i in range(bits.size):
        above += magnitude_key(bits[i], mask) > low
    if above < k:  # usual where many values are equal: counting them one by one would take several times as long
        return least, shift, k - above, 0
    while (np.uint64(high) - least) >> shift >= np.uint64(bins.size):
        shift += np.uint64(1)
    for i in range(bits.size):
        bins[(np.uint64(magnitude_key(bits[i], mask)) - least) >> shift] += 1
    digit = bins.size - 1
    while bins[digit] < k:
        k -= bins[digit]
        digit -= 1
    return least + (np.uint64(digit) << shift), shift, k, bins[digit]


@jit
def _between(bits, mask, least, most, out):  # type: ignore[no-untyped-def]
    """Copy the items whose key is from `least` to `most` to `out`, which has room for one more."""
    count = np.uint64(0)
    for start in range(0, bits.size, BLOCK):
        block, some = bits[start : start + BLOCK], False
        for i in range(block.size):
            m = magnitude_key(block[i], mask)
            some |= (m >= least) & (m <= most)
        if some:
            for i in range(block.size):
                m = magnitude_key(block[i], mask)
                out[count] = block[i]
                count += np.uint64((m >= least) & (m <= most))


@jit
def _first_surplus_tie(bits, mask, key, ties):  # type: ignore[no-untyped-def]
    """The position of the item with this key that follows the first `ties` of them; the size if there is none."""
    for start in range(0, bits.size, CHUNK):
        chunk, equal = bits[start : start + CHUNK], 0
        for i in range(chunk.size):
            equal += magnitude_key(chunk[i], mask) == key
        if equal > ties:
            for i in range(chunk.size):
                if magnitude_key(chunk[i], mask) == key:
                    if ties == 0:
                        return start + i
                    ties -= 1
        ties -= equal
    return bits.size


@jit
def _put_back(dense, positions, bits, mask, key, edge):  # type: ignore[no-untyped-def]
    for i in range(bits.size):
        m = magnitude_key(bits[i], mask)
        if m < key or (m == key and i >= edge):
            dense[positions[i]] = bits[i]


def kth(bits: Array, mask: Any, k: int) -> tuple[Any, int]:
    """(k-th largest key, typed; how many items with exactly that key belong to the k largest)."""
    while True:
        least, shift, k, count = _digit(bits, mask, k, np.zeros(BINS, np.int64))
        if shift == 0:
            return mask.dtype.type(least), int(k)
        most = min(least + (1 << shift) - 1, np.iinfo(mask.dtype).max)
        rest = empty(count + 1, bits.dtype)
        _between(bits, mask, mask.dtype.type(least), mask.dtype.type(most), rest)
        bits = readonly(rest[:count])


def cut(bits: Array, mask: Any, indices: Array | None, key: Any, ties: int, out_i: Array, out_bits: Array) -> int:
    """Copy the entries above `key` and the first `ties` of those equal to it to the outputs; their number.

    The outputs may be `indices` and `bits` themselves: an item is written only after it was read.
    """
    edge = _first_surplus_tie(bits, mask, key, ties)
    count = select_all(bits[:edge], mask, key, indices, 0, out_i, out_bits, 0)
    if key < np.iinfo(key.dtype).max:
        count = select_all(bits, mask, key + key.dtype.type(1), indices, edge, out_i, out_bits, count)
    return int(count)


def keep_largest(out_i: Array, out_bits: Array, mask: Any, k: int, cleared: Array | None) -> tuple[Any, int]:
    """Keep the k largest of some entries, in place: (the smallest one's key, k); the others return to `cleared`."""
    bits, indices = readonly(out_bits), readonly(out_i)
    key, ties = kth(bits, mask, k)
    if cleared is not None:
        _put_back(cleared, indices, bits, mask, key, _first_surplus_tie(bits, mask, key, ties))
    return key, cut(bits, mask, indices, key, ties, out_i, out_bits)
