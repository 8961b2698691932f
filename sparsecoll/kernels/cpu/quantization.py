"""Kernels of quantized values: a scale for each bucket of values, and codes of a few bits."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sparsecoll.kernels.cpu.lanes import inlined, jit
from sparsecoll.kernels.keys import Array, Code
from sparsecoll.kernels.memory import readonly
from sparsecoll.kernels.reference.quantization import DRAWN, EDGE, FRACTION, LANES, LARGEST, top_level

INFINITY = np.float32(np.inf)


@inlined
def _key(seed, number):  # type: ignore[no-untyped-def]
    z = seed + number * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.uint32(z >> np.uint64(32))


@inlined
def _uniform(c, span, edge):  # type: ignore[no-untyped-def]
    c = np.uint32(np.uint32(c ^ (c >> np.uint32(16))) * np.uint32(0x7FEB352D))
    c = np.uint32(np.uint32(c ^ (c >> np.uint32(15))) * np.uint32(0x846CA68B))
    c = np.uint32(c ^ (c >> np.uint32(16))) >> np.uint32(8)
    return np.float32(np.float32(np.int32(c)) * span + edge)


@inlined
def _largest(words):  # type: ignore[no-untyped-def]
    key = np.uint32(0)
    for i in range(words.size):
        key = max(key, np.uint32(words[i] & np.uint32(0x7FFFFFFF)))
    return min(key, LARGEST)


@inlined
def _mean(values, sums):  # type: ignore[no-untyped-def]
    for lane in range(LANES):
        sums[lane] = 0
    whole = values.size - values.size % LANES
    for start in range(0, whole, LANES):
        row = values[start : start + LANES]
        for lane in range(LANES):
            sums[lane] += abs(row[lane])
    for i in range(whole, values.size):
        sums[i - whole] += abs(values[i])
    width = LANES
    while width > 1:
        width >>= 1
        for lane in range(width):
            sums[lane] += sums[width + lane]
    return np.float32(sums[0] / np.float32(values.size))


@inlined
def _float_level(exact, u, fraction):  # type: ignore[no-untyped-def]
    """The code of the narrow float near `exact`: the upper bits of a float32."""
    width = np.int32(23 - fraction)
    added = np.int32(np.float32(1 << (23 - fraction)) * u)
    wide = np.int32(np.int32(exact.view(np.int32) + added) >> width) - np.int32((126 + fraction) << fraction)
    return np.int32(exact + u) if exact < np.float32(1 << fraction) else np.int32(wide)


@inlined
def _multiple(level, fraction):  # type: ignore[no-untyped-def]
    """A float in multiples of the smallest one."""
    one = np.int32(1 << fraction)
    power = np.int32(max(np.int32(level >> np.int32(fraction)) - np.int32(1), 0))
    whole = np.int32(np.int32(level & np.int32(one - np.int32(1))) + one)
    return level if level < one else np.int32(whole << power)


@functools.cache
def _encoder(bits: int, levels: str, keep: bool) -> Any:
    """The kernel for these options, which are constants to the compiler, so that it vectorizes the inner loop."""
    mean, floats, slots = levels == "mean", levels == "float", 8 // bits
    fraction = FRACTION[bits] if floats else 0
    top, highest = np.float32(top_level(bits, levels)), np.uint32(2 ** (bits - 1) - 1)
    sign, near = np.uint32(1 << (bits - 1)), np.float32(0.625 if bits > 1 else 1)

    @jit
    def encode_slot(part, codes, slot, scale, factor, offset, u_span, u_edge):  # type: ignore[no-untyped-def]
        step, shift = np.float32(scale / top), np.uint32(slot * bits)
        edge, close, far = np.float32(1.25) * scale, np.float32(scale * near), np.float32(scale * np.float32(1.875))
        for j in range(part.size):
            value = part[j]
            magnitude = abs(value)
            if mean:
                level = np.int32(magnitude >= edge) if bits > 1 else np.int32(0)
                back = far if level > 0 else close
            else:
                u = _uniform(np.uint32(offset + np.uint32(j)), u_span, u_edge)
                exact = np.float32(magnitude * factor)
                level = _float_level(exact, u, fraction) if floats else np.int32(exact + u)
                multiple = np.float32(_multiple(level, fraction) if floats else level)
                back = scale if multiple == top else np.float32(multiple * step)
            code = np.uint32(level) | (sign if value < 0 else np.uint32(0))
            if slot == 0:
                codes[j] = np.uint8(code)
            else:
                codes[j] |= np.uint8(np.uint32(code << shift))
            if keep:
                part[j] = value + back if value < 0 else value - back

    @jit
    def encode(values, words, first, bucket, seed, u_span, u_edge, scales, scale_words, out):  # type: ignore[no-untyped-def]
        start, end, sums = 0, 0, np.empty(LANES, np.float32)
        for b in range(scales.size):
            number = first // bucket + np.uint64(b)
            own = values[start : min(np.int64((number + np.uint64(1)) * bucket - first), values.size)]
            scale_words[b] = _largest(words[start : start + own.size])
            if mean and scales[b] < INFINITY:
                scales[b] = min(_mean(own, sums), INFINITY)
            factor = np.float32(top / scales[b]) if scales[b] > 0 else INFINITY
            if not factor < INFINITY:
                scales[b] = 0
            half = (own.size * bits + 7) >> 3
            codes = out[end : end + half]
            if 0 < scales[b] < INFINITY:
                key = _key(seed, number) + np.uint32(first + np.uint64(start) - number * bucket)
                for slot in range(slots):
                    begin = min(slot * half, own.size)
                    part = own[begin : min(begin + half, own.size)]
                    offset = np.uint32(key + np.uint32(begin))
                    encode_slot(part, codes, slot, scales[b], factor, offset, u_span, u_edge)
            else:
                codes[:] = 0
                for j in range(own.size):
                    code = (highest if scales[b] > 0 else np.uint32(0)) | (sign if own[j] < 0 else np.uint32(0))
                    codes[j % half] |= np.uint8(code << np.uint32(j // half * bits))
            start, end = start + own.size, end + half

    return encode


@functools.cache
def _decoder(bits: int, levels: str, add: bool) -> Any:
    mean, floats, slots = levels == "mean", levels == "float", 8 // bits
    fraction = FRACTION[bits] if floats else 0
    top, near = np.float32(top_level(bits, levels)), np.float32(0.625 if bits > 1 else 1)
    sign = np.uint32(1 << (bits - 1))

    @jit
    def decode(codes, first, bucket, scales, out):  # type: ignore[no-untyped-def]
        start, end = 0, 0
        for b in range(scales.size):
            own = out[start : min(np.int64((first // bucket + np.uint64(b) + np.uint64(1)) * bucket - first), out.size)]
            half, scale = (own.size * bits + 7) >> 3, scales[b]
            stored, step = codes[end : end + half], np.float32(scale / top)
            close, far = np.float32(scale * near), np.float32(scale * np.float32(1.875))
            for slot in range(slots):
                begin, shift = min(slot * half, own.size), np.uint32(slot * bits)
                part = own[begin : min(begin + half, own.size)]
                for j in range(part.size):
                    code = np.uint32(np.uint32(stored[j]) >> shift)
                    level = np.int32(code & np.uint32(sign - np.uint32(1)))
                    multiple = np.float32(_multiple(level, fraction) if floats else level)
                    back = scale if multiple == top else np.float32(multiple * step)
                    if mean:
                        back = far if level > 0 else close
                    back = -back if code & sign else back
                    part[j] = part[j] + back if add else back
            start, end = start + own.size, end + half

    return decode


def quantize(
    values: Array, first: int, code: Code, seed: int | None, scales: Array, out: Array, keep_error: bool
) -> None:
    bits, levels, bucket = code
    given = values if keep_error else readonly(values)
    key = np.uint64((seed or 0) & (2**64 - 1))
    u = (np.float32(0), np.float32(0.5)) if seed is None else (DRAWN, EDGE)
    _encoder(bits, levels, keep_error)(
        given, given.view(np.uint32), np.uint64(first), np.uint64(bucket), key, *u, scales, scales.view(np.uint32), out
    )


def dequantize(codes: Array, first: int, code: Code, scales: Array, out: Array, add: bool) -> None:
    bits, levels, bucket = code
    _decoder(bits, levels, add)(readonly(codes), np.uint64(first), np.uint64(bucket), readonly(scales), out)
