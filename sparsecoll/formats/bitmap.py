"""Bitmap: one bit per coordinate from the first stored index to the last. Smallest at a density of about a third."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsecoll.errors import CommunicationError
from sparsecoll.formats.base import HEADER, Buffer, Encoding, Format, WireDtype, first_index
from sparsecoll.kernels import kernels_of
from sparsecoll.vector import SparseVector


@dataclass(frozen=True)
class BitmapFormat(Format):
    """Header, first index (8 bytes), 64-bit words in which bit i stands for index first + i, then the values.

    Size in bytes: 24 + 8 * ceil((last - first + 1) / 64) + nnz * value bytes.
    """

    id = 3
    name = "bitmap"

    def plan(self, x: SparseVector, wire: WireDtype) -> Encoding:
        start = HEADER.size + 8
        middle = start + 8 * -(-x.extent // 64)

        def write(buffer: Buffer) -> None:
            first = first_index(x)
            buffer[16:24].view(np.uint64)[0] = first
            kernels_of(x.values).bitmap_write(x.indices, first, buffer[start:middle].view(np.uint64))
            buffer[middle:].view(wire.stored)[:] = wire.pack(x.values)

        return Encoding(self.least_size(x, wire), write)

    def least_size(self, x: SparseVector, wire: WireDtype) -> int:
        return HEADER.size + 8 + 8 * -(-x.extent // 64) + x.nnz * wire.stored.itemsize

    def decode(self, buffer: Buffer, length: int) -> SparseVector:
        wire, index, nnz = self.read_header(buffer, length)
        middle = buffer.size - nnz * wire.stored.itemsize
        if middle < 24 or middle % 8:
            raise CommunicationError(f"message: a bitmap message of {nnz} entries cannot have {buffer.size} bytes")
        first, words = int(buffer[16:24].view(np.uint64)[0]), buffer[24:middle].view(np.uint64)
        if first + 64 * (words.size - 1) + int(words[-1:].sum()).bit_length() > length:
            raise CommunicationError(f"message: {64 * words.size} bits from {first} on do not fit length {length}")
        if (indices := kernels_of(buffer).bitmap_read(words, first, nnz, index)) is None:
            raise CommunicationError(f"message: the bitmap does not hold {nnz} entries")
        return SparseVector.from_sorted_unchecked(indices, wire.unpack(buffer[middle:].view(wire.stored)), length)
