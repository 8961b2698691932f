"""Dense: all values from the first index to the last. The smallest format for a region that is full."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsecoll.errors import CommunicationError
from sparsecoll.formats.base import HEADER, Buffer, Encoding, Format, WireDtype, first_index, holds_zeros, nonzeros_of
from sparsecoll.formats.bitmap import BitmapFormat
from sparsecoll.vector import SparseVector


@dataclass(frozen=True)
class DenseFormat(Format):
    """Header, first index (8 bytes), then last - first + 1 values. A vector with explicit zeros is sent as a bitmap.

    Size in bytes: 24 + (last - first + 1) * value bytes; 24 without entries.
    """

    id = 2
    name = "dense"

    def fitting(self, x: SparseVector, wire: WireDtype) -> Format:
        return BitmapFormat() if holds_zeros(x, wire) else self

    def plan(self, x: SparseVector, wire: WireDtype) -> Encoding:
        def write(buffer: Buffer) -> None:
            first = first_index(x)
            buffer[16:24].view(np.uint64)[0] = first
            dense = buffer[24:].view(wire.stored)
            dense[:] = 0
            dense[x.indices - x.indices.dtype.type(first)] = wire.pack(x.values)

        return Encoding(self.least_size(x, wire), write)

    def least_size(self, x: SparseVector, wire: WireDtype) -> int:
        return HEADER.size + 8 + x.extent * wire.stored.itemsize

    def decode(self, buffer: Buffer, length: int) -> SparseVector:
        wire, index, nnz = self.read_header(buffer, length)
        if buffer.size < 24 or (buffer.size - 24) % wire.stored.itemsize:
            raise CommunicationError(f"message: a dense message cannot have {buffer.size} bytes")
        first = int(buffer[16:24].view(np.uint64)[0])
        values = wire.unpack(buffer[24:].view(wire.stored))
        if first + max(values.size, 1) > max(length, 1):
            raise CommunicationError(f"message: {values.size} dense values from {first} on do not fit length {length}")
        offsets, nonzeros = nonzeros_of(values, nnz)
        indices = offsets.astype(index, copy=False) + index.type(first)
        return SparseVector.from_sorted_unchecked(indices, nonzeros, length)
