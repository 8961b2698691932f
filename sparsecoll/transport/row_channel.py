"""RowChannel: sends and receives rows over a transport, with the options of one call."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from sparsecoll.formats import Buffer
from sparsecoll.formats.rows import decode_rows, encode_rows, rounded_rows
from sparsecoll.transport.base import Transport
from sparsecoll.transport.collectives import allgatherv, is_direct
from sparsecoll.vector import RowSparse, accumulator_dtype
from sparsecoll.vector.operation import SUM, Operation


class RowChannel:
    """The interface by which an algorithm for rows communicates; `Channel` is that of vectors.

    Args:
        transport: sends and receives bytes, and counts them.
        x: this rank's rows; those of all ranks are of tables of its shape and dtype.
        value_dtype: name of the dtype of values on the wire; None, the default, for their own.
        op: how values of the same row are combined (default: the sum).

    Attributes:
        rank: rank of this process.
        size: number of ranks.
    """

    def __init__(self, transport: Transport, x: RowSparse, value_dtype: str | None = None, op: Operation = SUM) -> None:
        self.transport = transport
        self.rank, self.size = transport.rank, transport.size
        self.n, self.d, self.dtype = x.n, x.d, x.dtype
        self.value_dtype = value_dtype
        self.op = op

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Context manager: count and time the enclosed messages under this name."""
        return self.transport.phase(name)

    def merge(self, parts: Sequence[RowSparse]) -> RowSparse:
        """Return the rows of all parts, combined in their order by the operation of this call.

        Values are combined in the accumulator dtype and returned in it.
        """
        return RowSparse.merge(parts, accumulator_dtype(self.dtype), self.op)

    def encode(self, x: RowSparse, positions: Any = None, room: int = 0) -> Buffer:
        """Return x, or its rows at ascending positions, as one message; arguments as of `encode_rows`."""
        return encode_rows(x, self.value_dtype, positions, room)

    def decode(self, message: Buffer) -> RowSparse:
        """Return the rows in a message; its values have the dtype of the message."""
        return decode_rows(message, self.n, self.d)

    def round(self, x: RowSparse) -> RowSparse:
        """Return x with its values rounded as on the wire, in x's own dtype."""
        return rounded_rows(x, self.value_dtype)

    def exchange(self, x: RowSparse, positions: Sequence[Any]) -> list[RowSparse]:
        """Send the rows at positions[j] to rank j, and return what all ranks sent to this one, in rank order.

        P - 1 messages, received in the order in which they arrive.
        """
        rank, size = self.rank, self.size
        for step in range(1, size):
            to = (rank + step) % size
            self.transport.isend(to, self.encode(x, positions[to]))
        parts = {rank: x.take(positions[rank])}
        for step in range(1, size):
            source = (rank - step) % size
            parts[source] = self.decode(self.transport.recv(source))
        return [parts[source] for source in range(size)]

    def allgather(self, x: RowSparse, most: int) -> list[RowSparse]:
        """Return every rank's rows in rank order, this rank's as the others receive them.

        Args:
            x: this rank's rows, rounded as on the wire.
            most: about the number of rows of each rank, the same on all ranks; see `Channel.allgather`.
        """
        blocks = allgatherv(self.transport, self.encode(x), self.is_direct(most))
        return [x if rank == self.rank else self.decode(block) for rank, block in enumerate(blocks)]

    def is_direct(self, most: int) -> bool:
        """Return whether messages of about so many rows are gathered directly, see `transport.collectives`."""
        return is_direct(self.transport, most * self.d * self.dtype.itemsize)
