"""Rice codes of the gaps between indices (format packed), in blocks that can be decoded independently."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsecoll.kernels.keys import Array

__all__ = ["rice_block", "rice_decode", "rice_encode", "rice_offsets", "rice_table"]

RICE_BLOCKS = (1024, 256, 128)  # how many gaps may share a parameter
RICE_SAMPLES = 4  # at most so many runs of 1,024 gaps, and one in 16, are tried to choose among them
RICE_LARGEST = 56  # largest parameter; a quotient and a remainder then fit one 64-bit load
RICE_PAD = 8  # bytes that a decoder may read beyond the payload
_SIZE_BITS = 10  # of a table entry: unary bytes of the block; the parameter is above them


def rice_block(indices: Array) -> int:
    """The size of blocks, of RICE_BLOCKS, that codes a sample of the gaps shortest; the larger of two equal ones."""
    gaps, largest = _gaps(indices), RICE_BLOCKS[0]
    sample, lengths = [gaps[run * largest : (run + 1) * largest] for run in rice_runs(gaps.size)], []
    for block in RICE_BLOCKS:
        parts = [run[i : i + block] for run in sample for i in range(0, run.size, block)]
        coded = [(part, _best(part)) for part in parts]
        lengths.append(sum(2 + (part.size + total + 7) // 8 + (part.size * k + 7) // 8 for part, (k, total) in coded))
    return RICE_BLOCKS[int(np.argmin(lengths))]


def rice_runs(count: int) -> range:
    """Which runs of RICE_BLOCKS[0] of `count` gaps are the sample."""
    runs = max(1, count // RICE_BLOCKS[0])
    return range(0, runs, -(-runs // min(RICE_SAMPLES, -(-runs // 16))))


def _best(gaps: Array) -> tuple[int, int]:
    """(parameter, sum of the quotients) of the shortest code."""
    bits = int(gaps.max(initial=0)).bit_length()
    parameters = np.arange(min(bits, RICE_LARGEST) + 1, dtype=np.uint64)  # the code of larger ones is longer
    totals = (gaps >> parameters[:, None]).sum(axis=1)
    k = int(np.argmin(totals + np.uint64(gaps.size) * parameters))
    return k, int(totals[k])


def _gaps(indices: Array) -> Array:
    gaps = np.zeros(indices.size, np.uint64)
    gaps[1:] = np.diff(indices.astype(np.uint64)) - np.uint64(1)
    return gaps


def rice_table(indices: Array, block: int) -> Array:
    """uint16 per `block` gaps: (parameter << 10) | bytes of its unary part.

    gap j = index j - index (j-1) - 1; the first gap is 0 (the message states the first index). The parameter k is the
    one with the shortest code, count * k + sum(gap >> k) bits, the smaller one of two equal ones.
    """
    gaps, table = _gaps(indices), []
    for part in (gaps[i : i + block] for i in range(0, gaps.size, block)):
        k, total = _best(part)
        table.append((k << _SIZE_BITS) | ((part.size + total + 7) // 8))
    return np.array(table, np.uint16)


def rice_offsets(table: Array, count: int, block: int) -> Array:
    """int64: the byte at which each block begins in the payload, and, at the end, the bytes of all blocks."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.add(*_sizes(table, count, block)))])


def _sizes(table: Array, count: int, block: int) -> tuple[Array, Array]:
    """(bytes of the unary part, bytes of the remainders) of each block."""
    counts = np.minimum(count - block * np.arange(table.size), block)
    return (table & 1023).astype(np.int64), (counts * (table >> _SIZE_BITS).astype(np.int64) + 7) // 8


def rice_encode(indices: Array, table: Array, block: int, out: Array) -> None:
    """Write the payload: for each block its quotients in unary (that many 0 bits, then a 1), then its k-bit remainders.

    Bits fill bytes from the least significant one up. `out`: uint8, the last of `rice_offsets` and RICE_PAD zero bytes.
    """
    out[:] = 0
    gaps, offset = _gaps(indices), 0
    for number, (unary, rest) in enumerate(zip(*_sizes(table, indices.size, block), strict=True)):
        part, k = gaps[number * block : (number + 1) * block], int(table[number]) >> _SIZE_BITS
        ones = np.cumsum((part >> np.uint64(k)).astype(np.int64) + 1) - 1
        bits = np.zeros(8 * unary, np.uint8)
        bits[ones] = 1
        out[offset : offset + unary] = np.packbits(bits, bitorder="little")
        low = (part[:, None] >> np.arange(k, dtype=np.uint64)) & np.uint64(1)
        out[offset + unary : offset + unary + rest] = np.packbits(low.astype(np.uint8).ravel(), bitorder="little")
        offset += int(unary + rest)


def rice_decode(
    table: Array, payload: Array, block: int, first: int, count: int, limit: int, dtype: Any
) -> Array | None:
    """The `count` indices; None if the payload is damaged: a block without enough ones, or an index >= limit."""
    indices, offset, index = np.empty(count, dtype), 0, first - 1
    for number, (unary, rest) in enumerate(zip(*_sizes(table, count, block), strict=True)):
        k = int(table[number]) >> _SIZE_BITS
        start, stop = number * block, min((number + 1) * block, count)
        ones = np.flatnonzero(np.unpackbits(payload[offset : offset + unary], bitorder="little"))
        if ones.size != stop - start or k > RICE_LARGEST:
            return None
        bits = np.unpackbits(payload[offset + unary : offset + unary + rest], bitorder="little")[: (stop - start) * k]
        low = bits.reshape(stop - start, k) @ (np.uint64(1) << np.arange(k, dtype=np.uint64))
        quotients = np.diff(ones, prepend=-1).astype(np.uint64) - np.uint64(1)
        steps = (quotients << np.uint64(k)) + low + np.uint64(1)
        if (quotients >> np.uint64(63 - k)).any() or index + steps.sum(dtype=float) >= limit + 2.0**62:  # no overflow
            return None
        found = np.cumsum(steps) + np.uint64(index + 1) - np.uint64(1)
        index = int(found[-1])
        if index >= limit:
            return None
        indices[start:stop] = found
        offset += int(unary + rest)
    return indices
