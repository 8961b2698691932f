"""Kernels of quantized values: a scale for each bucket of values, and codes of a few bits."""

from __future__ import annotations

from typing import Any

from sparsecoll.kernels.gpu import device
from sparsecoll.kernels.gpu.device import launch, u32
from sparsecoll.kernels.reference.quantization import LEVELS

Array = Any  # of CuPy


def quantize(
    values: Array,
    first: int,
    bits: int,
    levels: str,
    bucket: int,
    seed: int | None,
    scales: Array,
    out: Array,
    keep_error: bool,
) -> None:
    kind, key = u32(LEVELS.index(levels)), (seed or 0) & (2**64 - 1)
    buckets = (values, values.size, first, bucket, scales.size, u32(bits), kind, scales)
    launch("quantization", "bucket_scales", values.size, *buckets, blocks=min(scales.size, device.BLOCKS))
    how = (u32(bits), kind, u32(seed is None), u32(keep_error), key)
    launch("quantization", "quantize", out.size, values, values.size, first, bucket, *how, scales, out, out.size)


def dequantize(
    codes: Array, first: int, bits: int, levels: str, bucket: int, scales: Array, out: Array, add: bool
) -> None:
    how = (u32(bits), u32(LEVELS.index(levels)), u32(add))
    launch("quantization", "dequantize", out.size, codes, first, bucket, *how, scales, out, out.size)
