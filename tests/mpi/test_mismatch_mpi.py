"""Ranks in different calls, over MPI or sockets: the same error on all ranks, and the communicator stays usable."""

import random
import time

import numpy as np
import pytest
from mismatched import CALLS, CASES, NAMED, bounded, mismatched, ordinary

import sparsecoll
from sparsecoll import SparseVector
from sparsecoll.transport import as_transport
from sparsecoll.transport.tags import tag_of

pytestmark = pytest.mark.mpi


def test_any_two_calls_raise_the_same_error_on_all_ranks(comm, monkeypatch):
    """A sample of what the simulator tries."""
    P = comm.size
    if not 2 <= P < 10:
        pytest.skip("2 to 9 ranks")
    bounded(monkeypatch)
    results = [
        (case, mismatched(comm, *case[1:]))
        for case in random.Random(P).sample([case for case in CASES if case[0] == P], 240 // P)
    ]
    for (case, result), *others in zip(*comm.allgather(results), strict=True):
        assert others == [(case, result)] * (P - 1)
        assert NAMED.match(str(result[0])) and result[1] == [P], case


def test_ranks_that_have_sent_each_other_nothing_are_told_so(comm, monkeypatch):
    if comm.size < 3:
        pytest.skip("at least 3 ranks")
    bounded(monkeypatch)
    x = SparseVector([1], np.ones(1), 10)
    for root in (1, 2):
        sparsecoll.bcast(comm, x, root)
    with pytest.raises(sparsecoll.CommunicationError, match="root: expected the same value on all ranks, got 1 on"):
        sparsecoll.bcast(comm, x, 2 if comm.rank == 1 else 1)
        sparsecoll.allreduce(comm, x)
    assert ordinary(comm) == [comm.size]


def test_a_rank_that_is_late_is_no_error(comm, monkeypatch):
    if comm.size < 2:
        pytest.skip("at least 2 ranks")
    bounded(monkeypatch, 0.002)
    for number, name in enumerate(name for name in CALLS if "other" not in name):
        if number % comm.size == comm.rank:
            time.sleep(0.02)
        CALLS[name](comm)
    assert ordinary(comm) == [comm.size]


def test_what_was_told_on_a_communicator_that_was_freed_is_no_error(comm, mpi):
    """MPI may give a new communicator the messages that were left on it."""
    for _ in range(20):
        made = comm.Dup()
        assert ordinary(made) == [comm.size]
        transport = as_transport(made)
        other = tag_of(1, 0, 0, 0)  # of another call than the one that all have made
        transport._notify((comm.rank + 1) % comm.size, np.array([transport.serial, other]).view(np.uint8))
        comm.Barrier()
        made.Free()
