"""COO: indices and values side by side, raw. The papers' 2 words an entry (float32, length <= 2^32)."""

from __future__ import annotations

from dataclasses import dataclass

from sparsecoll.errors import CommunicationError
from sparsecoll.formats.base import HEADER, Buffer, Format, Plan, WireDtype
from sparsecoll.kernels import kernels_of
from sparsecoll.vector import SparseVector


@dataclass(frozen=True)
class Coo(Format):
    """Indices and values. After the header comes the array with the wider items, so that both stay aligned.

    Size in bytes: 16 + nnz * (index bytes + value bytes).
    """

    id = 1
    name = "coo"

    def plan(self, x: SparseVector, wire: WireDtype) -> Plan:
        def write(buffer: Buffer) -> None:
            blocks = [(x.indices, x.indices.dtype), (wire.pack(x.values), wire.stored)]
            blocks.sort(key=lambda block: -block[1].itemsize)
            offset = HEADER.size
            for array, dtype in blocks:
                buffer[offset : offset + array.nbytes].view(dtype)[:] = array
                offset += array.nbytes

        return Plan(HEADER.size + x.nnz * (x.indices.dtype.itemsize + wire.stored.itemsize), write)

    def decode(self, buffer: Buffer, length: int) -> SparseVector:
        wire, index, nnz = self._read_header(buffer, length)
        self._check_size(buffer, HEADER.size + nnz * (index.itemsize + wire.stored.itemsize), nnz)
        first = HEADER.size
        if index.itemsize >= wire.stored.itemsize:
            middle = first + nnz * index.itemsize
            indices, stored = buffer[first:middle].view(index), buffer[middle:].view(wire.stored)
        else:
            middle = first + nnz * wire.stored.itemsize
            stored, indices = buffer[first:middle].view(wire.stored), buffer[middle:].view(index)
        if kernels_of(buffer).first_unsorted(indices, length) >= 0:
            raise CommunicationError(f"message: coo indices are not strictly ascending below {length}")
        return SparseVector.from_sorted_unchecked(indices, wire.unpack(stored), length)
