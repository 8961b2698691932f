"""Quantized values: a dense window in few bits a value (as SparCML's second stage; QSGD, Alistarh and others, 2017)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparsecoll.errors import CommunicationError
from sparsecoll.formats.base import HEADER, Buffer, Format, Plan, WireDtype, first_index, nonzero_entries
from sparsecoll.kernels import kernels_of
from sparsecoll.kernels.keys import Code
from sparsecoll.kernels.memory import asarray_like, contiguous, empty
from sparsecoll.kernels.reference.quantization import code_bytes
from sparsecoll.telemetry.trace import span
from sparsecoll.vector import SparseVector, saturating_cast

START = HEADER.size + 24


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
            keep_error: subtract what the message says from the values (default: False), except in a bucket that holds
                NaN or infinity.
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


@dataclass(frozen=True)
class Quantized(Format):
    """Values quantized to a few bits. Header, first index, span, bucket and bits, a scale per bucket, the codes.

    A bucket consists of the values with the same index // `bucket`; its scale is their largest magnitude. A value v
    becomes sign(v) * scale * level / L, with L = 2^(bits-1) - 1 levels above zero and level = |v| * L / scale, rounded
    up or down at random so that the result is unbiased. Values that are levels do not change, so that encoding twice
    gives the same as encoding once. Values rounded to zero are missing on arrival.

    Size in bytes: 40 + 4 * buckets + ceil(span * bits / 8); a bucket's codes begin with a byte of their own. For
    float32 and float64, which arrive as float32.

    Args:
        bits: bits per value, sign included: 8 (the default), 4 or 2.
        seed: seed of the rounding; value i of any message is rounded by (seed, i). The receiver does not need it, so
            ranks may have different ones.
        bucket: number of values that share a scale (default: 512).

    Raises:
        ValueError: `bits` or `bucket` is out of range.

    See Also:
        `sparsecoll.LowBit`, which sums dense vectors in few bits.
    """

    id = 7
    name = "quantized"
    lossy = True

    bits: int = 8
    seed: int = field(default=0, repr=False)  # not among the arguments that ranks compare
    bucket: int = 512

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8):
            raise ValueError(f"bits: expected 8, 4 or 2, got {self.bits}")
        check_bucket(self.bucket)

    @property
    def _codes(self) -> Codes:
        return Codes(self.bits, "linear", self.bucket)

    def plan(self, x: SparseVector, wire: WireDtype) -> Plan:
        check_dtype(self, x)
        first, count = first_index(x), x.extent

        def write(buffer: Buffer) -> None:
            buffer[1] = 2  # whatever came in, float32 arrives
            stated = np.array([first, count, self.bucket << 8 | self.bits], np.uint64)
            buffer[HEADER.size : START] = asarray_like(stated.view(np.uint8), buffer)
            values = empty(count, np.float32, x.values)
            values[:] = 0
            narrow = saturating_cast(x.values, values.dtype)
            values[(x.indices - x.indices.dtype.type(first)).astype(np.int64)] = narrow
            encode_finite(self, self._codes, values, first, self.seed, buffer[START:])

        return Plan(START + self._codes.size(first, count), write)

    def decode(self, buffer: Buffer, length: int) -> SparseVector:
        _, _, nnz = self.read_header(buffer, length, per_byte=4)
        stated = buffer[HEADER.size : START].view(np.uint64).tolist() if buffer.size >= START else (0, length + 1, 0)
        first, count, options = stated
        valid = options & 255 in (2, 4, 8) and 8 <= options >> 8 < 2**32
        if not valid or first + count > length or count > 4 * buffer.size:
            raise CommunicationError(f"message: {count} quantized values from {first} on do not fit length {length}")
        codes = Quantized(options & 255, 0, options >> 8)._codes
        self.check_size(buffer, START + codes.size(first, count), nnz)
        return nonzero_entries(codes.values(buffer[START:], first, count), first, nnz, length)


def encode_finite(form: Format, codes: Codes, values: Any, first: int, seed: int | None, message: Buffer) -> None:
    """Write `codes.encode` of the values; raise ValueError if one is NaN or infinite, which no scale can express."""
    if not codes.encode(values, first, seed, message):
        raise ValueError(f"x: expected finite values with format={form!r}, got NaN or infinity")


def check_bucket(bucket: int) -> None:
    """Raise ValueError unless `bucket` is a number of values that may share a scale."""
    if not 8 <= bucket < 2**32:
        raise ValueError(f"bucket: expected in [8, 2^32), got {bucket}")


def check_dtype(form: Format, x: SparseVector) -> None:
    """Raise ValueError unless the values of x can be quantized."""
    if x.dtype not in (np.float32, np.float64):
        raise ValueError(f"format: expected float32 or float64 for {form!r}, got {x.dtype}")
