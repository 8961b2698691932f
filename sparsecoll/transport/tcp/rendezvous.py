"""Connecting all ranks with each other, given a place where each can leave a few hundred bytes for the others.

Every rank listens at a port, and for ranks on its machine at a Unix domain socket, which takes less time for the same
message. It connects to the ranks above it and accepts connections from those below it. Each end of a
connection proves that it belongs to the job by the other's cookie, a random number left at the meeting place.
"""

from __future__ import annotations

import contextlib
import json
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

COOKIE_BYTES = 16
HELLO_SECONDS = 20.0  # to reach a peer at one of its addresses, and for its answer to a greeting
STRANGERS = 100  # that may wait at the port besides the ranks
TICK_SECONDS = 0.2  # between looks at what has happened to other ranks
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
    cookie = secrets.token_hex(COOKIE_BYTES)
    sockets: dict[int, socket.socket] = {}
    watchdog = Watchdog(rank, lambda: "waits for all ranks to make their first call on the communicator", timeout)
    try:
        listener, hosts = addresses.listen(meeting.size + STRANGERS)
        local, name = addresses.listen_locally(meeting.size + STRANGERS)
        with listener, local or contextlib.nullcontext():
            own = Peer(hosts, listener.getsockname()[1], cookie, addresses.machine(), name)
            peers = _meet(meeting, own, watchdog)
            for peer in range(rank + 1, meeting.size):
                sockets[peer] = _reach(rank, peer, peers)
            _accept(meeting, [listener, *([local] if local else [])], peers, sockets, watchdog)
        for peer in range(rank + 1, meeting.size):
            _hear(rank, peer, sockets[peer], bytes.fromhex(cookie))
    except (CommunicationError, ValueError, OSError) as error:
        for connected in sockets.values():
            connected.close()
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


def _reach(rank: int, peer: int, peers: list[Peer]) -> socket.socket:
    """Connect to a rank and greet it."""
    target, errors = peers[peer], []
    for family, address in _ways(target, peers[rank].machine):
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.settimeout(HELLO_SECONDS)
            connection.connect(address)
            connection.sendall(bytes.fromhex(target.cookie) + rank.to_bytes(4, "little"))
            return connection
        except OSError as error:
            connection.close()
            if family != socket.AF_UNIX:  # it may be in another container
                errors.append(f"{address[0]}: {error.strerror or error}")
    tried = "; ".join(dict.fromkeys(errors)) or f"no usable address among {', '.join(target.hosts)}"
    raise CommunicationError(
        f"rank {rank} cannot connect to rank {peer} ({tried}); {addresses.INTERFACES[0]} may name the network interface"
        " by which hosts reach each other"
    )


def _ways(target: Peer, machine: int) -> Iterator[tuple[int, Any]]:
    """Yield the families and addresses by which a rank on `machine` may reach a peer, the best one first."""
    if target.local and target.machine == machine:
        yield socket.AF_UNIX, f"\0{target.local}"
    for host in target.hosts:
        for family, address in addresses.resolve(host, target.port):
            if target.machine == machine or not addresses.is_loopback(address[0]):
                yield family, address


def _accept(
    meeting: Meeting,
    listeners: list[socket.socket],
    peers: list[Peer],
    sockets: dict[int, socket.socket],
    watchdog: Watchdog,
) -> None:
    """Accept the ranks below this one; connections without this rank's cookie are refused."""
    rank, cookie = meeting.rank, bytes.fromhex(peers[meeting.rank].cookie)
    poll, by_number = select.poll(), {listener.fileno(): listener for listener in listeners}
    for listener in listeners:
        listener.setblocking(False)
        poll.register(listener, select.POLLIN)
    while not all(peer in sockets for peer in range(rank)):
        ready = poll.poll(1000 * TICK_SECONDS)
        if not ready:
            _check(meeting, watchdog)
            continue
        try:
            connection, _ = by_number[ready[0][0]].accept()
        except BlockingIOError:  # it has given up
            continue
        connection.settimeout(HELLO_SECONDS)
        greeting = _read(connection, COOKIE_BYTES + 4)
        peer = int.from_bytes(greeting[COOKIE_BYTES:], "little")
        if not compare_digest(greeting[:COOKIE_BYTES], cookie) or peer >= rank or peer in sockets:
            connection.close()
            continue
        connection.sendall(bytes.fromhex(peers[peer].cookie))
        sockets[peer] = connection


def _hear(rank: int, peer: int, connection: socket.socket, cookie: bytes) -> None:
    """Receive a rank's answer to the greeting."""
    if not compare_digest(_read(connection, COOKIE_BYTES), cookie):
        raise CommunicationError(f"rank {rank} expected an answer of rank {peer}, got none: it has given up or ended")


def _read(connection: socket.socket, size: int) -> bytes:
    """Receive `size` bytes; fewer if the other end closes or does not send them."""
    data = b""
    while len(data) < size:
        try:
            part = connection.recv(size - len(data))
        except OSError:
            break
        if not part:
            break
        data += part
    return data


def _set_options(connection: socket.socket) -> None:
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
