"""DenseStream (Li, Chao, Liao, Lv, "DenseStream: A Novel Data Representation for Gradient Sparsification")."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsecoll.errors import CommunicationError
from sparsecoll.formats.base import HEADER, Buffer, Encoding, Format, WireDtype, holds_zeros, nonzeros_of, wire_dtype
from sparsecoll.formats.packed import PackedFormat
from sparsecoll.kernels import kernels_of, kernels_of_values
from sparsecoll.kernels.memory import asarray_like
from sparsecoll.vector import SMALLEST, DenseVector, SparseVector

START = HEADER.size + 8


def number_bytes(length: int) -> int:
    """Return ceil(log2(N) / 8), the bytes of a block's start, and of its length."""
    return max(1, -(-max(length - 1, 1).bit_length() // 8))


@dataclass(frozen=True)
class DenseStreamFormat(Format):
    """Dense blocks: the start and the length of each, and all its values (section III.A of the paper).

    A block begins and ends with an entry and has at most floor(2 * ceil(log2(N) / 8) / K) zeros in a row between, where
    K is the bytes of a value and N the length: more would cost more than the start and length of a new block. (The
    paper prints the ceiling, which differs below N = 2^24 for float32: two zeros take 8 bytes, a new block takes 6.) A
    vector with explicit zeros is sent as packed.

    Size in bytes: 24 + 2 * ceil(log2(N) / 8) * blocks + K * (entries and zeros in blocks); (3) bounds the blocks.
    """

    id = 5
    name = "densestream"

    @staticmethod
    def gap(length: int, wire: WireDtype) -> int:
        """Return the largest number of consecutive zeros inside a block."""
        return 2 * number_bytes(length) // wire.stored.itemsize

    def filled(self, x: SparseVector, source: DenseVector, value_dtype: str | None = None) -> SparseVector:
        """Return x with the zeros inside its blocks replaced by the values of `source`, at no additional bytes.

        This is the remark at the end of the paper's section IV.B; `sparsecoll.DenseStream(fill=True)` uses it.

        Args:
            x: the entries selected.
            source: the vector from which they were selected.
            value_dtype: name of the dtype on the wire; None for x's own.
        """
        kernels, gap = kernels_of(x.values), self.gap(x.length, wire_dtype(x.dtype, value_dtype))
        starts, lengths = kernels.block_ranges(x.indices, gap)
        positions = asarray_like(np.arange(int(lengths.sum())), starts)
        indices = kernels.block_indices(starts, lengths, positions, x.indices.dtype)
        return source.take(indices).threshold(SMALLEST)  # without the zeros that are true

    def fitting(self, x: SparseVector, wire: WireDtype) -> Format:
        return PackedFormat() if holds_zeros(x, wire) else self

    def plan(self, x: SparseVector, wire: WireDtype) -> Encoding:
        gap, width = self.gap(x.length, wire), number_bytes(x.length)
        kernels = kernels_of(x.values)
        starts, lengths = kernels.block_ranges(x.indices, gap)
        middle = START + int(lengths.sum()) * wire.stored.itemsize

        def write(buffer: Buffer) -> None:
            buffer[HEADER.size : START].view(np.uint64)[0] = starts.size
            dense = buffer[START:middle].view(wire.stored)
            packed = wire.pack(x.values)
            kernels_of_values(packed).block_write(x.indices, packed, gap, dense)
            kernels.numbers_write(starts, width, buffer[middle:until])
            kernels.numbers_write(lengths, width, buffer[until:])

        until = middle + width * starts.size
        return Encoding(until + width * starts.size, write)

    def estimate(self, x: SparseVector, wire: WireDtype, samples: int) -> float:
        """Return the size in bytes that a sample of entries and their successors suggests, without a plan.

        Args:
            x: at least two entries.
            wire: dtype of the values on the wire.
            samples: about the number of entries to look at, at odd intervals, so that rows of 64 differ in phase.
        """
        indices, width, new_block = x.indices, wire.stored.itemsize, 2 * number_bytes(x.length)
        step, zeros = indices.size // samples | 1, new_block // width
        apart = indices[1::step] - indices[:-1:step]
        added = np.minimum((apart - 1) * width, new_block)
        added[apart > zeros + 1] = new_block
        mean = int(added.sum()) / int(added.size)
        return START + new_block + indices.size * width + (indices.size - 1) * mean

    def decode(self, buffer: Buffer, length: int) -> SparseVector:
        wire, index, nnz = self.read_header(buffer, length)
        width, size = number_bytes(length), buffer.size
        blocks = int(buffer[HEADER.size : START].view(np.uint64)[0]) if size >= START else size
        middle = size - 2 * width * blocks
        if middle < START or (middle - START) % wire.stored.itemsize:
            raise CommunicationError(f"message: {blocks} blocks of densestream cannot make a message of {size} bytes")
        numbers = kernels_of(buffer).numbers_read(buffer[middle:], width)
        starts, lengths = numbers[:blocks], numbers[blocks:]
        lengths[lengths == 0] = length  # the low bytes of 256^width, if one block is the whole vector
        values = wire.unpack(buffer[START:middle].view(wire.stored))
        if not kernels_of(starts).blocks_fit(starts, lengths, values.size, length):
            raise CommunicationError(f"message: the {blocks} blocks of densestream do not fit length {length}")
        positions, nonzeros = nonzeros_of(values, nnz)
        indices = kernels_of(starts).block_indices(starts, lengths, positions, index)
        return SparseVector.from_sorted_unchecked(indices, nonzeros, length)
