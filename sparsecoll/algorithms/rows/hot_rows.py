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

from sparsecoll.algorithms.rows.balance import balanced
from sparsecoll.algorithms.rows.base import RowSum
from sparsecoll.errors import CommunicationError
from sparsecoll.formats.rows import decode_numbers, encode_numbers, pack_values, unpack_values
from sparsecoll.transport.collectives import allgatherv, joined, separated
from sparsecoll.transport.row_channel import RowChannel
from sparsecoll.vector import RowSparse, accumulator_dtype
from sparsecoll.vector.operation import Operation
from sparsecoll.vector.row_arrays import cast, folded, sums, taken

SHARE = 0.5  # of the ranks that have a hot row: sending it dense costs at most twice as much


@dataclass(frozen=True)
class HotRows:
    """The hot rows, the same on all ranks.

    Attributes:
        rows: their numbers, ascending.
        d: number of values in a row.
        edges: rank j sums the values from edges[j] up to edges[j + 1] of the block of all hot rows.
    """

    rows: NDArray[np.int64]
    d: int
    edges: list[int]

    def among(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of some rows are hot."""
        if not self.rows.size:
            return np.zeros(rows.size, bool)
        found = np.minimum(np.searchsorted(self.rows, rows), self.rows.size - 1)
        return self.rows[found] == rows  # type: ignore[no-any-return]

    def block(self, x: RowSparse, missing: Any = 0) -> NDArray[Any]:
        """Return the values of the hot rows in x, one row after the other, with `missing` for those that x lacks."""
        block = np.full((self.rows.size, self.d), missing, x.dtype)
        own = np.flatnonzero(self.among(x.rows))
        block[np.searchsorted(self.rows, x.rows[own])] = taken(x.values, own)
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


def find(channel: RowChannel, x: RowSparse, positions: Sequence[NDArray[np.int64]]) -> HotRows:
    """Return the hot rows; collective. Each rank counts the rows of a share of the table and tells all which are hot.

    Args:
        channel: of the call.
        x: this rank's rows.
        positions: for each rank, the positions of the rows in x that it counts.
    """
    rank, size, transport = channel.rank, channel.size, channel.transport
    for step in range(1, size):
        to = (rank + step) % size
        transport.isend(to, encode_numbers(x.rows[positions[to]], x.n, x.values))
    lists = [x.rows[positions[rank]]]
    lists += [decode_numbers(transport.recv((rank - step) % size), x.n) for step in range(1, size)]
    rows, counts = np.unique(np.concatenate(lists), return_counts=True)
    mine = rows[counts >= max(2.0, SHARE * size)]
    messages = allgatherv(transport, encode_numbers(mine, x.n, x.values))
    numbers = np.sort(np.concatenate([decode_numbers(message, x.n) for message in messages]))
    values = numbers.size * x.d
    return HotRows(numbers, x.d, [values * j // size for j in range(size + 1)])


def reduce_scatter(channel: RowChannel, x: RowSparse, hot: HotRows, positions: Sequence[NDArray[np.int64]]) -> Sums:
    """Combine the rows of all ranks, in rank order, in P - 1 messages; collective.

    Args:
        channel: of the call.
        x: this rank's rows.
        hot: the hot rows.
        positions: for each rank, the positions of the rows in x that it owns and that are not hot.
    """
    rank, size, transport = channel.rank, channel.size, channel.transport
    block = hot.block(x, channel.op.neutral(x.dtype))
    parts = [block[low:high] for low, high in zip(hot.edges, hot.edges[1:], strict=False)]
    for step in range(1, size):
        to = (rank + step) % size
        end = pack_values(parts[to], channel.value_dtype)
        message = channel.encode(x, positions[to], room=end.size)
        message[message.size - end.size :] = end
        transport.isend(to, message)
    received = {rank: (x.take(positions[rank]), parts[rank])}
    room = pack_values(parts[rank], channel.value_dtype).size
    for step in range(1, size):
        source = (rank - step) % size
        message = transport.recv(source)
        start = max(message.size - room, 0)
        values = unpack_values(message[start:], hot.width(rank), x.dtype, channel.value_dtype)
        received[source] = (channel.decode(message[:start]), values)
    cold = channel.merge([received[source][0] for source in range(size)])
    return Sums(cold, hot, combined([received[source][1] for source in range(size)], x.dtype, channel.op))


def combined(parts: Sequence[NDArray[Any]], of: np.dtype[Any], op: Operation) -> NDArray[Any]:
    """Return arrays of one length combined in their order, in the accumulator dtype of values of dtype `of`."""
    dtype, zero = accumulator_dtype(of), np.zeros(1, np.int64)
    addends, order = [cast(part.reshape(1, -1), dtype) for part in parts], np.arange(len(parts))
    if not addends[0].size:
        return np.empty(0, dtype)
    if op.fold(dtype) is None:
        return sums(addends, order, zero, dtype).reshape(-1)  # type: ignore[no-any-return]
    return folded(addends, order, zero, dtype, op).reshape(-1)  # type: ignore[no-any-return]


def allgather(channel: RowChannel, found: Sums, most: int, dtype: np.dtype[Any]) -> RowSum:
    """Return the sums of all ranks, in `dtype`, rounded as on the wire; arguments as of `RowChannel.allgather`."""
    hot, cold = found.hot, channel.round(found.cold.astype(dtype))
    part = cast(found.part.reshape(1, -1), dtype).reshape(-1)
    blocks = [channel.encode(balanced(channel, cold)), pack_values(part, channel.value_dtype)]
    parts, values = [], []
    for rank, message in enumerate(allgatherv(channel.transport, joined(blocks), channel.is_direct(most))):
        rows, own = separated(message, 2)
        parts.append(channel.decode(rows).astype(dtype))
        values.append(unpack_values(own, hot.width(rank), dtype, channel.value_dtype))
    dense = np.concatenate(values).astype(dtype, copy=False).reshape(-1, hot.d)

    def lost() -> RowSparse:
        formed, arrived = (hot.rows_of_part(channel.rank, own, channel.n) for own in (found.part, values[channel.rank]))
        return RowSparse.merge([found.cold._rounding_error(cold), formed._rounding_error(arrived)], found.cold.dtype)

    return RowSum(RowSparse.join([*parts, RowSparse.from_sorted_unchecked(hot.rows, dense, channel.n)]), lost)


def to_owners(channel: RowChannel, found: Sums, owners: NDArray[np.int64]) -> RowSparse:
    """Return all rows that this rank owns: those that are hot come from the ranks that have summed them; collective.

    Args:
        channel: of the call.
        found: what this rank has summed.
        owners: the owner of each hot row.
    """
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
        hot.rows[owners == rank], np.concatenate(received).reshape(-1, hot.d), channel.n
    )
    return RowSparse.join([found.cold, own])
