"""Codes of floats' exponents in few bits (format packed), in blocks that can be decoded independently."""

from __future__ import annotations

import numpy as np

from sparsecoll.kernels.cpu.lanes import inlined, jit, load64, store64, trailing_zeros
from sparsecoll.kernels.keys import Array
from sparsecoll.kernels.reference.exponents import EXPONENT_BLOCK as BLOCK, EXPONENT_SAMPLE as SAMPLE

ONES = 0x0101010101010101  # the lowest bit of each of eight codes


@jit
def _shortest(counts, sampled, bits):  # type: ignore[no-untyped-def]
    """(least exponent, width) of the shortest code of so many exponents; the counts are cleared."""
    low, high = 0, counts.size - 1
    while counts[low] == 0:
        low += 1
    while counts[high] == 0:
        high -= 1
    best, least, chosen = bits * sampled, 0, bits
    for width in range(1, bits):
        span, inside = (1 << width) - 1, 0
        for e in range(low, min(low + span, high + 1)):
            inside += counts[e]
        for e in range(low, high + 1):
            length = width * sampled + 8 * (sampled - inside)
            if length < best:
                best, least, chosen = length, e, width
            inside -= counts[e]
            if e + span <= high:
                inside += counts[e + span]
    counts[low : high + 1] = 0
    return least, chosen


@jit
def _exponent_table(stored, bits, counts, table):  # type: ignore[no-untyped-def]
    kind = stored.dtype.type
    down, mask = kind(8 * stored.itemsize - 1 - bits), kind((1 << bits) - 1)
    for number in range(table.size):
        block = stored[number * BLOCK : (number + 1) * BLOCK]
        for j in range(0, block.size, SAMPLE):
            counts[(block[j] >> down) & mask] += 1
        least, width = _shortest(counts, (block.size + SAMPLE - 1) // SAMPLE, bits)
        escapes = np.uint32(0)
        if width < bits:
            base, escape = kind(least), kind((1 << width) - 1)
            for j in range(block.size):
                escapes += np.uint32(kind(kind(kind(block[j] >> down) - base) & mask) >= escape)
        if width * block.size + 8 * escapes >= bits * block.size:
            least, width, escapes = 0, bits, np.uint32(0)
        table[number] = np.uint32(least | width << 8 | escapes << 16)


@inlined
def _escapes(codes8, mask, escape):  # type: ignore[no-untyped-def]
    """The top bit of each byte, of eight below 128 each, that is the escape."""
    others = (codes8 & np.uint64(mask * ONES)) ^ np.uint64(escape * ONES)
    return ~(others + np.uint64(127 * ONES)) & np.uint64(128 * ONES)


@jit
def _exponent_encode(stored, bits, table, words, codes, out):  # type: ignore[no-untyped-def]
    kind = stored.dtype.type
    down, top, mask = kind(8 * stored.itemsize - 1 - bits), kind(8 * stored.itemsize - 1), kind((1 << bits) - 1)
    offset = 0
    for number in range(table.size):
        block = stored[number * BLOCK : (number + 1) * BLOCK]
        entry = np.int64(table[number])
        width, escapes = entry >> 8 & 255, entry >> 16
        least, escape = kind(entry & 255), kind((1 << width) - 1)
        for byte in range(stored.itemsize - 1):
            right, plane = kind(8 * byte), out[offset : offset + block.size]
            for j in range(block.size):
                plane[j] = kind(kind(block[j] << kind(1)) | kind(block[j] >> top)) >> right
            offset += block.size
        for j in range(block.size):
            codes[j] = min(kind(kind(kind(block[j] >> down) - least) & mask), escape)
        codes[block.size :] = 0
        if bits < 8:
            for j in range(block.size):
                codes[j] |= np.uint8(kind(block[j] >> kind(7)) << kind(bits))
        eighth = (block.size + 63) >> 6
        for bit in range(8):
            if width <= bit < bits:
                continue
            for j in range(eighth):
                plane8 = np.uint64(0)
                for t in range(8):
                    plane8 |= ((words[t * eighth + j] >> np.uint64(bit)) & np.uint64(ONES)) << np.uint64(t)
                store64(out, offset + 8 * j, plane8)
            offset += 8 * eighth
        for word in range(8 * eighth if escapes else 0):
            rest = _escapes(words[word], mask, escape)
            while rest:
                out[offset] = kind(block[8 * word + (trailing_zeros(rest) >> 3)] >> down) & mask
                rest &= rest - np.uint64(1)
                offset += 1


@jit
def _exponent_decode(coded, bits, table, words, codes, out):  # type: ignore[no-untyped-def]
    kind = out.dtype.type
    up, top, mask = kind(8 * out.itemsize - bits), kind(8 * out.itemsize - 1), kind((1 << bits) - 1)
    offset = 0
    for number in range(table.size):
        block = out[number * BLOCK : (number + 1) * BLOCK]
        entry = np.int64(table[number])
        width, least, escape = entry >> 8 & 255, kind(entry & 255), kind((1 << (entry >> 8 & 255)) - 1)
        eighth, start = (block.size + 63) >> 6, offset
        offset += (out.itemsize - 1) * block.size
        words[: 8 * eighth] = 0
        for bit in range(8):
            if width <= bit < bits:
                continue
            for j in range(eighth):
                plane8 = load64(coded, offset + 8 * j)
                for t in range(8):
                    words[t * eighth + j] |= ((plane8 >> np.uint64(t)) & np.uint64(ONES)) << np.uint64(bit)
            offset += 8 * eighth
        for j in range(block.size):
            block[j] = kind(kind(kind(codes[j] & mask) + least) & mask) << up
        if bits < 8:
            for j in range(block.size):
                block[j] |= kind(codes[j] >> np.uint8(bits)) << kind(8)
        stop = offset + (entry >> 16)
        for word in range(8 * eighth if width < bits else 0):
            rest = _escapes(words[word], mask, escape)
            while rest:
                j = 8 * word + (trailing_zeros(rest) >> 3)
                if j < block.size:
                    if offset == stop:
                        return False
                    block[j] = kind(block[j] & ~(mask << up)) | kind(kind(coded[offset] & mask) << up)
                    offset += 1
                rest &= rest - np.uint64(1)
        if offset != stop:
            return False
        for byte in range(out.itemsize - 1):
            left, plane = kind(8 * byte), coded[start : start + block.size]
            for j in range(block.size):
                block[j] |= kind(kind(plane[j]) << left)
            start += block.size
        for j in range(block.size):
            block[j] = kind(block[j] >> kind(1)) | kind(block[j] << top)
    return True


def exponent_table(stored: Array, bits: int) -> Array:
    table = np.empty(-(-stored.size // BLOCK), np.uint32)
    _exponent_table(stored, bits, np.zeros(256, np.int64), table)
    return table


def exponent_encode(stored: Array, bits: int, table: Array, out: Array) -> None:
    words = np.empty(BLOCK // 8, np.uint64)  # the codes of a block, eight in a word
    _exponent_encode(stored, bits, table, words, words.view(np.uint8), out)


def exponent_decode(coded: Array, bits: int, table: Array, out: Array) -> bool:
    words = np.empty(BLOCK // 8, np.uint64)
    return bool(_exponent_decode(coded, bits, table, words, words.view(np.uint8), out))
