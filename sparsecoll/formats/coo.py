"""COO: indices and values side by side, raw. The papers' 2 words an entry (float32, length <= 2^32)."""

from __future__ import annotations

from dataclasses import dataclass

from sparsecoll.errors import CommunicationError
from sparsecoll.formats.base import HEADER, Buffer, Encoding, Format, WireDtype, index_and_value_bytes
from sparsecoll.kernels import kernels_of
from sparsecoll.vector import SparseVector


@dataclass(frozen=True)
class CooFormat(Format):
    """Indices and values. After the header comes the array with the wider items, so that both stay aligned.

    Size in bytes: 16 + nnz * (index bytes + value bytes).
    """

    id = 1
    name = "coo"

    def plan(self, x: SparseVector, wire: WireDtype) -> Encoding:
        indices, values = x.indices, x.values
        where, what = index_and_value_bytes(HEADER.size, indices.size, indices.dtype, wire)

        def write(buffer: Buffer) -> None:
            buffer[where].view(indices.dtype)[:] = indices
            buffer[what].view(wire.stored)[:] = wire.pack(values)

        return Encoding(max(where.stop, what.stop), write)

    def decode(self, buffer: Buffer, length: int) -> SparseVector:
        wire, index, nnz = self.read_header(buffer, length)
        self.check_size(buffer, HEADER.size + nnz * (index.itemsize + wire.stored.itemsize), nnz)
        where, what = index_and_value_bytes(HEADER.size, nnz, index, wire)
        indices, stored = buffer[where].view(index), buffer[what].view(wire.stored)
        if kernels_of(buffer).first_unsorted(indices, length) >= 0:
            raise CommunicationError(f"message: coo indices are not strictly ascending below {length}")
        return SparseVector.from_sorted_unchecked(indices, wire.unpack(stored), length)
