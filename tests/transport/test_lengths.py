"""Messages that are longer than what a call can hold: refused on all ranks, before there is memory for them."""

from dataclasses import dataclass

import numpy as np
import pytest
from socket_ranks import run

import sparsecoll
from sparsecoll import CommunicationError, Reduction, SparseVector, simulate
from sparsecoll.algorithms.base import Algorithm
from sparsecoll.transport.all_ranks import allgather
from sparsecoll.transport.tags import ERROR_TAG, REPORT_BYTES
from sparsecoll.transport.tcp import connection as connections

HUGE = 1 << 62


@dataclass
class Liar(Algorithm):
    """Rank 1 sends rank 0 a message of `size` bytes, of which there are no more than `sent`."""

    name = "liar"
    semantics = "exact_sum"

    size: int = 0
    sent: int = 0

    def __call__(self, channel, x, k):
        transport = channel.transport
        if channel.rank == 1 and self.size != self.sent:
            transport._outgoing[0].send(transport.tag, self.size, [np.zeros(self.sent, np.uint8)], False)
        elif channel.rank == 1:
            transport.isend(0, np.zeros(self.sent, np.uint8))
        elif channel.rank == 0:
            transport.recv(1)
        allgather(transport, np.zeros(1))  # so that no rank returns before
        return Reduction(x, x)


def caught(comm, size, sent, timeout=None, n=100):
    try:
        sparsecoll.allreduce(
            comm, SparseVector([comm.rank], np.ones(1), n), Liar(size=size, sent=sent), k=1, timeout=timeout
        )
    except CommunicationError as error:
        return str(error)


@pytest.fixture
def taken(monkeypatch):
    """The sizes of the memory for messages."""
    sizes, empty = [], connections.empty
    monkeypatch.setattr(connections, "empty", lambda size, dtype: sizes.append(size) or empty(size, dtype))
    return sizes


def longest(size=3, n=100):
    return size * (sparsecoll.formats.base.MARGIN_BYTES + 4 * n * 16)


@pytest.mark.parametrize("where", ["simulator", "sockets"])
def test_a_longer_message_is_refused_on_all_ranks_which_go_on(where, taken):
    def program(comm):
        texts = [caught(comm, size, size) for size in (longest(), longest() + 1)]
        return texts, sparsecoll.allreduce(comm, {comm.rank: 1.0})

    results = simulate(3, program).results if where == "simulator" else run(3, program)
    for texts, total in results:
        assert texts[0] is None  # as long as the call can hold
        assert texts[1] == f"rank 0: message from rank 1: expected at most {longest()} bytes, got {longest() + 1}"
        assert total == {0: 1.0, 1: 1.0, 2: 1.0}
    assert where == "simulator" or max(taken) == longest()


def test_a_length_that_no_message_has_takes_no_memory(taken):
    """The bytes that follow are those of this message, so that the communicator is out of use."""

    def program(comm):
        return caught(comm, HUGE, 10, timeout=3), caught(comm, 10, 10)

    for rank, (text, later) in enumerate(run(3, program)):
        assert f"message from rank 1: expected at most {longest()} bytes, got {HUGE}" in text or rank > 0
        assert text and "out of use" in later
    assert max(taken) < 10_000


def test_messages_by_which_ranks_agree_have_one_size(taken):
    def program(comm):
        send = connections.Connection.send
        if comm.rank == 1:
            for connection in comm._outgoing:
                connection.send = lambda tag, size, *rest, to=connection: send(to, tag, max(size, HUGE), *rest)
        return caught(comm, 0, 0, timeout=2)

    assert run(2, program)[0]
    assert max(taken, default=0) < 10_000


def test_a_report_of_any_length_is_not_believed(taken):
    def program(comm):
        sparsecoll.allreduce(comm, {0: 1})
        if comm.rank == 1:
            comm._outgoing[0].send(ERROR_TAG, REPORT_BYTES + 1, [np.zeros(9, np.uint8)], False)
        return caught(comm, 10, 10, timeout=2)

    first, _ = run(2, program)
    assert f"rank 0 lost rank 1: it has sent a report of {REPORT_BYTES + 1} bytes" in first
    assert max(taken) < 10_000


def test_a_message_of_another_call_takes_no_memory(taken):
    """It is discarded in pieces."""

    def program(comm):
        x = SparseVector([comm.rank], np.ones(1), 100)
        sparsecoll.allreduce(comm, x, "dense")
        try:
            if comm.rank == 0:
                sparsecoll.allreduce(comm, x, "dense")
            else:
                sparsecoll.bcast(comm, np.ones(1_000_000), root=1)
        except CommunicationError as error:
            return str(error)

    assert all(text and "call: expected the same value" in text for text in run(2, program))
    assert max(taken) < 10_000


def test_long_texts_of_exceptions_are_cut():
    def program(comm):
        try:
            sparsecoll.allreduce(comm, SparseVector([0], np.ones(1), 9), format="x" * (1 << 21))
        except ValueError as error:
            return len(str(error))

    assert all(0 < size < (1 << 20) + 100 for size in run(2, program))
