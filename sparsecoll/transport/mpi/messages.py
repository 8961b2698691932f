"""Receiving messages: a long one comes in chunks, and one from GPU memory may come by way of the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from sparsecoll.formats import Buffer
from sparsecoll.kernels.memory import empty, on_gpu
from sparsecoll.transport.base import STALL_TAG, CallMismatch

if TYPE_CHECKING:
    from sparsecoll.transport.mpi.transport import MpiTransport


class IncomingMessage:
    """A message that is being received, in one or more chunks of the same tag; a full chunk says that more follow.

    Args:
        transport: receives the message.
        source: rank that sends it.
        into: memory for the message, used if it has the message's size and is where the message comes from (host or
            GPU); None, the default, for memory of its own.
        expected: tag that it must have; None, the default, for any.

    Attributes:
        expected: see above.
        tag: tag of the message; -1 before its first chunk.
        complete: whether all chunks are here.
    """

    def __init__(
        self, transport: MpiTransport, source: int, into: Buffer | None = None, expected: int | None = None
    ) -> None:
        self.expected = expected
        self._transport = transport
        self._source = source
        self._into = into
        self._chunks: list[Buffer] = []
        self._gpu = False
        self._full = 0  # bytes of a full chunk
        self._request: Any = None
        self.tag = -1
        self.complete = False

    def poll(self, keep: bool = True) -> bool:
        """Receive the chunks that have arrived; return whether the message is complete.

        Args:
            keep: False if the message is discarded and need not be copied to the GPU (default: True).

        Raises:
            CallMismatch: The message has another tag than the one expected.
            CommunicationError: An error of MPI.
        """
        transport = self._transport
        try:
            while not self.complete:
                if self._request is None:
                    message = transport.comm.Improbe(self._source, MPI.ANY_TAG, transport.status)
                    if message is None:
                        return False
                    if transport.status.Get_tag() == 2 * STALL_TAG:
                        transport.hear(message)
                        continue
                    self._begin(message, transport.status, keep)
                if not self._request.Test():
                    return False
                self._request = None
                self.complete = self._chunks[-1].size < self._full
                if self._gpu:
                    chunk = self._chunks.pop()
                    self._chunks.append(transport.staging().arrived(chunk, self._slice_of_into(chunk.size)))
        except MPI.Exception as error:
            raise transport.lost(f"receiving from rank {self._source}", error) from error
        return True

    def _begin(self, message: Any, status: Any, keep: bool) -> None:
        """Start to receive a chunk that was probed."""
        mpi_tag = status.Get_tag()
        if self._chunks and mpi_tag >> 1 != self.tag:  # the sender failed before it had sent all chunks of the last one
            self._chunks.clear()
        self.tag, self._gpu, self._full = mpi_tag >> 1, mpi_tag & 1 == 1 and keep, self._transport.full(mpi_tag)
        chunk = self._memory(status.Get_count(MPI.BYTE))
        self._chunks.append(chunk)
        self._request = message.Irecv([chunk, MPI.BYTE])
        if self.expected not in (None, self.tag):
            raise CallMismatch(f"rank {self._source} is in another call")

    def _slice_of_into(self, size: int) -> Buffer | None:
        """Return the part of `into` for the next chunk; None if it does not fit there."""
        if self._into is None or on_gpu(self._into) != self._gpu:
            return None
        received = sum(chunk.size for chunk in self._chunks)
        fits = received + size == self._into.size if size < self._full else received + size < self._into.size
        return self._into[received : received + size] if fits else None

    def _memory(self, size: int) -> Buffer:
        """Return the memory to which MPI writes the next chunk."""
        part = None if self._into is None else self._slice_of_into(size)
        if not self._gpu:
            return empty(size, np.uint8) if part is None else part
        staging = self._transport.staging()
        if part is None or not staging.direct or size == 0:
            return staging.room(size)  # type: ignore[no-any-return]
        staging.ready()
        return part

    def joined(self) -> Buffer:
        """Return the whole message."""
        if len(self._chunks) == 1:
            return self._chunks[0]
        into = self._into
        if into is not None and into.size == sum(c.size for c in self._chunks) and on_gpu(into) == self._gpu:
            return into  # all chunks are slices of it
        return np.concatenate(self._chunks)


class MpiReceive(IncomingMessage):
    """A receive request for the next message from one source; its tag must be that of the call."""

    def wait(self) -> Buffer:
        """Wait for the message; earlier requests of this source are served first."""
        transport, waiter = self._transport, None
        queue = transport.expected[self._source]
        while not self.complete:
            while not self.complete and queue[0].poll():
                queue.popleft()
            if not self.complete:
                waiter = waiter or transport.waiter(
                    lambda: f"waits for a message of rank {self._source}", awaited=lambda: (self._source,)
                )
                transport.pause(waiter)
        return self.joined()
