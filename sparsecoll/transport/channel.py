"""Vectors over a transport: how one call encodes them, and what arrives is a vector again."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from sparsecoll import formats
from sparsecoll.errors import CommunicationError
from sparsecoll.formats import FORMATS, Buffer, Format
from sparsecoll.transport.base import ReceiveRequest, Transport
from sparsecoll.transport.collectives import allgatherv
from sparsecoll.transport.group import group
from sparsecoll.vector import DenseVector, SparseVector


class Channel:
    """What an algorithm sends its vectors through: a transport, and the options of one call that concern messages.

    Args:
        transport: carries the bytes and counts them.
        length: coordinates of the vectors of this call.
        format: of sparse messages.
        value_dtype: name of the dtype that values travel in; None: their own.
    """

    def __init__(
        self, transport: Transport, length: int, format: Format = FORMATS["auto"], value_dtype: str | None = None
    ) -> None:
        self.transport = transport
        self.rank, self.size = transport.rank, transport.size
        self.length = length
        self.format = format
        self.value_dtype = value_dtype

    def with_format(self, format: Format) -> Channel:
        """The same channel with sparse messages in another format."""
        return Channel(self.transport, self.length, format, self.value_dtype)

    def group(self, members: list[int]) -> Channel:
        """The same channel among some of the ranks, renumbered 0, 1, ...; this rank must be one of them."""
        return Channel(group(self.transport, members), self.length, self.format, self.value_dtype)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Count and time what happens inside under this name."""
        return self.transport.phase(name)

    # -- sparse vectors

    def isend(self, destination: int, x: SparseVector) -> None:
        """Encode and send without blocking."""
        self.transport.isend(destination, self.encode(x))

    def recv(self, source: int) -> SparseVector:
        """The next vector from `source`; its values have the dtype that they travelled in."""
        return self.decode(self.transport.recv(source))

    def irecv(self, source: int) -> VectorRequest:
        """Ask for the next vector from `source` without blocking; receives of one source are served in order."""
        return VectorRequest(self, self.transport.irecv(source))

    def allgather(self, x: SparseVector) -> list[SparseVector]:
        """Every rank's vector, in rank order; this rank's as it arrives at the others (ceil(log2 P) messages)."""
        return [self.decode(block) for block in allgatherv(self.transport, self.encode(x))]

    def encode(self, x: SparseVector) -> Buffer:
        """x as one message."""
        return self.format.encode(x, self.value_dtype)

    def decode(self, message: Buffer) -> SparseVector:
        """The vector in a message, whatever its format; its values have the dtype that they travelled in."""
        return formats.decode(message, self.length)

    def round(self, x: SparseVector) -> SparseVector:
        """x with its values rounded as they travel, in x's own dtype."""
        return formats.rounded(x, self.value_dtype)

    def roundtrip(self, x: SparseVector) -> SparseVector:
        """What a receiver of x gets, in x's own dtype: values rounded, and without entries that the format drops."""
        return self.format.roundtrip(x, self.value_dtype)

    def rounds(self, dtype: np.dtype[Any]) -> bool:
        """Whether values of `dtype` lose bits on the way."""
        return formats.wire_dtype(dtype, self.value_dtype).name != dtype.name

    # -- dense vectors: messages hold nothing but values

    def pack(self, x: DenseVector) -> Buffer:
        """Dense values as they are sent."""
        return formats.wire_dtype(x.dtype, self.value_dtype).pack(x.values).view(np.uint8)

    def unpack(self, message: Buffer, dtype: np.dtype[Any], length: int) -> DenseVector:
        """The `length` dense values in a message, as `dtype`."""
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
        """The next `length` dense values from `source`, as `dtype`."""
        return self.unpack(self.transport.recv(source), dtype, length)

    def recv_into(self, source: int, into: DenseVector) -> None:
        """Write the next dense values from `source` to `into`, without a copy if they travel as they are."""
        memory = None if self.rounds(into.dtype) else into.values.view(np.uint8)
        into.copy_from(self.unpack(self.transport.recv(source, memory), into.dtype, into.length))


class VectorRequest:
    """A vector that was asked for; `wait` returns it."""

    __slots__ = ("_channel", "_request")

    def __init__(self, channel: Channel, request: ReceiveRequest) -> None:
        self._channel = channel
        self._request = request

    def wait(self) -> SparseVector:
        """Block until the vector is here."""
        return self._channel.decode(self._request.wait())
