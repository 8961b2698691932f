"""Kernels of quantized values: a scale for each bucket of values, and codes of a few bits.

A bucket consists of the values with the same index // `bucket`. A code is a level with the sign above it. The m values
of a bucket take h = ceil(m bits / 8) bytes: value j is in byte j mod h, at bit (j // h) bits, so that consecutive bytes
hold consecutive values. Levels:

    linear  level * scale / L, for L = 2^(bits-1) - 1; the scale is the largest magnitude
    float   a float of 4 exponent and 3 fraction bits (8 bits, E4M3) or of 3 exponent bits (4 bits, E3M0), without
            infinity and NaN, scaled so that the largest one is the scale, which is the largest magnitude
    mean    the scale, the mean magnitude (1 bit); 5/8 or 15/8 of it (2 bits)

Values are rounded up or down at random, unbiased, by a random number that depends on (seed, index), or to the nearest
level without a seed. A value that is a level stays the same, so that quantizing twice gives the same as once.
"""

from __future__ import annotations

import numpy as np

from sparsecoll.kernels.keys import Array, Code

__all__ = ["dequantize", "quantize"]

LEVELS = ("linear", "float", "mean")
FRACTION = {8: 3, 4: 0}  # bits of the fraction of floats, by bits of a code
LANES = 64  # of the sum of magnitudes
LARGEST = np.uint32(0x7F800000)  # infinity
EDGE = np.float32(2**-12)  # a value this near to a level is that level
SPAN = np.float32(1 - 2**-11)
DRAWN = np.float32(2**-24) * SPAN


def top_level(bits: int, levels: str) -> int:
    """The largest level in multiples of the smallest one; 1 for "mean"."""
    if levels == "float":
        fraction = FRACTION[bits]
        return ((2 << fraction) - 1) << ((1 << (bits - 1 - fraction)) - 2)
    return 2 ** (bits - 1) - 1 if levels == "linear" else 1


def code_bytes(first: int, count: int, bits: int, bucket: int) -> int:
    """The size of the codes of `count` values from index `first` on."""
    head = min(bucket - first % bucket, count)
    whole, rest = divmod(count - head, bucket)
    return -(-head * bits // 8) + whole * -(-bucket * bits // 8) + -(-rest * bits // 8)


def _sizes(first: int, count: int, bucket: int) -> list[int]:
    """The number of values in each bucket."""
    head = min(bucket - first % bucket, count)
    whole, rest = divmod(count - head, bucket)
    return [size for size in [head, *[bucket] * whole, rest] if size]


def bucket_key(seed: int, number: int) -> int:
    """32 random bits for a bucket (the finaliser of SplitMix64)."""
    z = (seed + number * 0x9E3779B97F4A7C15) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return z >> 32


def _uniform(key: int, start: int, count: int) -> Array:
    """float32 in [EDGE, 1 - EDGE] (the hash "lowbias32" of Wellons)."""
    c = np.uint32(key) + np.arange(start, start + count, dtype=np.uint64).astype(np.uint32)
    c = (c ^ (c >> np.uint32(16))) * np.uint32(0x7FEB352D)
    c = (c ^ (c >> np.uint32(15))) * np.uint32(0x846CA68B)
    return ((c ^ (c >> np.uint32(16))) >> np.uint32(8)).astype(np.float32) * DRAWN + EDGE


def _mean(magnitudes: Array) -> np.float32:
    """The mean, from LANES partial sums."""
    padded = np.zeros((-(-magnitudes.size // LANES), LANES), np.float32)
    padded.reshape(-1)[: magnitudes.size] = magnitudes
    sums = np.zeros(LANES, np.float32)
    for row in padded:
        sums += row
    width = LANES
    while width > 1:
        width //= 2
        sums[:width] += sums[width : 2 * width]
    return np.float32(sums[0] / np.float32(magnitudes.size))


def _scale(values: Array, levels: str) -> np.float32:
    """The scale of a bucket; infinite if it cannot be quantized, 0 if its values are taken for zeros."""
    largest = np.uint32((values.view(np.uint32) & np.uint32(0x7FFFFFFF)).max())
    scale = np.minimum(largest, LARGEST).view(np.float32)
    return min(_mean(np.abs(values)), np.float32(np.inf)) if levels == "mean" and np.isfinite(scale) else scale


def _levels(magnitudes: Array, scale: np.float32, bits: int, levels: str, u: Array | np.float32) -> Array:
    """The level of each value of a bucket, as a number (int32)."""
    if levels == "mean":
        far = magnitudes >= scale * np.float32(1.25)
        return far.astype(np.int32) if bits > 1 else np.zeros(magnitudes.size, np.int32)
    exact = magnitudes * (np.float32(top_level(bits, levels)) / scale)
    level = (exact + u).astype(np.int32)
    if levels == "linear":
        return level
    fraction = FRACTION[bits]
    width = 23 - fraction
    added = (np.float32(1 << width) * u).astype(np.int32)
    wide = ((exact.view(np.int32) + added) >> np.int32(width)) - np.int32((126 + fraction) << fraction)
    return np.where(exact < np.float32(1 << fraction), level, wide)


def _values(level: Array, scale: np.float32, bits: int, levels: str) -> Array:
    """The magnitude of each level (float32)."""
    if levels == "mean":
        return np.where(level > 0, scale * np.float32(1.875), scale * np.float32(0.625 if bits > 1 else 1))
    number = level
    if levels == "float":
        one = 1 << FRACTION[bits]
        number = np.where(level < one, level, ((level & (one - 1)) + one) << np.maximum((level // one) - 1, 0))
    top = np.float32(top_level(bits, levels))
    number = number.astype(np.float32)
    with np.errstate(invalid="ignore"):
        return np.where(number == top, scale, number * (scale / top)).astype(np.float32)


def quantize(
    values: Array, first: int, code: Code, seed: int | None, scales: Array, out: Array, keep_error: bool
) -> None:
    """float32 values of indices first, first + 1, ... to a scale a bucket and codes of `bits` bits.

    With `keep_error`, each value is replaced by its rounding error. A bucket with an infinity or NaN has the scale inf,
    the highest level throughout, and no error. Buckets of subnormal magnitudes become zeros.
    """
    (bits, levels, bucket), start, end = code, 0, 0
    for b, size in enumerate(_sizes(first, values.size, bucket)):
        own, position = values[start : start + size], (first + start) % bucket
        start += size
        with np.errstate(over="ignore", divide="ignore"):
            scale = _scale(own, levels)
            if not np.isfinite(np.float32(top_level(bits, levels)) / scale):
                scale = np.float32(0)
        scales[b] = scale
        level = np.full(size, 0 if scale == 0 else 2 ** (bits - 1) - 1, np.int32)
        if 0 < scale < np.inf:
            key = 0 if seed is None else bucket_key(seed, first // bucket + b)
            u = np.float32(0.5) if seed is None else _uniform(key, position, size)
            level = _levels(np.abs(own), scale, bits, levels, u)
        negative = own < 0
        codes = level.astype(np.uint8) | (negative.astype(np.uint8) << np.uint8(bits - 1))
        if keep_error and 0 < scale < np.inf:
            back = _values(level, scale, bits, levels)
            own += np.where(negative, back, -back)
        h = -(-size * bits // 8)
        padded = np.zeros((8 // bits, h), np.uint8)
        padded.reshape(-1)[:size] = codes
        shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
        out[end : end + h] = np.bitwise_or.reduce(padded << shifts, axis=0)
        end += h


def dequantize(codes: Array, first: int, code: Code, scales: Array, out: Array, add: bool) -> None:
    """Write the float32 values to `out`, or add them."""
    (bits, levels, bucket), start, end = code, 0, 0
    for b, size in enumerate(_sizes(first, out.size, bucket)):
        h = -(-size * bits // 8)
        shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
        stored = ((codes[end : end + h] >> shifts) & np.uint8(2**bits - 1)).reshape(-1)[:size]
        back = _values((stored & np.uint8(2 ** (bits - 1) - 1)).astype(np.int32), scales[b], bits, levels)
        signed = np.where(stored >> np.uint8(bits - 1), -back, back)
        part = out[start : start + size]
        with np.errstate(invalid="ignore", over="ignore"):
            part[:] = part + signed if add else signed
        start, end = start + size, end + h
