"""Ranks in different calls raise the same error on all ranks, whoever waits for whom; none waits for ever.

SPARSECOLL_PAIRS=all tries all pairs of calls (`make fuzz`); otherwise a sample of them.

Why no two ranks in different calls wait for ever: the position of a rank is its call and the number of agreements on
arguments in it; it is part of the tag. A rank that waits tells the one for which it waits the tag that it expects.
Follow from a rank that waits for ever to the rank for which it waits, and so on. The path ends at a rank that is in no
call or has failed, which other rules treat, or in a cycle, in which every rank has been told by the one before it. Not
every rank of a cycle can be behind the one that waits for it, so consider a rank B at the position of A, which waits
for B, or beyond it. If B's tag at A's position is not A's, B raises. If it is A's for all such pairs, no B is beyond
its A, since it would have sent what A waits for, or received what A would have sent. So all ranks of the cycle are at
one position of one call with the same arguments: a state that the call also reaches if all ranks make it and the others
are slow. From there it finishes.
"""

import os
import random
import socket
import time

import numpy as np
import pytest
from mismatched import CALLS, CASES, NAMED, bounded, failures, mismatched
from test_tcp import counts, run, together

import sparsecoll
from sparsecoll import CommunicationError, DeadlockError, SparseVector, simulate
from sparsecoll.transport.tags import tag_of
from sparsecoll.transport.tcp import TcpTransport, addresses

SAMPLE = 0 if os.environ.get("SPARSECOLL_PAIRS") == "all" else 100


@pytest.mark.parametrize("P", range(2, 10))
def test_any_two_calls_raise_the_same_error_on_all_ranks(P):
    """Each as the call of each rank while the others make the other one, agreed on before or not."""
    cases = [case for case in CASES if case[0] == P]
    if SAMPLE:
        cases = random.Random(P).sample(cases, SAMPLE)
    assert [found for start in range(0, len(cases), 50) for found in failures(P, cases[start : start + 50])] == []


@pytest.mark.parametrize("P", [2, 3, 5])
def test_sockets_find_what_the_simulator_finds(P, monkeypatch):
    bounded(monkeypatch)
    cases = random.Random(P).sample([case for case in CASES if case[0] == P], 60)
    results = run(P, lambda comm: [mismatched(comm, *case[1:]) for case in cases])
    for case, result in zip(cases, zip(*results, strict=True), strict=True):
        assert result == (result[0],) * P and NAMED.match(str(result[0][0])) and result[0][1] == [P], case


def no_message(comm):
    """Rank 2 waits for rank 1, which waits for rank 2, and rank 0 for one of them; nothing has been sent."""
    x = SparseVector([1], np.ones(1), 10)
    for root in (1, 2):
        sparsecoll.bcast(comm, x, root)
    with pytest.raises(CommunicationError) as caught:
        sparsecoll.bcast(comm, x, 2 if comm.rank == 1 else 1)
    return str(caught.value), sparsecoll.allreduce(comm, x, "allgather", k=1).values.tolist()


def test_ranks_that_have_sent_each_other_nothing_are_told_so(monkeypatch):
    bounded(monkeypatch)
    text = "root: expected the same value on all ranks, got 1 on ranks 0, 2, 2 on rank 1"
    assert simulate(3, no_message).results == run(3, no_message) == [(text, [3.0])] * 3


def test_a_rank_that_is_late_is_no_error(monkeypatch):
    """The others have told it long ago for what they wait; that is not counted."""

    def program(comm, late):
        for number, name in enumerate(name for name in CALLS if "other" not in name):
            if late and number % comm.size == comm.rank:
                time.sleep(0.02)
            CALLS[name](comm)
        return counts(comm.traffic)["total"]

    punctual = run(3, lambda comm: program(comm, late=False))
    bounded(monkeypatch, 0.002)
    assert run(3, lambda comm: program(comm, late=True)) == punctual


@pytest.mark.parametrize("leave", [TcpTransport.close, lambda transport: (transport.leave(), transport.close())])
def test_what_was_told_and_not_read_loses_no_message(leave, monkeypatch):
    """A TCP socket that is closed while something is unread discards what its peer has not received yet."""
    monkeypatch.setattr(addresses, "listen_locally", lambda backlog: (None, ""))  # no Unix domain sockets
    meet, size = together(2), 1_000_000

    def program(transport):
        if transport.rank == 1:
            transport.stalled(lambda: [0], True)
        meet()
        if transport.rank == 0:
            transport._outgoing[1].socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * size)
            transport.isend(1, np.ones(size, np.uint8))
            transport.waitall()
            leave(transport)
        meet()
        return transport.recv(0).sum() if transport.rank == 1 else size

    assert run(2, program) == [size, size]


def test_a_call_is_another_one_only_if_its_numbers_differ():
    def program(comm):
        transport = comm.transport
        sparsecoll.allgather(comm, SparseVector([1], np.ones(1), 10))
        name, agreement, key = transport.history[1]
        assert agreement == name
        tags = {
            (1, name, 0, name): False,
            (1, name, 1, name): False,
            (1, name, 2, key): False,
            (1, name, 2, key + 1): True,  # other arguments
            (1, name + 1, 0, name + 1): True,  # another call
            (1, name, 3, key + 1): False,  # of a second agreement, to which this rank may come
            (2, name, 0, name): False,  # of a call that this rank has not made
        }
        assert {tag: transport.is_in_another_call(tag_of(*tag)) for tag in tags} == tags
        sparsecoll.allgather(comm, SparseVector([1], np.ones(1), 10))
        name, agreement, key = transport.history[2]
        assert agreement == -1 and transport.is_in_another_call(tag_of(2, name, 1, name))  # new arguments there

    simulate(2, program)


def test_a_rank_in_no_call_remains_a_deadlock():
    def program(comm):
        if comm.rank:
            sparsecoll.allreduce(comm, SparseVector([1], np.ones(1), 10))

    with pytest.raises(DeadlockError, match=r"ended: \[0\]"):
        simulate(3, program)
