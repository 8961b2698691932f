"""Hot rows: rows that many ranks have are summed as a dense block, of which every rank sums an equal part.

The owner of a row that all ranks have would receive it P - 1 times. A few such rows, as Zipf's law makes them, decide
how much the busiest rank receives, whatever the owners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsecoll.algorithms.base import Loss, Reduction
from sparsecoll.algorithms.primitives.agreed import INDICES
from sparsecoll.algorithms.rows.base import balanced_rows
from sparsecoll.errors import CommunicationError
from sparsecoll.formats import Buffer
from sparsecoll.transport.channel import Channel
from sparsecoll.transport.collectives import allgatherv, exchanged, joined, separated
from sparsecoll.vector import DenseVector, RowSparse, SparseVector, accumulator_dtype, saturating_cast
from sparsecoll.vector.row_arrays import sums
from sparsecoll.vector.values import finite_difference

SHARE = 0.5  # of the ranks that have a hot row: sending it dense costs at most twice as much


@dataclass(frozen=True)
class HotRows:
    """The hot rows, the same on all ranks.

    Attributes:
        rows: their numbers, ascending, as `RowSparse.indices`.
        d: number of values in a row.
        edges: rank j sums the values from edges[j] up to edges[j + 1] of the block of all hot rows.
    """

    rows: NDArray[Any]
    d: int
    edges: list[int]

    def among(self, rows: NDArray[Any]) -> NDArray[np.bool_]:
        """Return which of some rows are hot."""
        if not self.rows.size:
            return np.zeros(rows.size, bool)
        found = np.minimum(np.searchsorted(self.rows, rows), self.rows.size - 1)
        return self.rows[found] == rows  # type: ignore[no-any-return]

    def block(self, x: RowSparse, missing: Any = 0) -> NDArray[Any]:
        """Return the values of the hot rows in x, one row after the other, with `missing` for those that x lacks."""
        block = np.full((self.rows.size, self.d), missing, x.dtype)
        own = np.flatnonzero(self.among(x.indices))
        block[np.searchsorted(self.rows, x.indices[own])] = x.values[own]
        return block.reshape(-1)

    def width(self, rank: int) -> int:
        """Return the number of values that `rank` sums."""
        return self.edges[rank + 1] - self.edges[rank]

    def rows_of_part(self, rank: int, part: NDArray[Any], n: int) -> RowSparse:
        """Return values that `rank` sums as rows, in which all other values are zero."""
        low, high = self.edges[rank], self.edges[rank + 1]
        first, last = low // self.d, -(-high // self.d)
        block = np.zeros((last - first) * self.d, part.dtype)
        block[low - first * self.d : high - first * self.d] = part
        return RowSparse.from_sorted_unchecked(self.rows[first:last], block.reshape(-1, self.d), n)


@dataclass(frozen=True)
class Sums:
    """What a rank has summed, in the accumulator dtype.

    Attributes:
        cold: the rows that it owns and that are not hot.
        hot: the hot rows.
        part: the values of the hot rows that it sums.
    """

    cold: RowSparse
    hot: HotRows
    part: NDArray[Any]


def find(channel: Channel, x: RowSparse, positions: Sequence[NDArray[np.int64]]) -> HotRows:
    """Return the hot rows; collective. Each rank counts the rows at its `positions` and tells all which are hot."""
    rank, size, transport = channel.rank, channel.size, channel.transport

    def encoded(rows: NDArray[Any]) -> Buffer:
        return INDICES.encode(SparseVector.from_sorted_unchecked(rows, np.empty(rows.size, np.bool_), x.n))

    lists = [x.indices[positions[rank]]]
    for _, message in exchanged(transport, lambda to: encoded(x.indices[positions[to]])):
        lists.append(INDICES.decode(message, x.n).indices)
    rows, counts = np.unique(np.concatenate(lists), return_counts=True)
    messages = allgatherv(transport, encoded(rows[counts >= max(2.0, SHARE * size)]))
    hot = np.sort(np.concatenate([INDICES.decode(message, x.n).indices for message in messages]))
    return HotRows(hot, x.d, [hot.size * x.d * j // size for j in range(size + 1)])


def reduce_scatter(channel: Channel, x: RowSparse, hot: HotRows, positions: Sequence[NDArray[np.int64]]) -> Sums:
    """Combine the rows of all ranks, in rank order, in P - 1 messages; collective.

    Args:
        positions: for each rank, the positions of the rows in x that it owns and that are not hot.
    """
    rank, size = channel.rank, channel.size
    block = hot.block(x, channel.op.neutral(x.dtype))
    parts = [DenseVector(block[low:high]) for low, high in zip(hot.edges, hot.edges[1:], strict=False)]

    def rows_and_part(to: int) -> Buffer:
        end = channel.pack(parts[to])
        message = channel.encode(x.take(positions[to]), room=end.size)
        message[message.size - end.size :] = end
        return message

    received: dict[int, tuple[Any, DenseVector]] = {rank: (x.take(positions[rank]), parts[rank])}
    room = channel.pack(parts[rank]).size
    for source, message in exchanged(channel.transport, rows_and_part):
        start = max(message.size - room, 0)
        received[source] = channel.decode(message[:start]), channel.unpack(message[start:], x.dtype, hot.width(rank))
    accumulator = accumulator_dtype(x.dtype)
    cold: RowSparse = channel.merge([received[source][0] for source in range(size)], partial=True)
    addends = [received[source][1].values.reshape(1, -1) for source in range(size)]
    if not hot.width(rank):
        return Sums(cold, hot, np.empty(0, accumulator))
    part = sums(addends, np.arange(size), np.zeros(1, np.int64), accumulator, channel.op)
    return Sums(cold, hot, part.reshape(-1))


def allgather(channel: Channel, x: RowSparse, found: Sums, k: int) -> Reduction:
    """Return the sums of all ranks, in the dtype of x, rounded as on the wire."""
    hot, dtype, cold = found.hot, x.dtype, channel.round(found.cold.astype(x.dtype))
    blocks = [
        channel.encode(balanced_rows(channel, cold)),
        channel.pack(DenseVector(saturating_cast(found.part, dtype))),
    ]
    parts, values = [], []
    for rank, message in enumerate(allgatherv(channel.transport, joined(blocks), channel.is_direct(x, k))):
        rows, own = separated(message, 2)
        parts.append(channel.decode(rows).astype(dtype))
        values.append(channel.unpack(own, dtype, hot.width(rank)).values)
    parts.append(RowSparse.from_sorted_unchecked(hot.rows, np.concatenate(values).reshape(-1, hot.d), x.n))  # type: ignore[arg-type]

    def contributed() -> Any:
        error = finite_difference(found.part, values[channel.rank])
        lost: list[Any] = [found.cold.rounding_error(cold), hot.rows_of_part(channel.rank, error, x.n).drop_zeros()]
        return Loss(channel, *lost).subtract_from(x)  # type: ignore[arg-type]

    return Reduction(RowSparse.join(parts), contributed)  # type: ignore[arg-type]


def to_owners(channel: Channel, found: Sums, owners: NDArray[np.int64]) -> RowSparse:
    """Return all rows that this rank owns: those that are hot come from the ranks that have summed them; collective."""
    rank, size, hot, transport = channel.rank, channel.size, found.hot, channel.transport

    def owners_of_part(of: int) -> NDArray[np.int64]:
        return owners[np.arange(hot.edges[of], hot.edges[of + 1]) // hot.d]

    mine = owners_of_part(rank)
    for step in range(1, size):
        values = found.part[mine == (rank + step) % size]
        if values.size:
            transport.isend((rank + step) % size, values.view(np.uint8))
    received = [np.empty(0, found.part.dtype)]
    for source in range(size):
        count = int(np.count_nonzero(owners_of_part(source) == rank))
        if source == rank:
            received.append(found.part[mine == rank])
        elif count:
            message = transport.recv(source)
            if message.size != count * found.part.itemsize:
                raise CommunicationError(f"message: expected {count} values of a hot row, got {message.size} bytes")
            received.append(message.view(found.part.dtype))
    own = RowSparse.from_sorted_unchecked(
        hot.rows[owners == rank], np.concatenate(received).reshape(-1, hot.d), channel.length
    )
    return RowSparse.join([found.cold, own])
