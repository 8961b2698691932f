"""Channel: sends and receives vectors over a transport, encoded as one call asks for it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from sparsecoll import formats
from sparsecoll.errors import CommunicationError
from sparsecoll.formats import FORMATS, Buffer, Format
from sparsecoll.transport.all_ranks import allgatherv, exchanged
from sparsecoll.transport.base import ReceiveRequest, Transport
from sparsecoll.transport.group import GroupTransport
from sparsecoll.vector import DenseVector, RowSparse, SparseVector, accumulator_dtype
from sparsecoll.vector.operation import SUM, Operation

S = TypeVar("S", SparseVector, RowSparse)


@dataclass(eq=False, repr=False)
class Channel:
    """The interface by which an algorithm communicates: a transport, with the message options of one call.

    Args:
        transport: sends and receives bytes, and counts them.
        length: length of the vectors of this call.
        format: format of sparse messages (default: the smallest).
        value_dtype: name of the dtype of values on the wire; None, the default, for their own.
        op: how values of the same index are combined (default: the sum).
        width: number of values in a row, if the call is one on RowSparse (default: 0): what is a vector below is then a
            RowSparse, and the format must be PackedFormat.
        dtype: of the vectors of the call, and of its results; None, the default, for that of the parts of a sum.

    Attributes:
        rank: rank of this process.
        size: number of ranks.
        held: every rank's number of rows, in rank order, in calls on RowSparse.
        gathered: every rank's vector as a message, in rank order, if these have been sent together with the arguments.
        deferred: whether the caller can take a sum as `Reduction.parts` (False unless the caller sets it).
    """

    transport: Transport
    length: int
    format: Format = FORMATS["auto"]
    value_dtype: str | None = None
    op: Operation = SUM
    width: int = 0
    dtype: np.dtype[Any] | None = None
    held: list[int] = field(init=False, default_factory=list)
    gathered: list[Buffer] = field(init=False, default_factory=list)
    deferred: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.rank, self.size = self.transport.rank, self.transport.size

    def with_format(self, format: Format) -> Channel:
        """Return a channel that sends sparse messages in another format."""
        other = object.__new__(Channel)  # faster than copy.copy, in every call of `auto`
        other.__dict__.update(self.__dict__)
        other.format = format
        return other

    def group(self, members: list[int]) -> Channel:
        """Return a channel among some of the ranks, renumbered 0, 1, ...; this rank must be one of them."""
        other, groups = copy.copy(self), self.transport.groups
        if tuple(members) not in groups:
            groups[tuple(members)] = GroupTransport(self.transport, members)
        other.transport = groups[tuple(members)]
        other.__post_init__()
        other.held, other.gathered, other.deferred = [], [], False
        return other

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Context manager: count and time the enclosed messages under this name."""
        return self.transport.phase(name)

    def limit(self, dtype: np.dtype[Any]) -> None:
        """Refuse messages that are longer than one of every rank's vector, until the call ends.

        Args:
            dtype: of the values.
        """
        entry = 8 + max(8, dtype.itemsize) * (self.width or 1)  # sums on the way may have a wider dtype
        self.transport.room = self.size * self.format.most_bytes(self.length, entry)

    def merge(self, parts: Sequence[S], *, partial: bool = False) -> S:
        """Return the parts combined by the operation of this call, in their order, in float32 for narrower floats.

        Each part must combine all entries that some ranks have at these indices, and no rank's may be in two parts: an
        index that a part does not store is missing on all of its ranks.

        Args:
            parts: vectors, whose values may have the dtype of messages.
            partial: whether the result is one of several that are combined: it then has the dtype in which values are
                combined, float32 for narrower floats (default: False, for the dtype of the call).
        """
        kind: Any = RowSparse if self.width else SparseVector
        dtype = self.dtype or parts[0].dtype
        return kind.merge(parts, accumulator_dtype(dtype) if partial else dtype, self.op)  # type: ignore[no-any-return]

    # -- sparse vectors

    def isend(self, destination: int, x: S) -> None:
        """Send a vector without blocking."""
        self.transport.isend(destination, self.encode(x))

    def recv(self, source: int) -> SparseVector:
        """Receive the next vector from `source`; its values have the dtype of the message."""
        return self.decode(self.transport.recv(source))

    def irecv(self, source: int) -> VectorRequest:
        """Start to receive the next vector from `source`; receives from one source complete in order."""
        return VectorRequest(self, self.transport.irecv(source))

    def allgather(self, x: S) -> list[S]:
        """Return every rank's vector in rank order, this rank's as the others receive it; ceil(log2 P) messages."""
        return [self.decode(block) for block in allgatherv(self.transport, self.encode(x))]  # type: ignore[misc]

    def exchange(self, region: Callable[[int], S]) -> list[S]:
        """Send region(j) to rank j, and return every rank's entries in this rank's region, in rank order.

        P - 1 messages, received in the order in which they arrive.
        """
        parts: dict[int, Any] = {self.rank: region(self.rank)}
        for source, message in exchanged(self.transport, lambda to: self.encode(region(to))):
            parts[source] = self.decode(message)
        return [parts[source] for source in range(self.size)]

    def encode(self, x: SparseVector | RowSparse, room: int = 0) -> Buffer:
        """Return x as one message, with room for so many bytes of the caller at its end (default: 0)."""
        return self.format.encode(x, self.value_dtype, room)  # type: ignore[arg-type]  # Packed takes both

    def decode(self, message: Buffer) -> SparseVector:
        """Return the vector in a message of any format; its values have the dtype of the message."""
        return formats.decode(message, self.length, self.width)

    def round(self, x: S) -> S:
        """Return x with its values rounded as on the wire, in x's own dtype."""
        return formats.rounded(x, self.value_dtype)

    def roundtrip(self, x: S) -> S:
        """Return what a receiver of x gets, in x's own dtype: rounded, and without entries that the format drops."""
        changed = self.value_dtype is not None or self.format.lossy
        return self.format.roundtrip(x, self.value_dtype) if changed else x  # type: ignore[return-value,arg-type]

    def rounds(self, dtype: np.dtype[Any]) -> bool:
        """Whether values of `dtype` are rounded on the wire."""
        return self.value_dtype is not None and formats.wire_dtype(dtype, self.value_dtype).name != dtype.name

    # -- dense vectors: messages hold nothing but values

    def pack(self, x: DenseVector) -> Buffer:
        """Return the message of dense values."""
        return formats.wire_dtype(x.dtype, self.value_dtype).pack(x.values).view(np.uint8)

    def unpack(self, message: Buffer, dtype: np.dtype[Any], length: int) -> DenseVector:
        """Return the `length` dense values in a message, as `dtype`."""
        wire = formats.wire_dtype(dtype, self.value_dtype)
        if message.size != length * wire.stored.itemsize:
            raise CommunicationError(
                f"rank {self.rank}: expected {length} values of {wire.name}, got {message.size} bytes"
            )
        return DenseVector(wire.unpack_as(message.view(wire.stored), dtype))

    def isend_dense(self, destination: int, x: DenseVector) -> None:
        """Send dense values without blocking."""
        self.transport.isend(destination, self.pack(x))

    def recv_dense(self, source: int, dtype: np.dtype[Any], length: int) -> DenseVector:
        """Receive the next `length` dense values from `source`, as `dtype`."""
        return self.unpack(self.transport.recv(source), dtype, length)

    def recv_into(self, source: int, into: DenseVector) -> None:
        """Receive the next dense values from `source` into `into`, without a copy if they are not rounded."""
        memory = None if self.rounds(into.dtype) else into.values.view(np.uint8)
        into.copy_from(self.unpack(self.transport.recv(source, memory), into.dtype, into.length))


@dataclass(slots=True)
class VectorRequest:
    """A nonblocking receive, as `Channel.irecv` returns it."""

    _channel: Channel
    _request: ReceiveRequest

    def wait(self) -> SparseVector:
        """Wait for the vector and return it."""
        return self._channel.decode(self._request.wait())
