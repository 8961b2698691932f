"""TcpTransport: ranks as threads of one process, each with sockets of its own."""

import asyncio
import gc
import os
import re
import socket
import threading
import time

import numpy as np
import pytest
from cases import DISTRIBUTIONS, case, same_bits
from failing import algorithm, fail_at, refused_in_a_fork, unpatch
from socket_ranks import run, together

import sparsecoll
from sparsecoll import ALGORITHMS, CommunicationError, OkTopk, SparseVector, simulate
from sparsecoll.transport import process, waiting
from sparsecoll.transport.tags import CallMismatch
from sparsecoll.transport.tcp import transport as tcp


def counts(traffic):
    return {
        name: (c.bytes_sent, c.bytes_received, c.messages_sent, c.messages_received)
        for name, c in {**traffic.phases, "total": traffic.total}.items()
        if c.messages_sent or c.messages_received
    }


@pytest.mark.parametrize("P", [1, 2, 3])
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_same_bits_and_same_bytes_as_the_simulator(algo, P):
    def program(comm):
        chosen = algorithm(algo)
        made = []
        for name in DISTRIBUTIONS:
            x = case(name, comm.rank, P)
            made.append(sparsecoll.allreduce(comm, x, chosen, return_reduction=True))
        return made

    inside = P if algo == "hierarchical" else 1
    theirs = simulate(P, program, ranks_per_node=inside).results
    for mine, simulated in zip(run(P, program), theirs, strict=True):
        for a, b in zip(mine, simulated, strict=True):
            assert same_bits(a.value, b.value) and same_bits(a.contributed, b.contributed)
            assert counts(a.traffic) == counts(b.traffic)


def test_background_calls_and_thresholds_equal_the_simulator():
    def program(comm):
        algorithm, rng = OkTopk(tau_prime=3), np.random.default_rng(comm.rank)
        xs = [rng.standard_normal(5000).astype(np.float32) for _ in range(8)]
        requests = [sparsecoll.iallreduce(comm, x, algorithm, density=0.02) for x in xs]
        return [request.wait() for request in requests] + [sparsecoll.allreduce(comm, xs[0], "sparcml", k=50)]

    for mine, theirs in zip(run(3, program), simulate(3, program).results, strict=True):
        assert all(map(same_bits, mine, theirs))


@pytest.mark.parametrize("chunk", [1, 7, 1000, None])
def test_messages_of_any_size_in_order_and_to_oneself(chunk, monkeypatch):
    """All ranks send everything first; sockets take a part of it."""
    monkeypatch.setattr(waiting, "STALL_SECONDS", 60.0)  # a notice in parts of a byte might meet the end of a rank
    sizes = [0, 1, 10, 11, 5000, 3_000_000 if chunk is None else 20_000, 0]

    def program(transport):
        transport.chunk, rank = chunk or transport.chunk, transport.rank
        messages = [np.full(size, size % 251 + rank, np.uint8) for size in sizes]
        for peer in range(transport.size):
            for message in messages:
                transport.isend(peer, message)
        into, right = np.zeros(5000, np.uint8), []
        for peer in range(transport.size):
            requests = [transport.irecv(peer, into if size == 5000 else None) for size in sizes]
            received = [request.wait() for request in reversed(requests)][::-1]
            right += [
                bool((m == size % 251 + peer).all() and m.size == size) for m, size in zip(received, sizes, strict=True)
            ]
            right.append(received[4] is into)
        transport.waitall()
        return all(right) and transport.traffic.total.bytes_received == transport.size * sum(sizes)

    assert run(3, program) == [True] * 3


def test_a_message_of_two_chunks_of_the_kernel(monkeypatch):
    """2 GiB and more: a system call takes less than that at once."""
    if os.environ.get("SPARSECOLL_LARGE") != "1":
        pytest.skip("6 GB of memory: SPARSECOLL_LARGE=1")

    def program(transport):
        size = (2 << 30) + 12345
        if transport.rank == 0:
            message = np.zeros(size, np.uint8)
            message[[0, 2**31, -1]] = 1, 2, 3
            transport.isend(1, message)
            transport.waitall()
            return [1, 2, 3, size]
        message = transport.recv(0)
        return [*message[[0, 2**31, -1]].tolist(), message.size]

    a, b = run(2, program)
    assert a == b


def test_a_message_of_another_call_is_not_taken_for_data():
    def program(transport):
        transport.tag += transport.rank
        transport.isend(1 - transport.rank, np.ones(3, np.uint8))
        try:
            transport.recv(1 - transport.rank)
        except CallMismatch as error:
            return str(error)

    assert run(2, program) == ["rank 1 is in another call", "rank 0 is in another call"]


def test_different_arguments_and_failures_are_raised_on_all_ranks_and_it_stays_usable():
    def program(comm):
        texts = []
        for length in (9 + (comm.rank == 2), 9, 9):
            try:
                x = SparseVector([1], np.array([np.nan if len(texts) == 1 and comm.rank == 1 else 1.0]), length)
                texts.append(sparsecoll.allreduce(comm, x).values.tolist())
            except (CommunicationError, ValueError) as error:
                texts.append(str(error))
        return texts

    first, *others = run(3, program)
    assert others == [first, first]
    assert first[0] == "length: expected the same value on all ranks, got 9 on ranks 0, 1, 10 on rank 2"
    assert first[1].startswith("rank 1: x: expected finite values") and first[2] == [3.0]


def test_a_failure_while_large_messages_are_under_way():
    """Nobody takes them; they are discarded, and the next call is right."""

    def program(comm):
        dense, texts = np.ones(2_000_000, np.float32), []
        for _ in range(2):
            if comm.rank == 2:
                fail_at(comm, "isend", 2)
            try:
                sparsecoll.allreduce(comm, dense, "dense", timeout=60)
                sparsecoll.allreduce(comm, dense, "dense", timeout=60)  # who had finished hears of it here
            except CommunicationError as error:
                texts.append(str(error))
            unpatch(comm, "isend")
        y = sparsecoll.allreduce(comm, dense, "dense", timeout=60)
        return texts, bool((y.values == 3).all()), len(comm._sends)

    for texts, right, sending in run(3, program):
        assert texts == ["rank 2 failed: Fault: isend 2"] * 2 and right and sending == 0


def leave(transport):
    """As the kernel does when a process is killed."""
    for connection in transport._connections.values():
        connection.socket.close()


def test_a_lost_rank_is_named_at_once_on_all_ranks_and_the_communicator_is_out_of_use():
    wait = together(3)

    def program(transport):
        x = SparseVector([transport.rank], np.ones(1), 9)
        sparsecoll.allreduce(transport, x)
        wait()
        if transport.rank == 2:
            leave(transport)
            return None
        start, texts = time.monotonic(), []
        for _ in range(2):
            with pytest.raises(CommunicationError) as raised:
                sparsecoll.allreduce(transport, x)
            texts.append(str(raised.value))
        wait_for_all.wait()
        return texts, time.monotonic() - start

    wait_for_all = threading.Barrier(2, timeout=60)
    *others, _ = run(3, program)
    for texts, seconds in others:
        assert "lost rank 2: " in texts[0] and seconds < 10
        assert texts[1].startswith("communicator is out of use since rank") and "new_group" in texts[1]


def test_a_timeout_names_the_rank_and_ends_the_call_on_all_ranks():
    late = threading.Event()

    def program(transport):
        x = SparseVector([transport.rank], np.ones(1), 9)
        sparsecoll.allreduce(transport, x, "sparcml")
        if transport.rank == 2:
            late.wait(60)
        try:
            return sparsecoll.allreduce(transport, x, "sparcml", timeout=0.5 if transport.rank == 0 else 60)
        except CommunicationError as error:
            late.set()
            return str(error)

    texts = run(3, program)
    assert set(texts) == {"rank 0 waits for a message of rank 2 for 0.5 s: no answer within the timeout"}


def test_sends_that_nobody_takes_are_named():
    wait = together(2)

    def program(transport):
        transport.timeout = 0.5
        if transport.rank == 1:
            wait()
            return None
        transport.isend(1, np.ones(20_000_000, np.uint8))
        with pytest.raises(CommunicationError, match="waits for its own sends to rank 1 to complete"):
            transport.waitall()
        transport.revoke(np.ones(3, np.uint8))
        wait()
        return None

    assert run(2, program) == [None, None]


def test_a_forked_process_holds_no_connection(monkeypatch):
    """Otherwise peers would not notice the end of its parent."""

    def program(transport):
        if transport.rank == 0:
            child = os.fork()
            if child == 0:
                os._exit(0 if transport.broken and transport._outgoing[1].socket.fileno() == -1 else 1)
            return os.waitpid(child, 0)[1]
        return 0

    assert run(2, program) == [0, 0]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_fork_while_another_thread_makes_a_transport_raises_nothing(monkeypatch):
    """An exception would keep the child from closing its copies of the other connections."""
    failures, pair, children = [], socket.socketpair, []

    def forking():
        children.append(os.fork())
        if children[0] == 0:
            os._exit(len(failures))
        return pair()

    monkeypatch.setattr("sys.unraisablehook", failures.append)
    monkeypatch.setattr(tcp.socket, "socketpair", forking)
    tcp.TcpTransport(0, {}, [0]).close("the test is over")
    assert os.waitpid(children[0], 0)[1] == 0


@pytest.mark.parametrize("nonblocking", [False, True])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_call_in_a_forked_process_is_refused_at_once(nonblocking):
    """Also if its parent has a worker, whose thread it has not; the parent goes on."""

    def program(transport):
        x = SparseVector([transport.rank], np.ones(1), 9)
        call = sparsecoll.iallreduce if nonblocking else sparsecoll.allreduce
        first = call(transport, x)
        if nonblocking:
            first.wait()
        calls = [lambda: sparsecoll.allreduce(transport, x), lambda: sparsecoll.iallreduce(transport, x).wait()]
        refused = transport.rank == 1 or refused_in_a_fork(*calls)
        return refused, sparsecoll.allreduce(transport, x).nnz

    assert run(2, program) == [(True, 2)] * 2


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_process_is_refused_to_wait_for_a_call_of_its_parent():
    """It has no thread that could finish the call; what has finished can be read."""

    async def awaited(request):
        return await request

    def program(transport):
        x = SparseVector([transport.rank], np.ones(1), 9)
        finished = sparsecoll.iallreduce(transport, x)
        finished.wait()
        if transport.rank == 0:
            forked.wait(60)
            return sparsecoll.iallreduce(transport, x).wait().nnz
        request = sparsecoll.iallreduce(transport, x)
        waits = [request.wait, request.test, lambda: sparsecoll.Request.waitall([finished, request])]
        assert refused_in_a_fork(*waits, lambda: asyncio.run(awaited(request)))
        assert not refused_in_a_fork(finished.wait)
        forked.set()
        return request.wait().nnz

    forked = threading.Event()
    assert run(2, program) == [2, 2]


def test_a_wait_is_logged(monkeypatch, caplog):
    monkeypatch.setattr("sparsecoll.transport.waiting.WATCHDOG_SECONDS", 0.1)
    late = threading.Event()

    def program(transport):
        if transport.rank == 1:
            late.wait(60)
            transport.isend(0, np.ones(1, np.uint8))
            return None
        transport.irecv(1).wait()
        return None

    def logged():
        end = time.monotonic() + 60
        while time.monotonic() < end and "rank 0 waits for a message of rank 1" not in caplog.text:
            time.sleep(0.01)
        late.set()

    threading.Thread(target=logged).start()
    with caplog.at_level("WARNING"):
        assert run(2, program) == [None, None]
    assert re.search(r"rank 0 waits for a message of rank 1, \d+ s so far", caplog.text)


def test_nothing_is_left_behind():
    earlier = list(process.living())  # of other tests, kept until the end
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        run(3, lambda transport: sparsecoll.iallreduce(transport, np.ones(9), "dense").wait())
    assert len(os.listdir("/proc/self/fd")) == before
    own = [t for t in process.living() if isinstance(t, tcp.TcpTransport) and t not in earlier]
    assert all(t.broken for t in own)


def test_calls_after_an_interrupted_one_and_close_say_that_it_is_out_of_use():
    """They raised that a file descriptor is negative."""
    received = together(2)

    def program(transport):
        if transport.rank == 0:
            transport.irecv(1)
            transport.interrupt("allreduce was interrupted on rank 0")
            transport.close()
            with pytest.raises(CommunicationError, match="interrupted on rank 0"):
                sparsecoll.allreduce(transport, SparseVector([0], np.ones(1), 4))
        received()

    assert run(2, program) == [None, None]
