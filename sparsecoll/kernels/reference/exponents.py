"""Codes of floats' exponents in few bits (format packed), in blocks that can be decoded independently."""

from __future__ import annotations

import numpy as np

from sparsecoll.kernels.keys import Array
from sparsecoll.kernels.memory import asarray_like

__all__ = ["exponent_decode", "exponent_encode", "exponent_offsets", "exponent_table"]

EXPONENT_BLOCK = 1024  # how many values share a least exponent and a width
EXPONENT_SAMPLE = 8  # one value in so many is looked at to choose them


def exponent_table(stored: Array, bits: int) -> Array:
    """uint32 per block of values: least exponent | width << 8 | number of escapes << 16.

    `stored`: floats as unsigned integers; `bits`: those of their exponent. An exponent is coded in `width` bits as its
    distance from the least one, or as 2^width - 1, the escape, and in a byte. The least exponent and the width are
    those with the shortest code of a sample, the lower of two equal ones; a block that needs as many bits as its
    exponents have is not coded, with 0 and `bits` in the table.
    """
    exponents, table = _exponents(stored, bits), []
    for block in (exponents[i : i + EXPONENT_BLOCK] for i in range(0, exponents.size, EXPONENT_BLOCK)):
        sample = block[::EXPONENT_SAMPLE]
        below = np.concatenate([[0], np.bincount(sample, minlength=2**bits).cumsum()])
        tried = np.arange(sample.min(), sample.max() + 1)
        found = [(bits * sample.size, bits, 0)]
        for width in range(1, bits):
            inside = below[np.minimum(tried + 2**width - 1, 2**bits)] - below[tried]
            best = int(np.argmax(inside))
            found.append((width * sample.size + 8 * (sample.size - int(inside[best])), width, int(tried[best])))
        _, width, least = min(found, key=lambda one: one[0])
        escapes = int((_codes(block, least, width, bits) == 2**width - 1).sum()) if width < bits else 0
        if width * block.size + 8 * escapes >= bits * block.size:
            least, width, escapes = 0, bits, 0
        table.append(least | width << 8 | escapes << 16)
    return np.array(table, np.uint32)


def _exponents(stored: Array, bits: int) -> Array:
    return stored >> (8 * stored.itemsize - 1 - bits) & (2**bits - 1)  # type: ignore[no-any-return]


def _codes(exponents: Array, least: int, width: int, bits: int) -> Array:
    return np.minimum((exponents.astype(np.int64) - least) & (2**bits - 1), 2**width - 1)  # type: ignore[no-any-return]


def exponent_offsets(table: Array, count: int, bits: int, itemsize: int) -> Array:
    """int64: the byte at which each block of values begins, and, at the end, the bytes of all blocks.

    A block has the other bits of its values, sign and mantissa, as planes: of a byte of each value, and of one bit of
    64 values in 8 bytes. Planes of the codes' bits come after them, then the escapes.
    """
    counts = np.minimum(count - EXPONENT_BLOCK * np.arange(table.size), EXPONENT_BLOCK)  # of values
    counts, entries = asarray_like(counts, table), table.astype(np.int64)
    planes, escapes = (entries >> 8 & 255) + (8 - bits), entries >> 16
    offsets: Array = asarray_like(np.zeros(table.size + 1, np.int64), table)
    offsets[1:] = np.cumsum(counts * (itemsize - 1) + (counts + 63) // 64 * 8 * planes + escapes)
    return offsets


def _planes(width: int, bits: int) -> list[int]:
    return [*range(width), *range(bits, 8)]


def exponent_encode(stored: Array, bits: int, table: Array, out: Array) -> None:
    """Write the blocks. `out`: uint8, as many as the last of `exponent_offsets`."""
    size, kind = 8 * stored.itemsize, stored.dtype.type
    turned = stored << kind(1) | stored >> kind(size - 1)  # the sign is the lowest bit
    exponents, offset = _exponents(stored, bits), 0
    for number, entry in enumerate(table.tolist()):
        chosen = slice(number * EXPONENT_BLOCK, (number + 1) * EXPONENT_BLOCK)
        least, width = entry & 255, entry >> 8 & 255
        count = exponents[chosen].size
        eighth = (count + 63) // 64 * 8
        codes = np.zeros(8 * eighth, np.uint8)
        codes[:count] = _codes(exponents[chosen], least, width, bits)
        escaped = np.flatnonzero(codes[:count] == 2**width - 1) if width < bits else np.empty(0, np.int64)
        codes[:count] |= ((turned[chosen] >> kind(8)) << kind(bits) & kind(255)).astype(np.uint8) if bits < 8 else 0
        parts = [(turned[chosen] >> kind(8 * byte)).astype(np.uint8) for byte in range(stored.itemsize - 1)]
        for bit in _planes(width, bits):
            ones = codes.reshape(8, eighth) >> bit & 1
            parts.append((ones << np.arange(8, dtype=np.uint8)[:, None]).sum(axis=0).astype(np.uint8))
        parts.append(exponents[chosen][escaped].astype(np.uint8))
        block = np.concatenate(parts)
        out[offset : offset + block.size] = block
        offset += block.size


def exponent_decode(coded: Array, bits: int, table: Array, out: Array) -> bool:
    """Write the values into `out`, unsigned integers; return whether each block has as many escapes as it should.

    `coded`: as many bytes as the last of `exponent_offsets`, with widths of 1 to `bits` in the table.
    """
    size, kind, offset = 8 * out.itemsize, out.dtype.type, 0
    for number, entry in enumerate(table.tolist()):
        block = out[number * EXPONENT_BLOCK : (number + 1) * EXPONENT_BLOCK]
        least, width, escapes = entry & 255, entry >> 8 & 255, entry >> 16
        eighth = (block.size + 63) // 64 * 8
        turned = np.zeros(block.size, out.dtype)
        for byte in range(out.itemsize - 1):
            turned |= coded[offset : offset + block.size].astype(out.dtype) << kind(8 * byte)
            offset += block.size
        codes = np.zeros(8 * eighth, np.uint8)
        for bit in _planes(width, bits):
            plane = coded[offset : offset + eighth]
            codes |= ((plane >> np.arange(8, dtype=np.uint8)[:, None] & 1) << bit).astype(np.uint8).ravel()
            offset += eighth
        codes = codes[: block.size]
        if bits < 8:
            turned |= (codes >> bits).astype(out.dtype) << kind(8)
        exponents = ((codes & (2**bits - 1)).astype(np.int64) + least) & (2**bits - 1)
        if width < bits:
            escaped = np.flatnonzero(codes & (2**bits - 1) == 2**width - 1)
            if escaped.size != escapes:
                return False
            exponents[escaped] = coded[offset : offset + escapes] & (2**bits - 1)
        elif escapes:
            return False
        offset += escapes
        turned |= exponents.astype(out.dtype) << kind(size - bits)
        block[:] = turned >> kind(1) | turned << kind(size - 1)
    return True
