"""Packed: the gaps between indices, Rice-coded at close to their entropy, and the values, whose exponents are coded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from sparsecoll.errors import CommunicationError, check_integer
from sparsecoll.formats.base import HEADER, Buffer, Encoding, Format, WireDtype
from sparsecoll.formats.codes import Codes, check_dtype, encode_finite
from sparsecoll.kernels import kernels_of
from sparsecoll.kernels.memory import empty
from sparsecoll.kernels.reference.exponents import EXPONENT_BLOCK
from sparsecoll.kernels.reference.rice import RICE_BLOCKS, RICE_PAD
from sparsecoll.vector import RowSparse, SparseVector

START = HEADER.size + 8
BUCKET = 512  # number of values that share a scale
EXPONENT_BITS = {"float16": 5, "bfloat16": 8, "float32": 8}  # of the dtypes whose exponents are coded
LEAST = 1024  # from so many values on, exponents are coded: a few bytes are not worth the time


@dataclass(frozen=True)
class PackedFormat(Format):
    """Header, first index (8 bytes), values, block size, table, coded gaps, 8 zero bytes. It is lossless.

    Every block of 1,024, 256 or 128 gaps (the size that codes a sample of the message shortest) has its own Rice
    parameter, which follows the local density. The table has 16 bits per block, the parameter and the bytes of the
    quotients, so that several threads or a GPU can decode blocks in parallel. An entry may be a row of several values.

    Size in bytes: 34 + nnz * value bytes (plus 1 if that is odd) + 2 * blocks + the coded gaps. These take 1.006 to
    1.02 times the entropy log2(C(n, nnz)) of uniform indices at densities of 0.1 to 10 %, and less if indices cluster.
    1,024 and more values of float32, bfloat16 or float16 in rows, or of at most half of the coordinates between the
    first and the last, are sent as PackedExponents if that is smaller; if there are more, coding takes too long.

    Source: Rice, "Some Practical Universal Noiseless Coding Techniques", JPL 79-22, 1979.
    """

    id = 4
    name = "packed"
    per_byte: ClassVar[int] = 1  # the most entries per byte of a message

    def least_size(self, x: SparseVector, wire: WireDtype) -> int:
        return HEADER.size + x.values.size * (wire.stored.itemsize - (wire.name in EXPONENT_BITS))

    def planned(self, x: SparseVector | RowSparse, wire: WireDtype) -> tuple[Format, Encoding]:  # type: ignore[override]
        fits = wire.name in EXPONENT_BITS and x.values.size >= LEAST and (x.width > 0 or 2 * x.nnz <= x.extent)
        if type(self) is PackedFormat and fits:
            values = EXPONENTS._plan_values(x, wire)
            if values.size < self._value_bytes(int(x.values.size), wire):
                return EXPONENTS, EXPONENTS._plan(x, values)
        return self, self.plan(x, wire)

    def plan(self, x: SparseVector | RowSparse, wire: WireDtype) -> Encoding:
        return self._plan(x, self._plan_values(x, wire))

    def _plan(self, x: SparseVector | RowSparse, values: Encoding) -> Encoding:
        """Return the plan of a message from that of its values."""
        kernels = kernels_of(x.values)
        block = kernels.rice_block(x.indices)
        table = kernels.rice_table(x.indices, block)
        stop = START + values.size
        middle = stop + stop % 2
        payload = middle + 2 + table.nbytes
        coded = int(kernels.rice_offsets(table, x.nnz, block)[-1])

        def write(buffer: Buffer) -> None:
            buffer[HEADER.size : START].view(np.uint64)[:] = x.indices[:1] if x.nnz else 0
            values.write(buffer[START:stop])
            buffer[stop:middle] = 0
            buffer[middle : middle + 2].view(np.uint16)[:] = block
            buffer[middle + 2 : payload].view(np.uint16)[:] = table
            kernels.rice_encode(x.indices, table, block, buffer[payload:])

        return Encoding(payload + coded + RICE_PAD, write)

    def decode(self, buffer: Buffer, length: int, width: int = 0) -> SparseVector:
        if type(self) is PackedFormat and buffer.size and int(buffer[0]) == EXPONENTS.id:
            return EXPONENTS.decode(buffer, length, width)
        wire, index, nnz = self.read_header(buffer, length, self.per_byte, width)
        kernels, count = kernels_of(buffer), nnz * (width or 1)
        stop = START + self._stored_bytes(buffer[START:], count, wire)
        middle = stop + stop % 2
        block = int(buffer[middle : middle + 2].view(np.uint16)[0]) if buffer.size >= middle + 2 else 0
        if block not in RICE_BLOCKS:
            raise CommunicationError(f"message: packed with blocks of {block} in {buffer.size} bytes for {nnz} entries")
        payload = middle + 2 + 2 * -(-nnz // block)
        if buffer.size < payload + RICE_PAD:
            raise CommunicationError(f"message: {buffer.size} bytes are too few for {nnz} entries in packed")
        table = buffer[middle + 2 : payload].view(np.uint16)
        self.check_size(buffer, payload + int(kernels.rice_offsets(table, nnz, block)[-1]) + RICE_PAD, nnz)
        first = int(buffer[HEADER.size : START].view(np.uint64)[0]) if nnz else 0
        fits = first < length or nnz == 0
        indices = kernels.rice_decode(table, buffer[payload:], block, first, nnz, length, index) if fits else None
        if indices is None:
            raise CommunicationError(f"message: packed indices are damaged or not below {length}")
        values = self._values(buffer[START:stop], count, wire)
        if width:
            return RowSparse.from_sorted_unchecked(indices, values.reshape(nnz, width), length)  # type: ignore[return-value]
        return SparseVector.from_sorted_unchecked(indices, values, length)

    def _value_bytes(self, count: int, wire: WireDtype) -> int:
        """Return the number of bytes of so many values."""
        return count * wire.stored.itemsize

    def _plan_values(self, x: SparseVector | RowSparse, wire: WireDtype) -> Encoding:
        size = self._value_bytes(int(x.values.size), wire)
        return Encoding(size, lambda stored: self._write_values(stored, x, wire))

    def _stored_bytes(self, stored: Buffer, count: int, wire: WireDtype) -> int:
        """Return the number of bytes of the values with which `stored` begins."""
        return self._value_bytes(count, wire)

    def _write_values(self, stored: Buffer, x: SparseVector | RowSparse, wire: WireDtype) -> None:
        stored.view(wire.stored)[:] = wire.pack(x.values.reshape(-1))

    def _values(self, stored: Buffer, count: int, wire: WireDtype) -> Any:
        """Return the values in their bytes."""
        return wire.unpack(stored.view(wire.stored))


@dataclass(frozen=True)
class PackedExponents(PackedFormat):
    """As PackedFormat, with the exponents of the values in few bits, without loss; only PackedFormat chooses it.

    Values that were selected by magnitude, and their sums, have few different exponents. A block of 1,024 values has a
    least exponent and a width w of 1 to 8 bits, which make its code short; an exponent is coded as its distance from
    the least one, or as 2^w - 1 and a byte of its own (an escape). The table has 32 bits per block.

    Size in bytes: that of PackedFormat, with 4 * ceil(nnz / 1024) + nnz * (other bits + w) / 8 + escapes for values.
    In gradients at densities of 1 and 10 %, an exponent takes 1.1 to 3 bits in place of 8.
    """

    id = 11
    name = "packed exponents"

    def _plan_values(self, x: SparseVector | RowSparse, wire: WireDtype) -> Encoding:
        kernels, bits = kernels_of(x.values), EXPONENT_BITS[wire.name]
        values = wire.pack(x.values.reshape(-1))
        values = values.view(f"u{values.itemsize}")
        table = kernels.exponent_table(values, bits)
        coded = int(kernels.exponent_offsets(table, values.size, bits, values.itemsize)[-1])

        def write(stored: Buffer) -> None:
            stored[: table.nbytes].view(np.uint32)[:] = table
            kernels.exponent_encode(values, bits, table, stored[table.nbytes :])

        return Encoding(table.nbytes + coded, write)

    def _stored_bytes(self, stored: Buffer, count: int, wire: WireDtype) -> int:
        bits, damaged = EXPONENT_BITS.get(wire.name, 0), stored.size < 4 * -(-count // EXPONENT_BLOCK)
        table = self._table(stored, 0 if damaged else count)
        width = table >> 8 & 255
        if damaged or not bits or (width == 0).any() or (width > bits).any():
            raise CommunicationError(f"message: exponents of {count} values of {wire.name} are damaged")
        offsets = kernels_of(stored).exponent_offsets(table, count, bits, wire.stored.itemsize)
        if (size := int(table.nbytes + offsets[-1])) > stored.size:
            expected = f"{size} bytes of {count} values in {self.name}"
            raise CommunicationError(f"message: expected {expected}, got {stored.size}")
        return size

    def _values(self, stored: Buffer, count: int, wire: WireDtype) -> Any:
        table, out = self._table(stored, count), empty(count, f"u{wire.stored.itemsize}", stored)
        bits = EXPONENT_BITS[wire.name]
        if not kernels_of(stored).exponent_decode(stored[table.nbytes :], bits, table, out):
            raise CommunicationError(f"message: exponents of {count} values of {wire.name} are damaged")
        return wire.unpack(out.view(wire.stored))

    @staticmethod
    def _table(stored: Buffer, count: int) -> Any:
        return stored[: 4 * -(-count // EXPONENT_BLOCK)].view(np.uint32)


EXPONENTS = PackedExponents()


@dataclass(frozen=True)
class PackedIndices(PackedFormat):
    """As PackedFormat, without values: the receiver gets True in their place. For ranks that first agree on indices.

    Size in bytes: 34 + 2 * blocks + the coded gaps.
    """

    id = 9
    name = "packed indices"
    lossy = True
    per_byte = 8

    def _value_bytes(self, count: int, wire: WireDtype) -> int:
        return 0

    def _write_values(self, stored: Buffer, x: SparseVector | RowSparse, wire: WireDtype) -> None:
        pass

    def _values(self, stored: Buffer, count: int, wire: WireDtype) -> Any:
        values = empty(count, np.uint8, stored).view(np.bool_)
        values[:] = True
        return values


@dataclass(frozen=True)
class PackedCodesFormat(PackedFormat):
    """As PackedFormat, but with values of 8 or 4 bits: for error feedback, which makes up for the rounding.

    Values are rounded to the nearest float of 8 bits (E4M3) or 4 bits (E3M0: sign * scale / 2^i for i of 0 to 6, or 0),
    relative to the largest magnitude of 512 consecutive entries, the scale. Values that are levels do not change, so
    that encoding twice gives the same as encoding once. No entry is dropped; small values may arrive as zeros. Rounding
    errors do not count as contributed, and a residual keeps them. For finite float32 and float64: float32 arrives.

    Size in bytes: 38 + 4 * ceil(nnz / 512) + nnz * bits / 8, and the table and the coded gaps of PackedFormat. At a
    density of 1 % an entry takes 12.2 bits with 4 bits, and 40.2 with float32.

    Args:
        bits: bits per value, sign included: 4 (the default) or 8.

    Raises:
        ValueError: `bits` is out of range.
        TypeError: `bits` is not an integer.
    """

    id = 10
    name = "packed_codes"
    lossy = True
    per_byte = 2

    bits: int = 4

    def __post_init__(self) -> None:
        check_integer("bits", self.bits)
        if self.bits not in (8, 4):
            raise ValueError(f"bits: expected 8 or 4, got {self.bits}")

    @property
    def _codes(self) -> Codes:
        return Codes(self.bits, "float", BUCKET)

    def roundtrip(self, x: SparseVector, value_dtype: str | None = None) -> SparseVector:
        """Return x with its values as a receiver gets them."""
        check_dtype(self, x)
        stored = empty(self._codes.size(0, x.nnz), np.uint8, x.values)
        encode_finite(self, self._codes, x.values, stored)
        return x.with_values(self._codes.values(stored, 0, x.nnz).astype(x.dtype, copy=False))

    def plan(self, x: SparseVector, wire: WireDtype) -> Encoding:  # type: ignore[override]
        check_dtype(self, x)
        plan = super().plan(x, wire)

        def write(buffer: Buffer) -> None:
            buffer[1] = 2  # the values arrive as float32
            plan.write(buffer)

        return Encoding(plan.size, write)

    def decode(self, buffer: Buffer, length: int, width: int = 0) -> SparseVector:
        bits = int(buffer[START : START + 4].view(np.uint32)[0]) if buffer.size >= START + 4 else 0
        if bits not in (8, 4):
            raise CommunicationError(f"message: packed values of {bits} bits in {buffer.size} bytes")
        return super(PackedCodesFormat, PackedCodesFormat(bits)).decode(buffer, length, width)

    def _value_bytes(self, count: int, wire: WireDtype) -> int:
        return 4 + self._codes.size(0, count)

    def _write_values(self, stored: Buffer, x: SparseVector | RowSparse, wire: WireDtype) -> None:
        stored[:4].view(np.uint32)[0] = self.bits
        encode_finite(self, self._codes, x.values, stored[4:])

    def _values(self, stored: Buffer, count: int, wire: WireDtype) -> Any:
        return self._codes.values(stored[4:], 0, count)
