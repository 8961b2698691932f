"""Who is not of the job and calls at the ports of ranks while they connect: nobody is delayed, and nobody gets in.

`pytest -rP` prints how many came. SPARSECOLL_STRANGERS is the number of connections of each kind (default: 200).
"""

import contextlib
import os
import random
import secrets
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from socket_ranks import Meeting

import sparsecoll
from sparsecoll import CommunicationError
from sparsecoll.transport.tcp import addresses, connect, rendezvous

COUNT = int(os.environ.get("SPARSECOLL_STRANGERS", "200"))
SECRET = "0123456789abcdef" * 2
P = 3
GREETING = rendezvous.RANK_BYTES + rendezvous.NONCE_BYTES + rendezvous.PROOF_BYTES


class Visited(Meeting):
    """Rank 0 goes on when COUNT strangers have come to ranks 1 and 2; more of them come until all are connected."""

    def __init__(self, entries, rank, size, visits):
        super().__init__(entries, rank, size)
        self.visits = visits

    def entries(self):
        found = super().entries()
        if found and self.rank > 0:
            self.visits.begin(self.rank, found)
        if found and self.rank == 0:
            self.visits.came.wait(60)
        return found


class Visits:
    """The strangers of one kind, `kind(visits, family, address, rank)`, which calls once."""

    def __init__(self, kind):
        self.kind, self.count, self.stack = kind, 0, contextlib.ExitStack()
        self.over, self.came, self.lock = threading.Event(), threading.Event(), threading.Lock()
        self.threads, self.found, self.failure = [], None, None

    def begin(self, rank, found):
        self.found = found
        peer = rendezvous._peers(found, rank, SECRET.encode())[rank]
        places = [(socket.AF_INET, (peer.host, peer.port)), (socket.AF_UNIX, f"\0{peer.local}")]
        self.threads += [threading.Thread(target=self._call, args=(*place, rank)) for place in places]
        for thread in self.threads[-2:]:
            thread.start()

    def _call(self, family, address, rank):
        try:
            while not self.over.is_set():
                with contextlib.suppress(OSError):  # the rank has hung up, or is connected and does not listen any more
                    self.kind(self, family, address, rank)
                if self.came.is_set():
                    time.sleep(0.001)
        except Exception as error:
            self.failure = error

    def open(self, family, address, keep=False):
        """A connection, which stays if `keep`."""
        stranger = socket.socket(family)
        if keep:
            self.stack.enter_context(stranger)
        stranger.settimeout(5)
        stranger.connect(address)
        with self.lock:
            self.count += 1
        if self.count >= COUNT:
            self.came.set()
        return stranger


def silent(visits, family, address, rank):
    if visits.count < 2 * COUNT:
        visits.open(family, address, keep=True)


def slow(visits, family, address, rank):
    """One byte now and then."""
    if visits.count < 2 * COUNT:
        stranger = visits.open(family, address, keep=True)
        for _ in range(3):
            stranger.send(b"x")


def garbage(visits, family, address, rank):
    with visits.open(family, address) as stranger:
        stranger.sendall(random.choice([b"GET / HTTP/1.1\r\n\r\n", secrets.token_bytes(random.randrange(1, 200))]))


def scanner(visits, family, address, rank):
    """Connects, and closes or resets."""
    with visits.open(family, address) as stranger:
        if random.random() < 0.5:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def half(visits, family, address, rank):
    """Takes the nonce, and greets in part."""
    with visits.open(family, address) as stranger:
        stranger.recv(rendezvous.NONCE_BYTES)
        stranger.sendall(bytes(random.randrange(1, GREETING)))


def greet(stranger, key, caller, rank):
    """Do as a rank does; return what it answers."""
    challenge = stranger.recv(rendezvous.NONCE_BYTES)
    nonce = secrets.token_bytes(rendezvous.NONCE_BYTES)
    proof = rendezvous._proof(key, "call", caller, rank, challenge + nonce)
    stranger.sendall(caller.to_bytes(rendezvous.RANK_BYTES, "little") + nonce + proof)
    return stranger.recv(rendezvous.PROOF_BYTES)


def ignorant(visits, family, address, rank):
    """Has read what the ranks have left for each other, but has another secret, or none."""
    secret = random.choice([b"", b"fedcba9876543210"])
    with visits.open(family, address) as stranger:
        key = rendezvous._proof(secret, "key", *visits.found)
        assert greet(stranger, key, random.choice([0, 1, 2, 3, 2**32 - 1]), rank) == b""


KINDS = [silent, slow, garbage, scanner, half, ignorant]


def connected(meeting, secret=SECRET, size=P):
    """Whether ranks that meet there are connected and their sum is right."""

    def program(rank):
        comm = connect(meeting(rank), 60, secret)
        try:
            return sparsecoll.allreduce(comm, np.full(4, 10.0**rank), "dense", timeout=60).values.tolist()
        finally:
            comm.close("the test is over")

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(program, range(size))) == [[sum(10.0**rank for rank in range(size))] * 4] * size


@pytest.mark.parametrize("kind", KINDS)
def test_strangers_neither_delay_nor_break_ranks(kind):
    visits, entries = Visits(kind), {}
    began = time.monotonic()
    with visits.stack:
        try:
            assert connected(lambda rank: Visited(entries, rank, P, visits))
        finally:
            visits.over.set()
            for thread in visits.threads:
                thread.join(60)
    assert visits.failure is None and visits.count >= COUNT
    assert time.monotonic() - began < 50
    print(f"{kind.__name__}: {visits.count} connections of strangers")


def test_a_recorded_greeting_is_refused(monkeypatch):
    """It answers the nonce of one connection only; and the rank that it is from is not locked out."""
    entries, ways, answers = {}, rendezvous._ways, []
    monkeypatch.setattr(rendezvous, "TICK_SECONDS", 5.0)  # before the rank is called directly
    monkeypatch.setattr(addresses, "listen_locally", lambda backlog: (None, ""))
    relay = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setattr(rendezvous, "_ways", lambda *given: iter([(2, relay.getsockname()), *ways(*given)]))

    def attack():
        """Pass the nonce of rank 1 on, keep the greeting, and send it by another connection."""
        with relay, relay.accept()[0] as caller:
            peer = rendezvous._peers([entries[0], entries[1]], 0, SECRET.encode())[1]
            place = peer.host, peer.port
            with socket.create_connection(place) as rank, socket.create_connection(place) as replay:
                caller.sendall(rank.recv(rendezvous.NONCE_BYTES))
                greeting = caller.recv(GREETING)
                replay.recv(rendezvous.NONCE_BYTES)
                replay.sendall(greeting)
                answers.append(replay.recv(rendezvous.PROOF_BYTES))
                answers.append(len(greeting))

    attacking = threading.Thread(target=attack)
    attacking.start()
    assert connected(lambda rank: Meeting(entries, rank, 2), size=2)
    attacking.join(60)
    assert answers == [b"", GREETING]


@pytest.mark.parametrize(
    "given", [[SECRET, "another secret: 0123"], [SECRET, None], [None, SECRET], [None, SECRET, None]]
)
def test_ranks_with_different_secrets_say_so(given, monkeypatch):
    monkeypatch.delenv(rendezvous.SECRET, raising=False)
    entries = {}

    def program(rank):
        try:
            connect(Meeting(entries, rank, len(given)), 60, given[rank])
        except CommunicationError as error:
            return str(error)

    with ThreadPoolExecutor(len(given)) as pool:
        texts = list(pool.map(program, range(len(given))))
    text = "SPARSECOLL_SECRET: expected the same secret on all ranks, got another one, or none, on rank "
    assert all(found.startswith(text) for found in texts), texts
    assert not any(secret and secret in found for found in texts for secret in given)


def test_the_secret_is_that_of_the_environment_and_is_never_sent(monkeypatch):
    monkeypatch.setenv(rendezvous.SECRET, SECRET)
    sent, send = [], rendezvous._Party._send
    monkeypatch.setattr(
        rendezvous._Party, "_send", lambda party, one, said: sent.append(said) or send(party, one, said)
    )
    entries, left = {}, []

    class Noted(Meeting):
        def put(self, entry):
            left.append(entry)
            super().put(entry)

    assert connected(lambda rank: Noted(entries, rank, P), secret=None)
    said = b"".join([*sent, *(entry.encode() for entry in left)])
    assert len(sent) == 3 * P and SECRET.encode() not in said and SECRET.encode().hex().encode() not in said
    assert not any(
        rendezvous._proof(b"", "entry", rank, entry[64:].encode()).hex() == entry[:64]
        for rank, entry in enumerate(left)
    )


@pytest.mark.parametrize("secret", ["", "short", b"123456789012345"])
def test_short_secrets_are_refused(secret, monkeypatch):
    with pytest.raises(CommunicationError, match="rank 0: SPARSECOLL_SECRET: expected at least 16 bytes, got"):
        connect(Meeting({}, 0, 1), secret=secret)
    monkeypatch.setenv(rendezvous.SECRET, "short")
    with pytest.raises(CommunicationError, match="expected at least 16 bytes, got 5"):
        connect(Meeting({}, 0, 1))


def listen_for_few(monkeypatch, limit):
    """Let each rank have no descriptor after `limit` callers, again and again; return the list of these errors."""
    errors, listen = [], addresses.listen

    class Few(socket.socket):
        left = limit

        def accept(self):
            if self.left == 0:
                self.left = limit
                errors.append(OSError(24, "Too many open files"))
                raise errors[-1]
            self.left -= 1
            return super().accept()

    def few(backlog):
        server, host = listen(backlog)
        return Few(server.family, server.type, fileno=server.detach()), host

    monkeypatch.setattr(addresses, "listen", few)
    return errors


def test_a_rank_without_descriptors_for_strangers_goes_on(monkeypatch):
    """Those that have called have to go."""
    visits, entries = Visits(silent), {}
    refused = listen_for_few(monkeypatch, 30)
    monkeypatch.setattr(addresses, "listen_locally", lambda backlog: (None, ""))
    with visits.stack:
        try:
            assert connected(lambda rank: Visited(entries, rank, P, visits))
        finally:
            visits.over.set()
            for thread in visits.threads:
                thread.join(60)
    assert refused


def test_all_ranks_learn_why_one_is_not_connected(monkeypatch):
    """Those that it has refused since do not give that as the reason."""
    entries = {}
    listen_for_few(monkeypatch, 0)
    monkeypatch.setattr(addresses, "listen_locally", lambda backlog: (None, ""))

    class Slow(Meeting):
        def fail(self, why):
            time.sleep(0.5 if self.rank == 1 else 0)
            super().fail(why)

    def program(rank):
        with pytest.raises(CommunicationError) as caught:
            connect(Slow(entries, rank, 2), 60, SECRET)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(program, range(2))) == ["rank 1: [Errno 24] Too many open files"] * 2


def test_ranks_listen_at_the_interface_of_the_route_only(monkeypatch):
    for name in addresses.INTERFACES:
        monkeypatch.delenv(name, raising=False)
    for master in (None, "localhost", "127.0.0.1", "::1", socket.gethostname(), "192.0.2.1", "no-such-host.invalid"):
        monkeypatch.delenv("MASTER_ADDR", raising=False)
        if master:
            monkeypatch.setenv("MASTER_ADDR", master)
        server, host = addresses.listen(1)
        with server:
            bound, port = server.getsockname()[:2]
            assert bound == host and host not in ("", "0.0.0.0", "::")
            if master in ("localhost", "127.0.0.1", "::1"):
                assert addresses.is_loopback(host)
            elif not addresses.is_loopback(host):
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.1", port), 5)


def test_a_master_whose_name_is_a_loopback_address_here_listens_at_the_default_route(monkeypatch):
    """As on hosts whose file of names says 127.0.1.1."""
    monkeypatch.setenv("MASTER_ADDR", "this-host.example")
    known = {"this-host.example": "127.0.1.1", addresses.ELSEWHERE: "10.1.2.3"}
    monkeypatch.setattr(addresses, "route_to", known.get)
    monkeypatch.setattr(socket, "create_server", lambda address, **options: address)
    assert addresses.listen(1) == (("10.1.2.3", 0), "10.1.2.3")
    known[addresses.ELSEWHERE] = ""
    assert addresses.listen(1) == (("127.0.0.1", 0), "127.0.0.1")
