"""The largest values of each chunk of a vector, as a sign and one of two magnitudes (compressor chunktopk)."""

from __future__ import annotations

import math

import numpy as np

from sparsecoll.kernels.keys import Array, Chunks, Pass, Taken, index_dtype, nan_key
from sparsecoll.kernels.reference.selection import form, magnitude_keys

__all__ = ["chunk_sum", "chunk_topk"]

CLASSES = 256  # of magnitudes, STEPS in each power of two; the lowest one has all smaller magnitudes
STEPS = 16
DIGITS = 30  # bits of the largest magnitude of a block, by which magnitudes are whole numbers, whose sums are exact
LARGEST = float(np.finfo(np.float32).max) / 2  # a mean of any number of magnitudes is finite


def chunk_topk(values: Array, work: Pass, chunks: Chunks) -> tuple[int, Array, Array, Array]:
    """Do `work`, and take the largest values of each chunk, quantized, from `values`, where their errors remain.

    Values of equal magnitude are taken from the lowest index on, and zeros are not taken. A value is sent as its sign
    and one of the two magnitudes of its block, which have the least squared error that a boundary between two classes
    of magnitudes gives (Lloyd-Max).

    Args:
        values: float32 or float64.
        work: `source` and `add`.

    Returns:
        -1; the indices, ascending; their codes, four in a byte from the lowest bits on, each 2 for a negative value
        plus 1 for the larger magnitude; and the magnitudes, float32 of shape (blocks, 2). Or the index of the first
        value that is NaN or infinite, after which nothing else means anything.
    """
    form(values, work)
    edges, blocks, counts = chunks
    taken, codes, magnitudes = [], [np.zeros(0, np.uint8)], np.zeros((blocks.size - 1, 2), np.float32)
    keys = magnitude_keys(values)
    wrong = np.flatnonzero(keys >= nan_key(values.dtype) - 1)
    for b in range(blocks.size - 1):
        block = [np.zeros(0, np.int64)]
        for c in range(blocks[b], blocks[b + 1]):
            own = keys[edges[c] : edges[c + 1]]
            largest = np.argsort(~own, kind="stable")[: counts[c]]
            block.append(edges[c] + np.sort(largest[own[largest] > 0]))
        taken.append(np.concatenate(block))
        if not wrong.size:
            x = values[taken[-1]]
            upper, magnitudes[b] = _two_levels(x)
            codes.append(upper.astype(np.uint8) | ((x < 0).astype(np.uint8) << np.uint8(1)))
            values[taken[-1]] -= _signed(codes[-1], magnitudes[b]).astype(x.dtype)
    indices = np.concatenate([np.zeros(0, np.int64), *taken]).astype(index_dtype(values.size))
    return int(wrong[0]) if wrong.size else -1, indices, packed(np.concatenate(codes)), magnitudes


def _two_levels(x: Array) -> tuple[Array, tuple[float, float]]:
    """(whether each value has the larger magnitude, both magnitudes)."""
    if not x.size:
        return np.zeros(0, bool), (0.0, 0.0)
    keys, shift = magnitude_keys(x), np.finfo(x.dtype).nmant - int(math.log2(STEPS))
    classes = np.maximum(0, (keys >> shift).astype(np.int64) - int(keys.max() >> shift) + CLASSES - 1)
    exponent = min(DIGITS - math.frexp(float(np.abs(x).max()))[1], 1000)
    whole = (np.abs(x).astype(np.float64) * math.ldexp(1, exponent)).astype(np.int64)
    members, sums = np.bincount(classes, minlength=CLASSES), np.zeros(CLASSES, np.int64)
    np.add.at(sums, classes, whole)
    n, s = x.size, int(sums.sum())
    lower, below, best, boundary, levels = 0, 0, float(s) * float(s) / n, 0, (0.0, s / n)
    for j in range(1, CLASSES):
        lower, below = lower + int(members[j - 1]), below + int(sums[j - 1])
        if 0 < lower < n:
            # the squared error is that of zeros minus this
            explained = float(below) * float(below) / lower + float(s - below) * float(s - below) / (n - lower)
            if explained > best:
                best, boundary, levels = explained, j, (below / lower, (s - below) / (n - lower))
    unit = math.ldexp(1, -exponent)
    return classes >= boundary, (min(levels[0] * unit, LARGEST), min(levels[1] * unit, LARGEST))


def _signed(codes: Array, magnitudes: Array) -> Array:
    """The value of each code; magnitudes (2,), or (codes, 2)."""
    chosen = np.where(codes & 1, magnitudes[..., 1], magnitudes[..., 0])
    return np.where(codes & 2, -chosen, chosen)


def packed(codes: Array) -> Array:
    """Four codes of 2 bits in each byte, from the lowest bits on."""
    rows = np.zeros((-(-codes.size // 4), 4), np.uint8)
    rows.reshape(-1)[: codes.size] = codes
    return np.bitwise_or.reduce(rows << np.arange(0, 8, 2, dtype=np.uint8), axis=1)  # type: ignore[no-any-return]


def chunk_sum(parts: list[Taken], starts: Array, divisor: float, out: Array, add: bool) -> None:
    """Write the sum of what `chunk_topk` took from several vectors to `out`, or with `add` add it, in their order.

    Args:
        parts: (indices, codes, magnitudes) of each; magnitudes are divided by `divisor` in the dtype of `out`.
        starts: index at which each block begins, an int64 array in host memory.
    """
    if not add:
        out[:] = 0
    for indices, codes, magnitudes in parts:
        stored = (codes[:, None] >> np.arange(0, 8, 2, dtype=np.uint8)).reshape(-1)[: indices.size]
        block = np.searchsorted(starts, indices, side="right") - 1
        out[indices] += _signed(stored, (magnitudes.astype(out.dtype) / out.dtype.type(divisor))[block])
