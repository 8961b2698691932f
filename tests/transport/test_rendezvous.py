"""How ranks find and connect each other by sockets, also beside strangers, slow ranks and addresses that are no use."""

import contextlib
import gc
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from socket_ranks import Meeting, run

import sparsecoll
from sparsecoll import CommunicationError
from sparsecoll.transport.launcher import machine
from sparsecoll.transport.tcp import addresses, connect, rendezvous


def test_ranks_that_do_not_come_are_given_up_and_told():
    entries, results = {}, []
    for rank, timeout in ((0, 0.3), (1, None)):
        with pytest.raises(CommunicationError) as raised:
            connect(Meeting(entries, rank, 3), timeout)
        results.append(str(raised.value))
    calls = "waits for all ranks to make their first call on the communicator"
    assert results[0].startswith(f"rank 0 {calls} (absent: 1, 2) for 0.3 s")
    assert results[1] == results[0]


def peer_of(host, port, number=None):
    return rendezvous.Peer(host, port, "00" * 16, machine() if number is None else number)


def beside(peer):
    """The meeting of rank 0 with a rank 1 that has left this and does nothing else."""
    return Meeting({1: peer.entry(1, b"")}, 0, 2)


def test_impostors_are_refused():
    """Who listens at the address of a rank, and does not know what the ranks know."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        answering = threading.Thread(target=lambda: impostor.accept()[0].sendall(b"hello, I am rank 1. " * 3))
        answering.start()
        with pytest.raises(CommunicationError, match=r"rank 0 cannot connect to rank 1 .*: a wrong answer"):
            connect(beside(peer_of("127.0.0.1", impostor.getsockname()[1])), 10)
        answering.join()


def test_a_rank_that_cannot_be_reached_is_told_to_all(monkeypatch):
    meeting = beside(peer_of("127.0.0.1", 1))
    with pytest.raises(CommunicationError, match=r"rank 0 cannot connect to rank 1 \(127.0.0.1: .*GLOO_SOCKET_IFNAME"):
        connect(meeting)
    assert meeting.failed().startswith("rank 0 cannot connect to rank 1")
    with pytest.raises(CommunicationError, match="it has no address that this host can use"):
        connect(beside(peer_of("127.0.0.1", 1, machine() + 1)))


@pytest.mark.parametrize("entry", ["", "{}", "x" * 70, 3])
def test_an_entry_that_no_rank_has_left_is_refused(entry):
    meeting = Meeting({1: entry}, 0, 2)
    with pytest.raises(CommunicationError, match=r"another one, or none, on rank 1|rank 0: TypeError"):
        connect(meeting)
    assert meeting.failed()


@pytest.mark.parametrize("master", [None, "localhost", "127.0.0.1", "::1", socket.gethostname(), "192.0.2.1"])
def test_ranks_meet_at_any_address_of_the_master(monkeypatch, master):
    monkeypatch.setattr(addresses, "listen_locally", lambda backlog: (None, ""))
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    if master:
        monkeypatch.setenv("MASTER_ADDR", master)
    assert run(2, lambda transport: sparsecoll.allreduce(transport, np.ones(1), "dense").values.tolist()) == [
        [2.0],
        [2.0],
    ]


def families(transport):
    return {connection.socket.family for connection in transport._outgoing if connection.peer != transport.rank}


def test_ranks_on_one_machine_use_unix_sockets_where_they_can(monkeypatch):
    """Not those of other machines, nor of a container that does not share the name."""
    assert run(3, families) == [{socket.AF_UNIX}] * 3
    listen = addresses.listen_locally
    monkeypatch.setattr(addresses, "listen_locally", lambda backlog: (listen(backlog)[0], "sparsecoll-elsewhere"))
    assert all(socket.AF_UNIX not in found for found in run(2, families))
    monkeypatch.undo()
    machines = iter(range(2))
    monkeypatch.setattr(rendezvous, "machine", lambda: next(machines))
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    assert all(isinstance(found, CommunicationError) or socket.AF_UNIX not in found for found in run(2, families))


def test_ranks_listen_at_the_interface_that_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with addresses.listen(1)[0] as server:
        assert server.getsockname()[0] == "127.0.0.1"
    assert addresses._ipv6("lo") in ("::1", "") and addresses.interface_address("X", "lo") == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing0")
    text = "GLOO_SOCKET_IFNAME: expected a network interface with an address, got 'nothing0' among .*lo"
    with pytest.raises(CommunicationError, match=text):
        connect(Meeting({}, 0, 1))


def connected(made):
    """Whether two transports are connected with each other; closes them."""
    made[0].isend(1, np.arange(5, dtype=np.uint8))
    same = made[1].recv(0).tolist() == [0, 1, 2, 3, 4]
    for transport in made:
        transport.close("the test is over")
    return same


def both(meeting, timeout=None):
    """Two ranks that meet; `meeting(entries, rank, 2)` makes each one's meeting."""
    entries = {}
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: connect(meeting(entries, rank, 2), timeout), range(2)))


@pytest.mark.parametrize("count", [1, rendezvous.STRANGERS + 20])
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX], ids=["TCP", "Unix"])
def test_silent_strangers_delay_nobody(family, count):
    """They come first, and stay; one of them sends a byte now and then."""
    with contextlib.ExitStack() as strangers:

        class Visited(Meeting):
            def entries(self):
                found = super().entries()
                if found and self.rank == 1:
                    peer = rendezvous._peers(found, 1, b"")[1]
                    address = ("127.0.0.1", peer.port) if family == socket.AF_INET else f"\0{peer.local}"
                    for _ in range(count):
                        stranger = strangers.enter_context(socket.socket(family))
                        stranger.setblocking(False)
                        stranger.connect_ex(address)
                    with contextlib.suppress(OSError):
                        stranger.send(b"x")
                return found

        began = time.monotonic()
        assert connected(both(Visited, 60))
    assert time.monotonic() - began < 15


@pytest.fixture
def hole():
    """A port of this machine that answers nothing: its queue is full."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(64):
            caller = stack.enter_context(socket.socket())
            caller.settimeout(0.2)
            try:
                caller.connect(server.getsockname())
            except TimeoutError:
                yield server.getsockname()
                return
        pytest.skip("every connection is accepted here")


def ways_with(monkeypatch, *first):
    """Let ranks try these addresses before all others."""
    ways = rendezvous._ways
    monkeypatch.setattr(
        rendezvous, "_ways", lambda *given: iter([*((socket.AF_INET, place) for place in first), *ways(*given)])
    )


def test_addresses_that_swallow_packets_are_not_waited_for(hole, monkeypatch):
    ways_with(monkeypatch, hole, hole, hole)
    began = time.monotonic()
    assert connected(both(Meeting))
    assert time.monotonic() - began < 15


def test_the_timeout_holds_while_ranks_connect(hole, monkeypatch):
    monkeypatch.setattr(rendezvous, "_ways", lambda *given: iter([(socket.AF_INET, hole)] * 2))
    meeting = beside(peer_of("127.0.0.1", 1))
    began = time.monotonic()
    with pytest.raises(CommunicationError, match=r"for 1 s: no answer within the timeout"):
        connect(meeting, 1)
    assert time.monotonic() - began < 10 and "no answer within the timeout" in meeting.failed()


def test_a_program_that_listens_at_an_address_of_a_rank_and_is_silent(monkeypatch):
    monkeypatch.setattr(rendezvous, "ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ways_with(monkeypatch, silent.getsockname())
        assert connected(both(Meeting))


def test_a_rank_that_is_stopped_while_ranks_connect_is_waited_for(monkeypatch):
    """Its kernel accepts connections meanwhile, but nobody answers; all its addresses are tried."""
    monkeypatch.setattr(rendezvous, "ANSWER_SECONDS", 0.1)

    class Stopped(Meeting):
        def entries(self):
            found = super().entries()
            if found and self.rank == 1:
                time.sleep(2)
            return found

    assert connected(both(Stopped))


def test_the_failure_of_another_rank_is_seen_while_its_answer_is_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        meeting = beside(peer_of(*silent.getsockname()))
        threading.Timer(0.5, meeting.fail, ["rank 1: no descriptors"]).start()
        with pytest.raises(CommunicationError, match="rank 1: no descriptors"):
            connect(meeting)


def test_nothing_of_a_connection_that_fails_is_left():
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    silent, unanswered = socket.create_server(("127.0.0.1", 0)), "no answer within the timeout"
    with silent, pytest.raises(CommunicationError, match=unanswered):
        connect(beside(peer_of(*silent.getsockname())), 0.3)
    assert len(os.listdir("/proc/self/fd")) == before
