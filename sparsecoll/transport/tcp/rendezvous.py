"""Connecting all ranks with each other, given a place where each can leave a few hundred bytes for the others.

Every rank listens at a port, and for ranks on its machine at a Unix domain socket, which takes less time for the same
message. It connects to the ranks above it and accepts connections from those below it. Each end of a connection proves
that it belongs to the job: it knows all ranks' entries at the meeting place, random numbers among them, and the job's
secret if there is one. Neither is sent. Who is called sends a nonce; the caller answers with its rank, a nonce and the
HMAC-SHA256 of its part, both ranks and both nonces; and who is called, if that is right, with that of its own part.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import itertools
import json
import math
import os
import secrets
import select
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparsecoll.errors import CommunicationError
from sparsecoll.transport.launcher import machine
from sparsecoll.transport.tcp import addresses
from sparsecoll.transport.tcp.connection import NO_SIGNAL
from sparsecoll.transport.tcp.transport import TcpTransport
from sparsecoll.transport.waiting import Watchdog

if TYPE_CHECKING:
    from sparsecoll.transport.process_groups import StoreMeeting

SECRET = "SPARSECOLL_SECRET"
SECRET_BYTES, NONCE_BYTES, PROOF_BYTES, RANK_BYTES = 16, 16, 32, 4  # of a secret at least
STRANGERS = 100  # that may wait at the port besides the ranks
TICK_SECONDS = 0.2  # between checks of whether a rank has failed, and calls at the addresses of one rank
ANSWER_SECONDS = 20.0  # for which a rank may be busy before it is called at its next address, too
AGAIN_SECONDS = 0.02  # before a rank is called again that had too many callers
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # a host that is off is lost after a minute


@dataclass
class Peer:
    """What the others know of a rank."""

    host: str
    port: int
    nonce: str
    machine: int
    local: str = ""  # name of its Unix domain socket

    def entry(self, rank: int, secret: bytes) -> str:
        """Return what the rank leaves for the others: a proof that it knows the secret, and these fields."""
        text = json.dumps(vars(self))
        return _proof(secret, "entry", rank, text.encode()).hex() + text


def connect(meeting: StoreMeeting, timeout: float | None = None, secret: str | bytes | None = None) -> TcpTransport:
    """Return the transport of the ranks that meet; all of them must call this.

    Args:
        meeting: where they meet.
        timeout: seconds to wait for the other ranks; None, the default, for no limit.
        secret: what only the ranks know, at least SECRET_BYTES; None, the default, for the value of the environment
            variable SPARSECOLL_SECRET or, if there is none, for no secret.

    Raises:
        CommunicationError: Some rank did not come, cannot be reached or has another secret.
    """
    with contextlib.ExitStack() as stack:
        try:
            rank, absent = meeting.rank, meeting.absent
            what = "waits for all ranks to make their first call on the communicator (absent: {})"
            watchdog = Watchdog(rank, lambda: what.format(", ".join(map(str, absent()))), timeout)
            known = _secret(secret)
            listener, host = addresses.listen(meeting.size + STRANGERS)
            local, name = addresses.listen_locally(meeting.size + STRANGERS)
            listeners = [stack.enter_context(one) for one in (listener, local) if one is not None]
            own = Peer(host, listener.getsockname()[1], secrets.token_hex(NONCE_BYTES), machine(), name)
            meeting.put(own.entry(rank, known))
            entries = _entries(meeting, watchdog)
            key = _proof(known, "key", *entries)
            party = stack.enter_context(contextlib.closing(_Party(rank, _peers(entries, rank, known), key, listeners)))
            absent = party.absent
            while not party.complete():
                party.step()
                _check(meeting, watchdog)
            meeting.clear()
            return party.transport()
        except BaseException as error:  # told before ports are closed: others would name a refused connection instead
            text = f"{error}" if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {error}"
            why = str(error) if isinstance(error, CommunicationError) else f"rank {meeting.rank}: {text}"
            with contextlib.suppress(Exception):  # the store may be what is lost
                why = meeting.failed() or why
                meeting.fail(why)
            if not isinstance(error, Exception):
                raise
            raise CommunicationError(why) from error


def _secret(given: str | bytes | None) -> bytes:
    secret = os.environ.get(SECRET, "") if given is None else given
    secret = secret.encode() if isinstance(secret, str) else secret
    if len(secret) < SECRET_BYTES and (secret or given is not None):
        raise ValueError(
            f"{SECRET}: expected at least {SECRET_BYTES} bytes, got {len(secret)}: python -c 'import secrets;"
            " print(secrets.token_hex())' makes a good one"
        )
    return secret


def _proof(key: bytes, *parts: str | int | bytes) -> bytes:
    """Return the HMAC-SHA256 of these parts."""
    return hmac.digest(key, repr(parts).encode(), "sha256")


def _entries(meeting: StoreMeeting, watchdog: Watchdog) -> list[str]:
    pause = 0.001
    while True:
        _check(meeting, watchdog)
        if (entries := meeting.entries()) is not None:
            return entries
        time.sleep(pause)
        pause = min(2 * pause, TICK_SECONDS)


def _peers(entries: list[str], rank: int, secret: bytes) -> list[Peer]:
    for other, entry in enumerate(entries):
        proof, text = entry[: 2 * PROOF_BYTES], entry[2 * PROOF_BYTES :]
        if not hmac.compare_digest(proof.encode(), _proof(secret, "entry", other, text.encode()).hex().encode()):
            raise CommunicationError(
                f"{SECRET}: expected the same secret on all ranks, got another one, or none, on rank {other} than on"
                f" rank {rank}"
            )
    return [Peer(**json.loads(entry[2 * PROOF_BYTES :])) for entry in entries]


def _check(meeting: StoreMeeting, watchdog: Watchdog) -> None:
    if why := meeting.failed():
        raise CommunicationError(why)
    watchdog.check()


@dataclass
class _Handshake:
    """A connection of which the other end has not proved yet that it belongs to the job.

    Attributes:
        missing: bytes that the other end has to send next.
        peer: the rank that this one has called; None if it was called itself.
        way: the family and the address that were called.
        nonces: that of the rank that was called, and that of the caller.
        received: bytes that the other end has sent.
    """

    socket: socket.socket
    missing: int
    peer: int | None = None
    way: tuple[int, Any] = (0, "")
    nonces: bytes = b""
    received: bytes = b""


class _Party:
    """The connections that one rank makes, all of them in one loop, in which nothing blocks.

    It calls each rank above it at its addresses, one after the other, until one answers. A rank answers one greeting of
    each rank below it, so that both know which connection they keep.

    Attributes:
        sockets: the connections that are made, by rank.
    """

    def __init__(self, rank: int, peers: list[Peer], key: bytes, listeners: list[socket.socket]) -> None:
        self.sockets: dict[int, socket.socket] = {}
        self._rank, self._key, self._machines = rank, key, [peer.machine for peer in peers]
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
        return len(self.sockets) == len(self._machines) - 1

    def absent(self) -> list[int]:
        """Return the ranks that are not connected yet."""
        return [rank for rank in range(len(self._machines)) if rank != self._rank and rank not in self.sockets]

    def transport(self) -> TcpTransport:
        """Return the transport that has the connections."""
        for connected in self.sockets.values():
            _set_options(connected)
        transport = TcpTransport(self._rank, self.sockets, self._machines)
        self.sockets = {}
        return transport

    def step(self) -> None:
        """Go on for TICK_SECONDS, or until all are connected."""
        end = time.monotonic() + TICK_SECONDS
        while not self.complete() and (now := time.monotonic()) < end:
            for peer in [peer for peer, due in self._due.items() if now >= due and peer not in self.sockets]:
                self._call(peer)
            due = min((due for peer, due in self._due.items() if peer not in self.sockets), default=end)
            for number, _ in self._poll.poll(math.ceil(1000 * max(min(due, end) - now, 0))):
                if number in self._listeners:
                    self._accept(self._listeners[number])
                elif number in self._handshakes:
                    self._go_on(self._handshakes[number])

    def close(self) -> None:
        for one in (*self.sockets.values(), *(handshake.socket for handshake in self._handshakes.values())):
            one.close()

    def _watch(self, handshake: _Handshake) -> None:
        handshake.socket.setblocking(False)
        self._handshakes[handshake.socket.fileno()] = handshake
        self._poll.register(handshake.socket, select.POLLIN)

    def _call(self, peer: int) -> None:
        for way in self._ways[peer]:
            handshake = _Handshake(socket.socket(way[0], socket.SOCK_STREAM), NONCE_BYTES, peer, way)
            self._watch(handshake)
            code = handshake.socket.connect_ex(way[1])
            if code in (0, errno.EINPROGRESS):
                self._due[peer] = time.monotonic() + (TICK_SECONDS if code else ANSWER_SECONDS)
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
        """Send a nonce to who calls; if there are too many callers, the one that has waited for longest has to go."""
        callers = [handshake for handshake in self._handshakes.values() if handshake.peer is None]
        if len(callers) >= len(self._machines) + STRANGERS:
            self._drop(callers.pop(0))
        try:
            accepted = listener.accept()[0]
        except OSError as error:  # the caller has closed it, or this process has no descriptor left
            if (full := error.errno in (errno.EMFILE, errno.ENFILE)) and not callers:
                raise
            for caller in callers if full else ():
                self._drop(caller)
            return
        nonce = secrets.token_bytes(NONCE_BYTES)
        handshake = _Handshake(accepted, RANK_BYTES + NONCE_BYTES + PROOF_BYTES, nonces=nonce)
        self._watch(handshake)
        self._send(handshake, nonce)

    def _send(self, handshake: _Handshake, message: bytes) -> bool:
        """Return whether a message was sent; a new connection has room for it."""
        try:
            handshake.socket.send(message, NO_SIGNAL)
        except OSError as error:
            self._drop(handshake, error.strerror or str(error))
            return False
        return True

    def _go_on(self, handshake: _Handshake) -> None:
        """Receive the bytes that have arrived."""
        try:
            data = handshake.socket.recv(handshake.missing)
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(handshake, error.strerror or str(error))
            return
        handshake.received += data
        handshake.missing -= len(data)
        if not data:
            self._drop(handshake, "no answer: it has given up or ended")
        elif not handshake.missing:
            received, handshake.received = handshake.received, b""
            self._take(handshake, received)

    def _take(self, handshake: _Handshake, received: bytes) -> None:
        """Greet, answer, or take an answer; keep a connection whose other end has proved that it belongs to the job."""
        own, peer = self._rank, handshake.peer
        if peer is None:
            caller, proof = int.from_bytes(received[:RANK_BYTES], "little"), received[-PROOF_BYTES:]
            handshake.nonces += received[RANK_BYTES:-PROOF_BYTES]
            known = hmac.compare_digest(proof, _proof(self._key, "call", caller, own, handshake.nonces))
            if not known or caller in self.sockets or caller >= own:
                self._drop(handshake)
            elif self._send(handshake, _proof(self._key, "answer", caller, own, handshake.nonces)):
                self._keep(handshake, caller)
        elif not handshake.nonces:
            nonce, handshake.missing = secrets.token_bytes(NONCE_BYTES), PROOF_BYTES
            handshake.nonces = received + nonce
            proof = _proof(self._key, "call", own, peer, handshake.nonces)
            self._send(handshake, own.to_bytes(RANK_BYTES, "little") + nonce + proof)
        elif hmac.compare_digest(received, _proof(self._key, "answer", own, peer, handshake.nonces)):
            self._keep(handshake, peer)
        else:
            self._drop(handshake, "a wrong answer, of another program", again=False)

    def _keep(self, handshake: _Handshake, peer: int) -> None:
        self._forget(handshake)
        self.sockets[peer] = handshake.socket
        for other in [other for other in self._handshakes.values() if other.peer == peer]:
            self._drop(other)

    def _forget(self, handshake: _Handshake) -> None:
        self._poll.unregister(handshake.socket)
        del self._handshakes[handshake.socket.fileno()]

    def _drop(self, handshake: _Handshake, why: str = "", again: bool = True) -> None:
        """Close a connection. A called rank is called at its next address, or with `again` once more at this one."""
        self._forget(handshake)
        handshake.socket.close()
        if handshake.peer is None:
            return
        self._due[handshake.peer] = 0.0
        if again and handshake.nonces:
            self._ways[handshake.peer] = itertools.chain([handshake.way], self._ways[handshake.peer])
            self._due[handshake.peer] = time.monotonic() + AGAIN_SECONDS
        elif handshake.way[0] != socket.AF_UNIX:  # it may be in another container
            self._errors[handshake.peer].append(f"{handshake.way[1][0]}: {why}")


def _ways(target: Peer, machine: int) -> Iterator[tuple[int, Any]]:
    """Yield the families and addresses by which a rank on `machine` may reach a peer, the best one first."""
    if target.local and target.machine == machine:
        yield socket.AF_UNIX, f"\0{target.local}"
    if target.machine == machine or not addresses.is_loopback(target.host):
        yield addresses.family(target.host), (target.host, target.port)


def _set_options(connection: socket.socket) -> None:
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
