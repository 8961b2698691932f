"""Receiving messages: a long one comes in chunks, and one from GPU memory may come by way of the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from sparsecoll.formats import Buffer
from sparsecoll.kernels.memory import empty, on_gpu
from sparsecoll.transport.tags import FIRST_TAG, REPORT_BYTES, STALL_TAG, CallMismatch

if TYPE_CHECKING:
    from sparsecoll.transport.mpi.transport import MpiTransport

RECEIVING = "receiving from rank"
SCRATCH = np.empty(1 << 16, np.uint8)  # for messages that are discarded


class IncomingMessage:
    """A message that is being received, in one or more chunks of the same tag; a full chunk says that more follow.

    As a receive request it is one of `transport.expected`.

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
        self.expected, self._transport = expected, transport
        self._source, self._into = source, into
        self._room = transport.room
        self._chunks: list[Buffer] = []
        self._gpu = False
        self._size = self._full = 0  # bytes of the last chunk that was announced, and of a full one
        self._message: Any = None  # a chunk that was matched, and for which there is no memory yet
        self._target: Buffer | None = None
        self._request: Any = None
        self.tag = -1
        self.complete = False

    def poll(self, keep: bool = True) -> bool:
        """Receive the chunks that have arrived; return whether the message is complete.

        Args:
            keep: False if the message is discarded, unless it is a report (default: True).

        Raises:
            CallMismatch: The message has another tag than the one expected.
            CommunicationError: An error of MPI; or the message is too long, as MemoryError.
            MemoryError: There is no room for the message. It can be received later, or discarded.
        """
        transport = self._transport
        while not self.complete:
            if self._request is None:
                if self._message is None and not transport.recorded(self._probe, RECEIVING, self._source):
                    return False
                if self.expected not in (None, self.tag):
                    raise CallMismatch(f"rank {self._source} is in another call")
                if keep or self.tag < FIRST_TAG:
                    room = REPORT_BYTES if self.tag < FIRST_TAG else self._room
                    transport.check_room(self._source, sum(chunk.size for chunk in self._chunks) + self._size, room)
                    self._target = self._memory()
                else:
                    self._target = None
                transport.recorded(self._receive, RECEIVING, self._source)
            if not transport.recorded(self._request.Test, RECEIVING, self._source):
                return False
            self._request = None
            self.complete = self._size < self._full
            if self._gpu and keep:
                chunk = self._chunks.pop()
                self._chunks.append(transport.staging().arrived(chunk, self._slice_of_into(chunk.size)))
        return True

    def _probe(self) -> bool:
        """Match the next chunk, after stall notices; return whether there is one."""
        transport = self._transport
        while (message := transport.comm.Improbe(self._source, MPI.ANY_TAG, transport.status)) is not None:
            mpi_tag = transport.status.Get_tag()
            if mpi_tag != 2 * STALL_TAG:
                break
            transport.receive_notice(message)
        else:
            return False
        self._message = message
        if self._chunks and mpi_tag >> 1 != self.tag:  # the sender failed before it had sent all chunks of the last one
            self._chunks.clear()
        self.tag, self._gpu = mpi_tag >> 1, mpi_tag & 1 == 1
        self._full = transport.staging().chunk if self._gpu and not transport.gpu_direct else transport.chunk
        self._size = transport.status.Get_count(MPI.BYTE)
        return True

    def _receive(self) -> None:
        """Start to receive the chunk that was matched, into `_target` or, if that is None, to be discarded."""
        if self._target is not None:
            self._chunks.append(self._target)
            self._request = self._message.Irecv([self._target, MPI.BYTE])
        else:
            kind = _discarding(self._size)
            self._request = self._message.Irecv([SCRATCH, 1, kind])
            kind.Free()
        self._message = None

    def _slice_of_into(self, size: int) -> Buffer | None:
        """Return the part of `into` for the next chunk; None if it does not fit there."""
        if self._into is None or on_gpu(self._into) != self._gpu:
            return None
        end = sum(chunk.size for chunk in self._chunks) + size
        fits = end == self._into.size if size < self._full else end <= self._into.size
        return self._into[end - size : end] if fits else None

    def _memory(self) -> Buffer:
        """Return the memory to which MPI writes the next chunk."""
        size = self._size
        part = None if self._into is None else self._slice_of_into(size)
        if not self._gpu:
            return empty(size, np.uint8) if part is None else part
        return self._transport.staging().room(size, part)  # type: ignore[no-any-return]

    def wait(self) -> Buffer:
        """Wait for the message; earlier requests of this source are served first."""
        transport, waiter = self._transport, None
        queue = transport.expected[self._source]
        while not self.complete:
            while not self.complete and queue[0].poll():
                queue.popleft()
            if not self.complete:
                waiter = waiter or transport.watchdog(
                    lambda: f"waits for a message of rank {self._source}", awaited=lambda: (self._source,)
                )
                waiter.pause()
        return self.joined()

    def joined(self) -> Buffer:
        """Return the whole message; nothing of one that was discarded."""
        if len(self._chunks) == 1:
            return self._chunks[0]
        into = self._into
        if into is not None and into.size == sum(c.size for c in self._chunks) and on_gpu(into) == self._gpu:
            return into  # all chunks are slices of it
        return np.concatenate(self._chunks) if self._chunks else SCRATCH[:0]


def _discarding(size: int) -> MPI.Datatype:
    """Return a datatype of `size` bytes that all go to SCRATCH: a matched message can only be received as a whole.

    The standard forbids to receive by a datatype that overlaps itself; MPICH and Open MPI write one part after another.
    """
    piece = MPI.BYTE.Create_contiguous(SCRATCH.size)
    again = piece.Create_resized(0, 0)
    whole = MPI.Datatype.Create_struct([size // SCRATCH.size, size % SCRATCH.size], [0, 0], [again, MPI.BYTE])
    for part in (piece, again):
        part.Free()
    return whole.Commit()
