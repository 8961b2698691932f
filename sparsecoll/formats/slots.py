"""Hashed slots (Wang, Xu, Wu, Shrivastava, Ng, "DRAGONN: Distributed Randomized Approximate Gradients", ICML 2022)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sparsecoll.errors import CommunicationError, check_integer
from sparsecoll.formats.base import HEADER, Buffer, Encoding, Format, WireDtype, index_and_value_bytes, rounded
from sparsecoll.kernels import kernels_of
from sparsecoll.kernels.memory import empty
from sparsecoll.vector import DenseVector, SparseVector

START = HEADER.size + 8


@dataclass(frozen=True)
class SlotsFormat(Format):
    """m slots, allocated in advance; each entry is written to the slot to which its index hashes (Algorithm 1).

    An entry that hashes to an occupied slot overwrites it, and the overwritten entry is not sent: it has to stay in the
    residual. The i-th of n entries (in index order) arrives with probability ((m - 1) / m)^(n - i) (Lemma A.5). Change
    the seed from message to message, so that other entries collide. Without `m`, the overwritten entries go to free
    slots, so that nothing is lost: a table whose size follows from the message would drop other entries each time that
    a message, or a part of one, is encoded again.

    Size in bytes: 24 + m * (index bytes + value bytes), whatever the number of entries. Unused slots contain the
    largest index.

    Args:
        m: number of slots; None, the default, for twice the number of entries of each message, of which none is lost.
        seed: seed of the hash function. The receiver does not need it, so ranks may have different ones.

    Raises:
        ValueError: `m` is not in (0, 2^32), or `seed` is negative.
        TypeError: One of them is not an integer.
    """

    id = 6
    name = "slots"
    lossy = True

    m: int | None = None
    seed: int = field(default=0, repr=False)  # not among the arguments that ranks compare

    def __post_init__(self) -> None:
        if self.m is not None:
            check_integer("m", self.m, 1, 2**32 - 1)
        check_integer("seed", self.seed, 0)

    def most_bytes(self, length: int, entry: int) -> int:
        return super().most_bytes(max(length, self.m or 0), entry)

    def index_dtype(self, length: int) -> np.dtype[np.generic]:
        """Return uint32 if length < 2^32, because the largest index, which marks unused slots, must not be in use."""
        return np.dtype(np.uint32 if length < 2**32 else np.uint64)

    def _entries(self, x: SparseVector) -> NDArray[np.int64]:
        """Return the number of the entry in each slot, or -1."""
        a, b, c = np.random.SeedSequence(self.seed).generate_state(3, np.uint64).tolist()
        kernels = kernels_of(x.values)
        slots = empty(2 * x.nnz if self.m is None else self.m, np.int64, x.indices)
        kernels.slots_write(kernels.hash_slots(x.indices, max(slots.size, 1), (a, b, c)), slots)
        if self.m is None:
            overwritten = empty(x.nnz, np.bool_, x.indices)
            overwritten[:] = True
            overwritten[slots[slots >= 0]] = False
            entries = np.flatnonzero(overwritten)
            slots[np.flatnonzero(slots < 0)[: entries.size]] = entries
        return slots

    def roundtrip(self, x: SparseVector, value_dtype: str | None = None) -> SparseVector:
        """Return the entries that no later one overwrites, rounded as on the wire."""
        if self.m is None:
            return rounded(x, value_dtype)
        slots = self._entries(x)
        return rounded(x.take(np.sort(slots[slots >= 0])), value_dtype)

    def plan(self, x: SparseVector, wire: WireDtype) -> Encoding:
        slots = self._entries(x)
        index = self.index_dtype(x.length)
        where, what = index_and_value_bytes(START, slots.size, index, wire)

        def write(buffer: Buffer) -> None:
            used = np.flatnonzero(slots >= 0)
            buffer[8:16].view(np.uint64)[0] = used.size
            buffer[HEADER.size : START].view(np.uint64)[0] = slots.size
            stored = buffer[what].view(wire.stored)
            stored[:] = 0
            indices = buffer[where].view(index)
            indices[:] = np.iinfo(indices.dtype).max
            indices[used] = x.indices[slots[used]]
            stored[used] = wire.pack(x.values)[slots[used]]

        return Encoding(START + slots.size * (index.itemsize + wire.stored.itemsize), write)

    def _read(self, buffer: Buffer, length: int) -> tuple[NDArray[np.generic], NDArray[np.generic], int]:
        """Return the index and the value of each slot, and the number of slots used, all validated."""
        wire, index, nnz = self.read_header(buffer, length)
        slots = (buffer.size - START) // (index.itemsize + wire.stored.itemsize)
        if buffer.size < START or slots != int(buffer[HEADER.size : START].view(np.uint64)[0]):
            raise CommunicationError(f"message: {buffer.size} bytes do not hold the slots that the header promises")
        self.check_size(buffer, START + slots * (index.itemsize + wire.stored.itemsize), nnz)
        where, what = index_and_value_bytes(START, slots, index, wire)
        indices, values = buffer[where].view(index), wire.unpack(buffer[what].view(wire.stored))
        inside, marked = np.count_nonzero(indices < length), np.count_nonzero(indices == np.iinfo(indices.dtype).max)
        if inside != nnz or inside + marked != slots:
            raise CommunicationError(f"message: {inside} of {slots} slots hold an index below {length}, not {nnz}")
        return indices, values, nnz

    def decode(self, buffer: Buffer, length: int) -> SparseVector:
        indices, values, nnz = self._read(buffer, length)
        order = np.argsort(indices)[:nnz]
        ascending = indices[order].astype(super().index_dtype(length))
        if kernels_of(buffer).first_unsorted(ascending, length) >= 0:
            raise CommunicationError("message: two slots hold the same index")
        return SparseVector.from_sorted_unchecked(ascending, values[order], length)

    def add_into(self, dense: DenseVector, buffer: Buffer) -> None:
        """Sparse decoding (section 4.3): slot by slot, in any order; nothing is sorted."""
        indices, values, _ = self._read(buffer, dense.length)
        self._check_addition(values.dtype, dense)
        dense.scatter_add(indices, values)
