"""TcpTransport: one socket to every other rank, polled by the thread that makes the call."""

from __future__ import annotations

import contextlib
import math
import select
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from sparsecoll.errors import CommunicationError
from sparsecoll.formats import Buffer
from sparsecoll.kernels.memory import on_gpu
from sparsecoll.telemetry.trace import span
from sparsecoll.transport.base import Transport
from sparsecoll.transport.tags import FIRST_TAG, REVOKE_TAG, STALL_TAG, CallMismatch
from sparsecoll.transport.tcp.connection import Connection, Disconnected, IncomingMessage
from sparsecoll.transport.waiting import CALL_PARENT, FORKED, Watchdog

HOST_SECONDS = 5.0  # between checks of the hosts of all ranks, by a rank that waits
FAREWELL_SECONDS = 1.0  # in which a rank that revokes the communicator sends its report


@dataclass(slots=True)
class TcpReceive:
    """A receive request for the next message from one source; its tag must be `tag`, if that is not None."""

    _transport: TcpTransport
    _room: int
    connection: Connection
    into: Buffer | None
    tag: int | None
    message: IncomingMessage | None = None

    def admit(self, tag: int, size: int) -> None:
        """Refuse a message that is not the one expected, or longer than any that the call can hold."""
        if tag != self.tag:
            raise CallMismatch(f"rank {self.connection.peer} is in another call")
        self._transport.check_room(self.connection.peer, size, self._room)

    def wait(self) -> Buffer:
        """Wait for the message; earlier requests of this source are served first."""
        transport, source = self._transport, self.connection.peer
        if self.message is None:
            transport.serve(self.connection)
        if self.message is None:
            watchdog = transport.watchdog(lambda: f"waits for a message of rank {source}", awaited=lambda: (source,))
            while self.message is None:
                transport.poll(watchdog)
        return self.message.buffer  # type: ignore[no-any-return]


class TcpTransport(Transport):
    """One rank's end of connections to all others.

    Args:
        rank: rank of this process.
        sockets: connected sockets, by the rank at the other end.
        machines: for each rank, a number that only the ranks on one machine share.
    """

    threads = True
    gpu_direct = False
    cure = "continue with a new one, such as torch.distributed.new_group()"

    def __init__(self, rank: int, sockets: dict[int, socket.socket], machines: list[int]) -> None:
        self._connections: dict[int, Connection] = {}  # a fork in another thread may come before they are known
        super().__init__(rank, len(machines))
        own = socket.socketpair()
        ends = [own[0] if peer == rank else sockets[peer] for peer in range(self.size)]
        self._outgoing = [Connection(end, peer, self) for peer, end in enumerate(ends)]
        self._incoming = [*self._outgoing]
        self._incoming[rank] = Connection(own[1], rank, self)
        self._machines, self.one_node = machines, len(set(machines)) == 1
        self._connections = {c.socket.fileno(): c for c in (*self._outgoing, self._incoming[rank])}
        self._poll = select.poll()
        self._sends: set[Connection] = set()

    def machines(self) -> list[int]:
        return self._machines

    def close(self, why: str = "it was closed") -> None:
        """Close all connections, after the nonblocking calls that are under way."""
        if self.worker is not None:
            self.worker.close()
        self.leave()
        self._abandon(why)

    def leave(self) -> bool:
        """Read stall notices: where data are unread, closing a socket also discards data on their way."""
        if not self.broken:
            with contextlib.suppress(CallMismatch):
                self._receive_notices()
        return True

    def forked(self) -> None:
        """Close the copies of the sockets, or peers would not notice when the process that was forked ends."""
        super().forked()
        self.retire(FORKED, CALL_PARENT)
        self._abandon(FORKED)

    def interrupt(self, why: str) -> None:
        """Drop the messages that are not sent yet: code that catches the exception may change their memory."""
        super().interrupt(why)
        for connection in self._outgoing:
            if connection.outgoing:
                with contextlib.suppress(Disconnected):
                    connection.end(why)
                self._queued(connection)

    def _abandon(self, why: str) -> None:
        self.retire(self.broken or why, self.cure)
        for connection in self._connections.values():
            connection.socket.close()

    # -- waiting and failures

    def poll(self, watchdog: Watchdog) -> None:
        """Wait until something arrives or can be sent, and receive and send that.

        Raises:
            CommunicationError: The timeout is over, or a rank is lost; the communicator is broken.
            CallMismatch: A message of another call has arrived, or could not be sent.
        """
        if not self._poll_once(min(watchdog.check(), HOST_SECONDS)):
            for connection in self._outgoing:
                try:
                    connection.check_host()
                except Disconnected as error:
                    raise self._lost(connection, error) from error

    def _lost(self, connection: Connection, error: Disconnected) -> CommunicationError:
        """Mark the communicator as broken by the loss of a rank, and return the exception to raise."""
        return self.fail(f"rank {self.rank} lost rank {connection.peer}: {error}")

    def _poll_once(self, seconds: float) -> bool:
        ready = self._poll.poll(math.ceil(1000 * max(seconds, 0)))
        for number, events in ready:
            connection = self._connections[number]
            if connection.outgoing and events & ~select.POLLIN:
                self._sending(connection, connection.flush)
            if connection.expected and events & ~select.POLLOUT:
                self.serve(connection)
        return bool(ready)

    def _watch(self, connection: Connection) -> None:
        """Poll a connection for reading if a message is expected, and for writing if one is queued."""
        events = (select.POLLIN if connection.expected else 0) | (select.POLLOUT if connection.outgoing else 0)
        if events == connection.events:
            return
        if events:
            self._poll.register(connection.socket, events)
        connection.events = events
        if not events:
            self._poll.unregister(connection.socket)

    # -- sending

    def _isend(self, destination: int, buffer: Buffer, tag: int) -> None:
        connection, gpu = self._outgoing[destination], on_gpu(buffer)
        pieces = self.staging().sendable(buffer, self.chunk) if gpu else (buffer,)
        self._sending(connection, partial(connection.send, tag, buffer.size, pieces, gpu))

    def _sending(self, connection: Connection, send: Callable[[], None]) -> None:
        try:
            send()
        except Disconnected as error:
            raise CallMismatch(f"rank {connection.peer} is gone: {error}") from error  # its report may tell why
        finally:
            self._queued(connection)

    def _queued(self, connection: Connection) -> None:
        (self._sends.add if connection.outgoing else self._sends.discard)(connection)
        self._watch(connection)

    def waitall(self) -> None:
        if self._sends:
            with span("wait"):
                watchdog = self.watchdog(self._waits_for_sends, awaited=lambda: [c.peer for c in self._sends])
                while self._sends:
                    self.poll(watchdog)

    def _waits_for_sends(self) -> str:
        return f"waits for its own sends to rank {', '.join(str(c.peer) for c in self._sends)} to complete"

    # -- receiving

    def _irecv(self, source: int, into: Buffer | None) -> TcpReceive:
        return self._expect(source, into, self.tag)

    def _expect(self, source: int, into: Buffer | None, tag: int | None) -> TcpReceive:
        connection = self._incoming[source]
        request = TcpReceive(self, self.room, connection, into, tag)
        connection.expected.append(request)
        self._watch(connection)
        return request

    def serve(self, connection: Connection) -> None:
        """Receive what has arrived of the messages that are expected on a connection.

        Raises:
            CommunicationError: The rank at the other end is lost, or its message is too long.
            CallMismatch: A message has another tag.
        """
        while connection.expected:
            request = connection.expected[0]
            try:
                complete = connection.poll(request.into, None if request.tag is None else request.admit)
            except Disconnected as error:
                raise self._lost(connection, error) from error
            tag = None if connection.message is None else connection.message.tag
            if request.tag is not None and tag not in (None, request.tag, STALL_TAG):
                raise CallMismatch(f"rank {connection.peer} is in another call")
            if not complete:
                return
            message = connection.take()
            if tag == STALL_TAG:
                self._keep_notice(connection.peer, message.buffer)
                continue
            request.message = message
            connection.expected.popleft()
        self._watch(connection)

    def _notify(self, peer: int, message: Buffer) -> None:
        with contextlib.suppress(CallMismatch):  # whoever waits for a rank finds that it is gone
            self._isend(peer, message, STALL_TAG)

    def _receive_notices(self) -> None:
        """See Transport; a notice stays behind a message that is not expected, but the tag of that says as much."""
        for connection in self._incoming:
            with contextlib.suppress(Disconnected):
                while (tag := connection.next_tag()) == STALL_TAG and connection.poll():
                    self._keep_notice(connection.peer, connection.take().buffer)
            if tag == REVOKE_TAG:  # which a rank that waits for its own sends would not receive
                raise CallMismatch(f"rank {connection.peer} has revoked the communicator")
            if tag >= FIRST_TAG:
                self.notices[connection.peer] = tag

    def progress(self) -> None:
        self._poll_once(0)

    # -- reports of errors

    def _until_reports(self, missing: list[int], error: Exception | None) -> Iterator[tuple[int, int, Buffer]]:
        self._expect_nothing()
        requests = {peer: self._expect(peer, None, None) for peer in missing}
        watchdog = self.watchdog(lambda: f"waits for the report of rank {', '.join(map(str, missing))}", error)
        for peer in missing:
            self.serve(self._incoming[peer])
        while missing:
            for peer, message in [(peer, requests[peer].message) for peer in missing]:
                if message is not None:
                    yield peer, message.tag, message.buffer
                    if peer in missing:
                        requests[peer] = self._expect(peer, None, None)
            if missing:
                self._poll_for_reports(watchdog)
        watchdog = self.watchdog(self._waits_for_sends, error)
        while self._sends:
            self._poll_for_reports(watchdog)

    def _expect_nothing(self) -> None:
        for connection in self._incoming:
            connection.expected.clear()
            self._watch(connection)

    def _poll_for_reports(self, watchdog: Watchdog) -> None:
        with contextlib.suppress(CallMismatch):  # a report cannot be sent: its receiver has sent one, or is lost
            self.poll(watchdog)

    def revoke(self, report: Buffer) -> None:
        """Send a report to all ranks and wait for none; a rank that does not take it finds the connection closed."""
        if self.revoked:
            return
        self._expect_nothing()
        super().revoke(report)
        deadline = time.monotonic() + FAREWELL_SECONDS
        while self._sends and time.monotonic() < deadline:
            with contextlib.suppress(CallMismatch):
                self._poll_once(deadline - time.monotonic())
        for connection in self._sends:
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)
