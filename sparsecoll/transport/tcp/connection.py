"""Connection: messages on one nonblocking socket. A message is a header (tag, memory, bytes) and its bytes."""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from sparsecoll.formats import Buffer
from sparsecoll.kernels.memory import empty, on_gpu

HEADER = struct.Struct("<QBQ")  # tag, 1 for a message from GPU memory, bytes
CHUNK = 1 << 30  # bytes that a system call takes at most; some systems refuse more


class Disconnected(Exception):
    """The peer's end of the connection is closed, or the network is down."""


class IncomingMessage:
    """A message whose header has arrived.

    Args:
        tag: tag of the message.
        size: bytes of the message.
        into: memory for the message, used if it has the message's size and is where the message comes from (host or
            GPU); None for memory of its own.
        staging: copies what has arrived to the GPU; None for a message in host memory.

    Attributes:
        missing: number of bytes that have not arrived.
    """

    def __init__(self, tag: int, size: int, into: Buffer | None, staging: Any) -> None:
        self.tag = tag
        self.size = self.missing = size
        self._staging = staging
        fits = into is not None and into.size == size and on_gpu(into) == (staging is not None)
        if staging is None:
            memory: Any = into if fits else empty(size, np.uint8)
            self._host, self._start = memoryview(memory), 0
            self.buffer: Buffer = memory
        else:
            self.buffer = into if fits else staging.memory(size)  # type: ignore[assignment]
            self._next_piece()

    def _next_piece(self) -> None:
        """Make host memory for the next piece of a message for the GPU."""
        self._start = self.size - self.missing
        self._piece = self._staging.room(min(self.missing, self._staging.chunk))
        self._host = memoryview(self._piece)

    def rest(self) -> memoryview:
        """Return the memory for the next bytes."""
        return self._host[self.size - self.missing - self._start :]

    def arrived(self, count: int) -> None:
        """Take note that the next `count` bytes have arrived."""
        self.missing -= count
        end = self.size - self.missing
        if self._staging is not None and end - self._start == len(self._host):
            self._staging.arrived(self._piece, self.buffer[self._start : end])
            self._next_piece()


class Connection:
    """One end of a connection to a peer; it does not block.

    Args:
        socket: connected socket, which belongs to this object.
        peer: rank at the other end.
        staging: returns what copies messages from and to GPU memory.

    Attributes:
        chunk: bytes that are sent by one system call at most.
        expected: receive requests that are not complete, in order.
        outgoing: memory that has not been sent.
        message: the message of which a part, or all, has arrived and which nobody has taken; None between messages.
        events: for which of its events the transport polls the socket.
    """

    def __init__(self, socket: socket.socket, peer: int, staging: Callable[[], Any]) -> None:
        self.socket = socket
        self.peer = peer
        self.chunk = CHUNK
        self.expected: deque[Any] = deque()
        self.outgoing: deque[memoryview] = deque()
        self.message: IncomingMessage | None = None
        self.events = 0
        self._staging = staging
        self._header = bytearray(HEADER.size)
        self._have = 0  # bytes of the next header that have arrived
        socket.setblocking(False)

    # -- sending

    def send(self, tag: int, size: int, pieces: Iterable[Buffer], gpu: bool) -> None:
        """Send a message, or queue what the kernel does not take now."""
        self.outgoing.append(memoryview(HEADER.pack(tag, gpu, size)))
        for piece in pieces:
            if piece.size:
                self.outgoing.append(memoryview(piece))
            if gpu:  # while this piece is sent, the next one is copied
                self.flush()
        self.flush()

    def flush(self) -> None:
        """Send what the kernel takes.

        Raises:
            Disconnected: The peer has closed the connection.
        """
        queue = self.outgoing
        while queue:
            views = [queue[0][: self.chunk]]
            if len(queue) > 1 and len(queue[0]) <= min(HEADER.size, self.chunk):  # header and message in one packet
                views.append(queue[1][: self.chunk])
            try:
                sent = self.socket.sendmsg(views)
            except BlockingIOError:
                return
            except OSError as error:
                queue.clear()
                raise Disconnected(_reason(error)) from error
            while queue and sent >= len(queue[0]):
                sent -= len(queue.popleft())
            if sent:
                queue[0] = queue[0][sent:]

    # -- receiving

    def poll(self, into: Buffer | None = None, keep: bool = True) -> bool:
        """Receive what has arrived of the next message; return whether it is complete, in `message`.

        Args:
            into: see IncomingMessage.
            keep: False if the message is discarded and need not be copied to the GPU (default: True).

        Raises:
            Disconnected: The peer has closed the connection.
        """
        if self.message is None and not self._read_header(into, keep):
            return False
        message = self.message
        assert message is not None
        while message.missing:
            rest = message.rest()
            count = self._receive(rest[: self.chunk])
            message.arrived(count)
            if count < min(len(rest), self.chunk):
                return False
        return True

    def _read_header(self, into: Buffer | None, keep: bool) -> bool:
        self._have += self._receive(memoryview(self._header)[self._have :])
        if self._have < HEADER.size:
            return False
        self._have = 0
        tag, gpu, size = HEADER.unpack(self._header)
        self.message = IncomingMessage(tag, size, into, self._staging() if gpu and keep else None)
        return True

    def _receive(self, view: memoryview) -> int:
        """Receive what has arrived, at most the bytes of `view`; return their number."""
        try:
            count = self.socket.recv_into(view)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise Disconnected(_reason(error)) from error
        if count == 0:
            raise Disconnected("it closed the connection, or it has ended")
        return count

    def next_tag(self) -> int:
        """Return the tag of the next message, which is not received; -1 if its header has not arrived."""
        if self.message is not None:
            return self.message.tag
        try:
            rest = self.socket.recv(HEADER.size - self._have, socket.MSG_PEEK)
        except OSError:  # nothing has arrived, or whoever waits for this peer finds that it is gone
            return -1
        header = self._header[: self._have] + rest
        return int(HEADER.unpack(header)[0]) if len(header) == HEADER.size else -1

    def take(self) -> IncomingMessage:
        """Return the message that is complete; the next one may follow."""
        message, self.message = self.message, None
        assert message is not None
        return message


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
