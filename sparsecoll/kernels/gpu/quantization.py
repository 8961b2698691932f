"""Kernels of quantized values: a scale for each bucket of values, and codes of a few bits."""

from __future__ import annotations

from sparsecoll.kernels.gpu import device
from sparsecoll.kernels.gpu.device import Array, launch, u32
from sparsecoll.kernels.keys import Code
from sparsecoll.kernels.reference.quantization import LEVELS


def quantize(
    values: Array, first: int, code: Code, seed: int | None, scales: Array, out: Array, keep_error: bool
) -> None:
    bits, levels, bucket = code
    kind, key = u32(LEVELS.index(levels)), (seed or 0) & (2**64 - 1)
    buckets = (values, values.size, first, bucket, scales.size, u32(bits), kind, scales)
    launch("quantization", "bucket_scales", values.size, *buckets, blocks=min(scales.size, device.BLOCKS))
    how = (u32(bits), kind, u32(seed is None), u32(keep_error), key)
    launch("quantization", "quantize", out.size, values, values.size, first, bucket, *how, scales, out, out.size)


def dequantize(codes: Array, first: int, code: Code, scales: Array, out: Array, add: bool) -> None:
    bits, levels, bucket = code
    how = (u32(bits), u32(LEVELS.index(levels)), u32(add))
    launch("quantization", "dequantize", out.size, codes, first, bucket, *how, scales, out, out.size)
