"""Values quantized to a few bits, as PackedCodesFormat and LowBit send them (QSGD, Alistarh and others, 2017)."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsecoll.errors import check_integer
from sparsecoll.formats.base import Buffer, Format
from sparsecoll.kernels import kernels_of
from sparsecoll.kernels.keys import Code
from sparsecoll.kernels.memory import contiguous, empty
from sparsecoll.kernels.reference.quantization import code_bytes
from sparsecoll.telemetry.trace import span
from sparsecoll.vector import SparseVector, saturating_cast


class Codes(Code):
    """Messages of quantized dense values: a float32 scale for each bucket, then the codes of all values."""

    __slots__ = ()

    def buckets(self, first: int, count: int) -> int:
        """Return the number of buckets of `count` values from index `first` on."""
        return (first + count - 1) // self.bucket - first // self.bucket + 1 if count else 0

    def size(self, first: int, count: int) -> int:
        """Return the size of a message of `count` values from index `first` on, in bytes."""
        return 4 * self.buckets(first, count) + code_bytes(first, count, self.bits, self.bucket)

    def encode(self, values: Any, first: int, seed: int | None, message: Buffer, keep_error: bool = False) -> bool:
        """Write the message of the values from index `first` on; return whether all are finite.

        Args:
            values: array of floats.
            first: index of the first one.
            seed: seed of the stochastic rounding; None for the nearest level.
            message: memory of `size` bytes.
            keep_error: replace the values by their rounding errors (default: False), except in a bucket that holds NaN
                or infinity.
        """
        scales, codes = self._split(message, first, values.size)
        narrow = contiguous(saturating_cast(values, np.dtype(np.float32)), np.float32)
        in_place = keep_error and narrow is values
        with span("encode", values.size):
            kernels_of(narrow).quantize(narrow, first, self, seed, scales, codes, in_place)
            finite = bool(np.isfinite(scales).all())
            if keep_error and not in_place and finite:
                np.subtract(values, self.values(message, first, values.size), out=values, casting="same_kind")
        return finite

    def values(self, message: Buffer, first: int, count: int) -> Any:
        """Return the values in a message, float32."""
        out = empty(count, np.float32, message)
        self.decode(message, first, out)
        return out

    def decode(self, message: Buffer, first: int, out: Any, add: bool = False, divisor: int = 1) -> None:
        """Write the values in a message to `out`, or add them; they are divided by `divisor` unless added."""
        scales, codes = self._split(message, first, out.size)
        with span("decode", out.size):
            if out.dtype == np.float32 and out.flags.c_contiguous:
                scales = scales / np.float32(divisor) if divisor > 1 else scales
                kernels_of(out).dequantize(codes, first, self, scales, out, add)
                return
            values = empty(out.size, np.float32, out)
            kernels_of(out).dequantize(codes, first, self, scales, values, False)
            if add:
                np.add(out, values, out=out, casting="same_kind")
            else:
                out[:] = saturating_cast(values.astype(np.result_type(out.dtype, np.float32)) / divisor, out.dtype)

    def _split(self, message: Buffer, first: int, count: int) -> tuple[Any, Buffer]:
        middle = 4 * self.buckets(first, count)
        return message[:middle].view(np.float32), message[middle:]


def encode_finite(form: Format, codes: Codes, values: Any, message: Buffer) -> None:
    """Write `codes.encode` of the values; raise ValueError if one is NaN or infinite, which no scale can express."""
    if not codes.encode(values, 0, None, message):
        raise ValueError(f"x: expected finite values with format={form!r}, got NaN or infinity")


def check_bucket(bucket: int) -> None:
    """Raise unless `bucket` is a number of values that may share a scale."""
    check_integer("bucket", bucket, 8, 2**32 - 1)


def check_dtype(form: Format, x: SparseVector) -> None:
    """Raise ValueError unless the values of x can be quantized."""
    if x.dtype not in (np.float32, np.float64):
        raise ValueError(f"format: expected float32 or float64 for {form!r}, got {x.dtype}")
