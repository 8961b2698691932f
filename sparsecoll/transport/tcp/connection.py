"""Connection: messages on one nonblocking socket. A message is a header (tag, memory, bytes) and its bytes.

An exception between a system call and the count of its bytes, such as KeyboardInterrupt or MemoryError, leaves the
stream out of step. So a direction is marked as `torn` before its first system call, until its bytes are counted; one
that was left marked is never used again. Should a stream be out of step nevertheless, the checksums of headers tell.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import numpy as np

from sparsecoll.formats import Buffer
from sparsecoll.kernels.memory import empty, on_gpu
from sparsecoll.transport.base import Transport
from sparsecoll.transport.tags import FIRST_TAG, REPORT_BYTES

FIELDS = struct.Struct("<QBQ")  # tag, 1 for a message from GPU memory, bytes
CHECK_BYTES = 4  # of the checksum that precedes them, of these fields and the number of the message on its connection
HEADER_BYTES = CHECK_BYTES + FIELDS.size
SILENT_SECONDS = 60.0  # after which a host that acknowledges nothing counts as lost
TCP_INFO = struct.Struct("<2x2B52xI") if sys.platform.startswith("linux") else None
SCRATCH = memoryview(bytearray(1 << 16))  # for messages that are discarded
NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)  # a lost rank is an error, also where SIGPIPE would end the process
TORN = "an exception came between a system call and the count of its bytes"


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
        discarded: whether the message is not wanted, and then has no memory (default: False).

    Attributes:
        missing: number of bytes that have not arrived.
    """

    def __init__(self, tag: int, size: int, into: Buffer | None, staging: Any, discarded: bool = False) -> None:
        self.tag = tag
        self.size = self.missing = size
        self._staging, self._discarded, self._start = staging, discarded, 0
        fits = into is not None and into.size == size and on_gpu(into) == (staging is not None)
        self.buffer: Any = None
        if staging is not None:
            self.buffer = into if fits else staging.memory(size)
            self._next_piece()
        elif not discarded:
            self.buffer = into if fits else empty(size, np.uint8)
            self._host = memoryview(self.buffer)

    def _next_piece(self) -> None:
        """Make host memory for the next piece of a message for the GPU."""
        self._start = self.size - self.missing
        self._piece = self._staging.room(min(self.missing, self._staging.chunk))
        self._host = memoryview(self._piece)

    def rest(self) -> memoryview:
        """Return the memory for the next bytes."""
        return SCRATCH[: self.missing] if self._discarded else self._host[self.size - self.missing - self._start :]

    def arrived(self, count: int) -> None:
        """Count the next `count` bytes, which have arrived."""
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
        transport: that has the connection.

    Attributes:
        expected: receive requests that are not complete, in order.
        outgoing: memory that has not been sent.
        message: the message that is arriving, or has arrived and was not taken; None between messages.
        events: for which of its events the transport polls the socket.
    """

    def __init__(self, socket: socket.socket, peer: int, transport: Transport) -> None:
        self.socket, self.peer = socket, peer
        self.expected: deque[Any] = deque()
        self.outgoing: deque[memoryview] = deque()
        self.message: IncomingMessage | None = None
        self.events, self._transport = 0, transport
        self._header = bytearray(HEADER_BYTES)
        self._have = 0  # bytes of the next header that have arrived
        self._sent = self._received = 0  # messages
        self._torn_out = self._torn_in = False  # whether bytes may have been sent, or received, that are not counted
        socket.setblocking(False)

    # -- sending

    def send(self, tag: int, size: int, pieces: Iterable[Buffer], gpu: bool) -> None:
        """Send a message, or queue what the kernel does not take now."""
        fields = FIELDS.pack(tag, gpu, size)
        header = memoryview(_check(fields, self._sent) + fields)
        self._check_whole()
        self._torn_out = True  # until all of the message is queued
        self.outgoing.append(header)
        self._sent += 1
        for piece in pieces:
            if piece.size:
                self.outgoing.append(memoryview(piece))
            if gpu:  # while this piece is sent, the next one is copied
                self._push()
        self._torn_out = False
        self._push()

    def flush(self) -> None:
        """Send as much as the kernel takes.

        Raises:
            Disconnected: The peer has closed the connection, or it cannot be used any more.
        """
        self._check_whole()
        self._push()

    def _check_whole(self) -> None:
        if self._torn_out:
            self.end(TORN)

    def _push(self) -> None:
        queue, before, chunk = self.outgoing, self._torn_out, self._transport.chunk
        while queue:
            views = [queue[0][:chunk]]
            if len(queue) > 1 and len(queue[0]) <= min(HEADER_BYTES, chunk):  # header and message in one packet
                views.append(queue[1][:chunk])
            self._torn_out = True
            try:
                sent = self.socket.sendmsg(views, [], NO_SIGNAL)
            except BlockingIOError:
                self._torn_out = before
                return
            except OSError as error:
                self.end(_reason(error), error)
            while queue and sent >= len(queue[0]):
                sent -= len(queue.popleft())
            if sent:
                queue[0] = queue[0][sent:]
            self._torn_out = before

    def check_host(self) -> None:
        """Check that the peer's host answers, if the kernel has retransmitted or probed more than once.

        TCP's keepalive sends no probes while data is in flight, and TCP_USER_TIMEOUT would also end a connection whose
        peer is alive but receives nothing.

        Raises:
            Disconnected: It has acknowledged nothing for SILENT_SECONDS.
        """
        if TCP_INFO is None or self.socket.family == socket.AF_UNIX:
            return
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO.size)
        retransmits, probes, since_last_ack = TCP_INFO.unpack(info)
        if max(retransmits, probes) > 1 and since_last_ack >= 1000 * SILENT_SECONDS:
            raise Disconnected(f"its host has acknowledged nothing for {SILENT_SECONDS:.0f} s")

    def end(self, why: str, error: OSError | None = None) -> NoReturn:
        """Send nothing any more, which the peer notices, and raise Disconnected; what it has sent can be received."""
        self._torn_out = True
        self.outgoing.clear()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        raise Disconnected(why) from error

    # -- receiving

    def poll(self, into: Buffer | None = None, admit: Callable[[int, int], None] | None = None) -> bool:
        """Receive what has arrived of the next message; return whether it is complete, in `message`.

        Args:
            into: see IncomingMessage.
            admit: called with the tag and the size of the message, before there is memory for it, unless it is a
                report; None, the default, if the message is discarded.

        Raises:
            Disconnected: The peer has closed the connection, it cannot be used any more, or a report is too long.
            MemoryError: There is no room for the message. It can be received later, or discarded.
            Exception: What `admit` raises; as MemoryError.
        """
        if self.message is None:
            while self._have < HEADER_BYTES:
                count = self._receive(memoryview(self._header)[self._have :])
                self._have += count
                self._torn_in = False
                if not count:
                    return False
            self.message = self._announced(into, admit)
            self._have = 0
        message = self.message
        while message.missing:
            rest = message.rest()
            count = self._receive(rest[: self._transport.chunk])
            message.arrived(count)
            self._torn_in = False
            if count < min(len(rest), self._transport.chunk):
                return False
        return True

    def _announced(self, into: Buffer | None, admit: Callable[[int, int], None] | None) -> IncomingMessage:
        """Return memory for the message that the header announces."""
        fields = self._header[CHECK_BYTES:]
        if self._header[:CHECK_BYTES] != _check(fields, self._received):
            raise Disconnected("it has sent bytes that are no message")
        tag, gpu, size = FIELDS.unpack(fields)
        if tag < FIRST_TAG:
            if size > REPORT_BYTES:
                raise Disconnected(f"it has sent a report of {size} bytes")
            message = IncomingMessage(tag, size, None, None)
        elif admit is not None:
            admit(tag, size)
            message = IncomingMessage(tag, size, into, self._transport.staging() if gpu else None)
        else:
            message = IncomingMessage(tag, size, None, None, discarded=True)
        self._received += 1
        return message

    def _receive(self, view: memoryview) -> int:
        """Receive what has arrived, at most the bytes of `view`; return their number, for the caller to count."""
        if self._torn_in:
            raise Disconnected(TORN)
        self._torn_in = True
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
            missing = HEADER_BYTES - self._have
            rest = self.socket.recv(missing, socket.MSG_PEEK) if missing else b""
        except OSError:  # nothing has arrived, or whoever waits for this peer finds that it is gone
            return -1
        header = self._header[: self._have] + rest
        fields = header[CHECK_BYTES:]
        whole = len(header) == HEADER_BYTES and header[:CHECK_BYTES] == _check(fields, self._received)
        return int(FIELDS.unpack(fields)[0]) if whole else -1

    def take(self) -> IncomingMessage:
        """Return the message that is complete; the next one may follow."""
        message, self.message = self.message, None
        assert message is not None
        return message


def _check(fields: bytes | bytearray, number: int) -> bytes:
    """Return the checksum of a header's fields and of the number of its message."""
    return zlib.crc32(fields, number & 0xFFFFFFFF).to_bytes(CHECK_BYTES, "little")


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
