"""COO: indices and values side by side, raw. The papers' 2 words an entry (float32, length <= 2^32)."""

from __future__ import annotations

from sparsecoll.errors import CommunicationError
from sparsecoll.formats.base import HEADER, Buffer, Format, wire_dtype
from sparsecoll.kernels import kernels_of
from sparsecoll.vector import SparseVector


class Coo(Format):
    """Header, then the block of the wider item (so that both stay aligned), then the other.

    Size: 16 + nnz * (index bytes + value bytes).
    """

    id = 1
    name = "coo"

    def size(self, x: SparseVector, value_dtype: str | None = None) -> int:
        stored = wire_dtype(x.dtype, value_dtype).stored
        return HEADER.size + x.nnz * (x.indices.dtype.itemsize + stored.itemsize)

    def encode(self, x: SparseVector, value_dtype: str | None = None) -> Buffer:
        buffer, wire = self._start(x, value_dtype)
        blocks = [(x.indices, x.indices.dtype), (wire.pack(x.values), wire.stored)]
        blocks.sort(key=lambda block: -block[1].itemsize)
        place = HEADER.size
        for array, dtype in blocks:
            buffer[place : place + array.nbytes].view(dtype)[:] = array
            place += array.nbytes
        return buffer

    def decode(self, buffer: Buffer, length: int) -> SparseVector:
        wire, index, nnz = self._opened(buffer, length)
        expected = HEADER.size + nnz * (index.itemsize + wire.stored.itemsize)
        if buffer.size != expected:
            raise CommunicationError(f"message: expected {expected} bytes for {nnz} entries in coo, got {buffer.size}")
        first = HEADER.size
        if index.itemsize >= wire.stored.itemsize:
            middle = first + nnz * index.itemsize
            indices, stored = buffer[first:middle].view(index), buffer[middle:].view(wire.stored)
        else:
            middle = first + nnz * wire.stored.itemsize
            stored, indices = buffer[first:middle].view(wire.stored), buffer[middle:].view(index)
        if kernels_of(buffer).first_disorder(indices, length) >= 0:
            raise CommunicationError(f"message: coo indices are not strictly ascending below {length}")
        return SparseVector.trusted(indices, wire.unpack(stored), length)
