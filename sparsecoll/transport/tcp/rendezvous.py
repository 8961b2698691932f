"""Connecting all ranks with each other, given a place where each can leave a few hundred bytes for the others.

Every rank listens at a port, and for ranks on its machine at a Unix domain socket, which takes less time for the same
message. It connects to the ranks above it and accepts connections from those below it. Each end of a
connection proves that it belongs to the job by the other's cookie, a random number left at the meeting place.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
import select
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from hmac import compare_digest
from typing import Any, Protocol

from sparsecoll.errors import CommunicationError
from sparsecoll.transport.tcp import addresses
from sparsecoll.transport.tcp.transport import TcpTransport
from sparsecoll.transport.waiting import Watchdog

COOKIE_BYTES, RANK_BYTES = 16, 4
STRANGERS = 100  # that may wait at the port besides the ranks
TICK_SECONDS = 0.2  # between looks at what has happened to other ranks, and calls at the addresses of one rank
ANSWER_SECONDS = 20.0  # for which a rank may be busy before it is called at its next address, too
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # a host that is off is lost after a minute


class Meeting(Protocol):
    """Where the ranks of one communicator leave messages for each other before they are connected.

    Attributes:
        rank: rank of this process.
        size: number of ranks.
    """

    rank: int
    size: int

    def put(self, entry: str) -> None:
        """Leave this rank's entry."""
        ...

    def entries(self) -> list[str] | None:
        """Return all ranks' entries; None if some are not there yet."""
        ...

    def clear(self) -> None:
        """Remove this rank's entry, which all ranks have read: a job that is restarted may meet at the same place."""
        ...

    def fail(self, why: str) -> None:
        """Tell all ranks that this one cannot be connected."""
        ...

    def failed(self) -> str:
        """Return what a rank has reported by `fail`; "" if none has."""
        ...


@dataclass
class Peer:
    """What a rank tells the others about itself."""

    hosts: list[str]
    port: int
    cookie: str
    machine: int
    local: str = ""  # name of its Unix domain socket


def connect(meeting: Meeting, timeout: float | None = None) -> TcpTransport:
    """Return the transport of the ranks that meet; all of them must call this.

    Args:
        meeting: where they meet.
        timeout: seconds to wait for the other ranks; None, the default, for no limit.

    Raises:
        CommunicationError: Some rank did not come or cannot be reached.
    """
    rank = meeting.rank
    watchdog = Watchdog(rank, lambda: "waits for all ranks to make their first call on the communicator", timeout)
    sockets: dict[int, socket.socket] = {}
    try:
        with contextlib.ExitStack() as stack:
            listener, hosts = addresses.listen(meeting.size + STRANGERS)
            local, name = addresses.listen_locally(meeting.size + STRANGERS)
            listeners = [stack.enter_context(one) for one in (listener, local) if one is not None]
            cookie = secrets.token_hex(COOKIE_BYTES)
            peers = _meet(meeting, Peer(hosts, listener.getsockname()[1], cookie, addresses.machine(), name), watchdog)
            party = stack.enter_context(contextlib.closing(_Party(rank, peers, listeners)))
            while not party.complete():
                party.step()
                _check(meeting, watchdog)
            sockets, party.sockets = party.sockets, {}
    except (CommunicationError, ValueError, OSError) as error:
        why = str(error) if isinstance(error, CommunicationError) else f"rank {rank}: {error}"
        meeting.fail(why)
        raise CommunicationError(why) from error
    meeting.clear()
    for connected in sockets.values():
        _set_options(connected)
    return TcpTransport(rank, sockets, [peer.machine for peer in peers])


def _meet(meeting: Meeting, own: Peer, watchdog: Watchdog) -> list[Peer]:
    meeting.put(json.dumps(vars(own)))
    pause = 0.001
    while True:
        _check(meeting, watchdog)
        entries = meeting.entries()
        if entries is not None:
            return [Peer(**json.loads(entry)) for entry in entries]
        time.sleep(pause)
        pause = min(2 * pause, TICK_SECONDS)


def _check(meeting: Meeting, watchdog: Watchdog) -> None:
    if why := meeting.failed():
        raise CommunicationError(why)
    watchdog.check()


@dataclass
class _Handshake:
    """A connection of which the other end has not proved yet that it belongs to the job.

    Attributes:
        peer: the rank that this one has called; None if it was called itself.
        where: the address that was called.
        greeted: whether the one that calls need not send anything any more.
        heard: what the other end has sent.
    """

    socket: socket.socket
    peer: int | None = None
    where: str = ""
    greeted: bool = True
    heard: bytes = b""


class _Party:
    """The connections that one rank makes, all of them in one loop, in which nothing blocks.

    It calls each rank above it at its addresses, one after the other, until one answers. A rank answers one greeting of
    each rank below it, so that both know which connection they keep.

    Attributes:
        sockets: the connections that are made, by rank.
    """

    def __init__(self, rank: int, peers: list[Peer], listeners: list[socket.socket]) -> None:
        self.sockets: dict[int, socket.socket] = {}
        self._rank, self._cookies = rank, [bytes.fromhex(peer.cookie) for peer in peers]
        self._ways = {peer: _ways(peers[peer], peers[rank].machine) for peer in range(rank + 1, len(peers))}
        self._due = dict.fromkeys(self._ways, 0.0)  # when to call a rank at its next address
        self._errors: dict[int, list[str]] = {peer: [] for peer in self._ways}
        self._handshakes: dict[int, _Handshake] = {}  # by file descriptor, the oldest first
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._poll = select.poll()
        for listener in listeners:
            listener.setblocking(False)
            self._poll.register(listener, select.POLLIN)

    def complete(self) -> bool:
        return len(self.sockets) == len(self._cookies) - 1

    def step(self) -> None:
        """Go on for TICK_SECONDS, or until all are connected."""
        end = time.monotonic() + TICK_SECONDS
        while not self.complete() and (now := time.monotonic()) < end:
            for peer in [peer for peer, due in self._due.items() if now >= due and peer not in self.sockets]:
                self._call(peer)
            for number, _ in self._poll.poll(1000 * (end - now)):
                if number in self._listeners:
                    self._accept(self._listeners[number])
                elif number in self._handshakes:
                    self._go_on(self._handshakes[number])

    def close(self) -> None:
        for left in (*self.sockets.values(), *(handshake.socket for handshake in self._handshakes.values())):
            left.close()

    def _watch(self, handshake: _Handshake, events: int) -> None:
        handshake.socket.setblocking(False)
        self._handshakes[handshake.socket.fileno()] = handshake
        self._poll.register(handshake.socket, events)

    def _call(self, peer: int) -> None:
        for family, address in self._ways[peer]:
            handshake = _Handshake(socket.socket(family, socket.SOCK_STREAM), peer, str(address[0]), greeted=False)
            self._watch(handshake, select.POLLOUT)
            code = handshake.socket.connect_ex(address)
            if code in (0, errno.EINPROGRESS):
                self._due[peer] = time.monotonic() + TICK_SECONDS
                return
            self._drop(handshake, os.strerror(code))
        self._due[peer] = math.inf
        if all(handshake.peer != peer for handshake in self._handshakes.values()):
            tried = "; ".join(dict.fromkeys(self._errors[peer])) or "it has no address that this host can use"
            raise CommunicationError(
                f"rank {self._rank} cannot connect to rank {peer} ({tried}); {addresses.INTERFACES[0]} may name the"
                " network interface by which hosts reach each other"
            )

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):  # the caller has given up
            self._watch(_Handshake(listener.accept()[0]), select.POLLIN)
        callers = [handshake for handshake in self._handshakes.values() if handshake.peer is None]
        if len(callers) > len(self._cookies) + STRANGERS:
            self._drop(callers[0])

    def _go_on(self, handshake: _Handshake) -> None:
        """Greet, or take what has come."""
        expected = COOKIE_BYTES if handshake.peer is not None else COOKIE_BYTES + RANK_BYTES
        try:
            if handshake.peer is not None and not handshake.greeted:
                handshake.socket.send(self._cookies[handshake.peer] + self._rank.to_bytes(RANK_BYTES, "little"))
                handshake.greeted = True
                self._due[handshake.peer] = time.monotonic() + ANSWER_SECONDS
                self._watch(handshake, select.POLLIN)
                return
            data = handshake.socket.recv(expected - len(handshake.heard))
            handshake.heard += data
            if len(handshake.heard) == expected:
                self._decide(handshake)
            elif not data:
                self._drop(handshake, "no answer: it has given up or ended")
        except BlockingIOError:
            pass
        except OSError as error:
            self._drop(handshake, error.strerror or str(error))

    def _decide(self, handshake: _Handshake) -> None:
        """Keep a connection whose other end knows the cookie of this rank, and answer a call."""
        cookie, caller = handshake.heard[:COOKIE_BYTES], handshake.heard[COOKIE_BYTES:]
        peer = int.from_bytes(caller, "little") if handshake.peer is None else handshake.peer
        known = compare_digest(cookie, self._cookies[self._rank])
        if not known or peer in self.sockets or (caller and peer >= self._rank):
            self._drop(handshake, "a wrong answer, of another program")
            return
        if caller:
            handshake.socket.send(self._cookies[peer])
        self._drop(handshake, keep=True)
        self.sockets[peer] = handshake.socket
        for other in [other for other in self._handshakes.values() if other.peer == peer]:
            self._drop(other)

    def _drop(self, handshake: _Handshake, why: str = "", keep: bool = False) -> None:
        """Watch a connection no more, and close it unless it is kept; a rank is then called elsewhere at once."""
        self._poll.unregister(handshake.socket)
        del self._handshakes[handshake.socket.fileno()]
        if keep:
            return
        handshake.socket.close()
        if handshake.peer is not None:
            self._due[handshake.peer] = 0.0
            if handshake.socket.family != socket.AF_UNIX:  # it may be in another container
                self._errors[handshake.peer].append(f"{handshake.where}: {why}")


def _ways(target: Peer, machine: int) -> Iterator[tuple[int, Any]]:
    """Yield the families and addresses by which a rank on `machine` may reach a peer, the best one first."""
    if target.local and target.machine == machine:
        yield socket.AF_UNIX, f"\0{target.local}"
    for host in target.hosts:
        for family, address in addresses.resolve(host, target.port):
            if target.machine == machine or not addresses.is_loopback(address[0]):
                yield family, address


def _set_options(connection: socket.socket) -> None:
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
