"""Failures between messages, over MPI: heard by all, and the communicator stays usable."""

import contextlib
import os

import numpy as np
import pytest
from cases import case
from failing import EXACT, K, algorithm, fail_at, unpatch
from oracles import oracle

import sparsecoll
from sparsecoll import ALGORITHMS, CommunicationError, SparseVector
from sparsecoll.algorithms import as_algorithm
from sparsecoll.transport import as_transport

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize(("name", "chunk"), [*((name, None) for name in ALGORITHMS), ("allgather", 64), ("oktopk", 64)])
def test_a_rank_that_fails_between_messages_is_heard_by_all(comm, name, chunk):
    """As on the simulator; with chunks a message may be half here when its sender fails."""
    P, transport = comm.size, as_transport(comm)
    before = transport.chunk
    transport.chunk = chunk or before
    expected = oracle([case("random", rank, P) for rank in range(P)], "oktopk" if name == "hierarchical" else name, K)
    x, heard = case("random", comm.rank, P), 0
    try:
        for turn, (method, number) in enumerate((m, n) for m in ("isend", "irecv") for n in (1, 2, 3)):
            algo, culprit, text = as_algorithm(algorithm(name)), turn % P, None
            if comm.rank == culprit:
                fail_at(transport, method, number)
            try:
                sparsecoll.allreduce(comm, x, algo, k=K, timeout=60)
                if comm.rank == culprit:
                    unpatch(transport, method)
                sparsecoll.allreduce(comm, x, algo, k=K, timeout=60)  # who had finished hears of it here
            except CommunicationError as error:
                text = str(error)
            unpatch(transport, method)
            assert len(set(comm.allgather(text))) == 1
            assert text in (None, f"rank {culprit} failed: Fault: {method} {number}")
            heard += text is not None
            if text is None:  # Ok-Topk may go on with its thresholds, which may leave out the smallest entry
                algo.reset()
            y = sparsecoll.allreduce(comm, x, algo, k=K, timeout=60)
            np.testing.assert_array_equal(y.to_dense(), expected)
        assert heard or P == 1
    finally:
        transport.chunk = before


@pytest.mark.parametrize("name", ["cltk", "oktopk"])
@pytest.mark.parametrize("known", [False, True])
def test_objects_whose_state_differs_are_refused_on_all_ranks(comm, name, known):
    """They waited for each other, or returned wrong sums."""
    if comm.size == 1:
        pytest.skip("one rank has one state")
    last = comm.size - 1
    comm, part = comm.Dup(), comm.Split(comm.rank == last, comm.rank)
    x, algo = case("random", comm.rank, comm.size), as_algorithm(name)
    if known:
        sparsecoll.allreduce(comm, x, name, k=K)
    for _ in range(1 + (comm.rank == last)):
        sparsecoll.allreduce(part, x, algo, k=K)
    with pytest.raises(CommunicationError, match=f"2 on rank {last}; use one object per communicator") as caught:
        sparsecoll.allreduce(comm, x, algo, k=K, timeout=60)
    assert len(set(comm.allgather(str(caught.value)))) == 1
    sums = comm.allgather(sparsecoll.allreduce(comm, x, algo, k=K, timeout=60).to_dense().tobytes())
    assert sums == [sums[0]] * comm.size
    part.Free()
    comm.Free()


@pytest.mark.parametrize("name", ["cltk", "oktopk"])
def test_states_that_calls_have_left_are_told_apart(comm, name):
    """One rank has loaded the checkpoint of another step than the others."""
    if comm.size == 1:
        pytest.skip("one rank has one state")
    comm = comm.Dup()
    x, algo = case("random", comm.rank, comm.size), as_algorithm(name)
    for turn, (one, others) in enumerate([(0, 1), (1, 0), (1, 2), (2, 1), (2, 0), (0, 2)]):
        states = [(sparsecoll.allreduce(comm, x, algo, k=K, timeout=60), algo.state_dict())[1] for _ in range(3)]
        algo.load_state_dict(states[one if comm.rank == turn % comm.size else others])
        with pytest.raises(CommunicationError, match="calls that the algorithm object has made") as caught:
            sparsecoll.allreduce(comm, x, algo, k=K, timeout=60)
        assert len(set(comm.allgather(str(caught.value)))) == 1
    comm.Free()


def test_large_messages_that_nobody_takes_are_dropped(comm):
    """Rendezvous sends: the receivers are in the report by then."""
    n, culprit = 2_000_000, comm.size - 1
    transport = as_transport(comm)
    dense = np.full(n, 1.0, np.float32)
    if comm.size == 1:
        return
    for _ in range(3):
        if comm.rank == culprit:
            fail_at(transport, "isend", 2)
        text = None
        try:
            sparsecoll.allreduce(comm, dense, "dense", timeout=60)
            unpatch(transport, "isend")
            sparsecoll.allreduce(comm, dense, "dense", timeout=60)
        except CommunicationError as error:
            text = str(error)
        unpatch(transport, "isend")
        assert set(comm.allgather(text)) == {f"rank {culprit} failed: Fault: isend 2"}
    y = sparsecoll.allreduce(comm, dense, "dense", timeout=60)
    assert (y.values == comm.size).all()
    assert not transport._sends and not any(getattr(transport, "expected", ()))


@pytest.mark.parametrize("algo", EXACT)
def test_calls_in_the_background_fail_and_go_on(comm, algo):
    """A request in the middle fails on all ranks; those before and after it are right."""
    xs = [SparseVector([i], np.array([np.nan if (i, comm.rank) == (2, 0) else 1.0]), 9) for i in range(5)]
    requests = [sparsecoll.iallreduce(comm, x, algorithm(algo)) for x in xs]
    for i, request in enumerate(requests):
        if i == 2:
            with pytest.raises(ValueError, match="rank 0: x: expected finite values"):
                request.wait(60)
        else:
            assert request.wait(60).values.tolist() == [comm.size]


@pytest.mark.parametrize("turn", range(4))
def test_calls_that_are_queued_behind_a_gather_that_fails_are_right_or_raise(comm, turn):
    """Ranks that have only sent in the gather may be in the next call when they hear of the failure."""
    x, last = SparseVector([comm.rank], [1.0], comm.size + 3), comm.size - 1
    vectors = [SparseVector([comm.size + i], [10.0**i], comm.size + 3) for i in range(3)]

    def first(wrong):
        return sparsecoll.igather(comm, "x" if wrong and comm.rank == last else x)

    for wrong in (False, True, False, True):
        requests = [first(wrong)] + [sparsecoll.iallreduce(comm, y, k=2) for y in vectors[:-1]]
        waits = [request.wait for request in requests]
        waits.insert(turn % 2 * 3, lambda: sparsecoll.allreduce(comm, vectors[-1], k=2))
        for wait in waits:
            try:
                y = wait()
                if isinstance(y, SparseVector) and y.indices[0] >= comm.size:  # a sum
                    assert y.values.tolist() == [comm.size * 10.0 ** (y.indices[0] - comm.size)]
            except (TypeError, CommunicationError):
                assert wrong
        assert sparsecoll.allreduce(comm, {0: 1.0}) == {0: comm.size}
        with contextlib.suppress(TypeError, CommunicationError):  # some ranks do not start the second one
            first(wrong).wait(60)
            sparsecoll.iallreduce(comm, vectors[0], k=2).wait(60)


@pytest.mark.skipif("TORCHELASTIC_RUN_ID" in os.environ, reason="needs MPI")
def test_first_calls_of_two_threads(comm, monkeypatch):
    """The second one is refused. A first call that was interrupted may have sent something: there is no other one."""
    from sparsecoll.transport.mpi import communicators  # under torchrun, no test imports MPI

    own, other, duplicate = comm.Dup(), comm.Dup(), communicators._duplicate

    def meanwhile(*given):
        with pytest.raises(CommunicationError, match="two threads made calls at the same time"):
            as_transport(own)
        return duplicate(*given)

    monkeypatch.setattr(communicators, "_duplicate", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        as_transport(other)
    with pytest.raises(CommunicationError, match=r"its first call failed on rank .: ZeroDivisionError"):
        as_transport(other)
    monkeypatch.setattr(communicators, "_duplicate", meanwhile)
    assert sparsecoll.allreduce(own, SparseVector([comm.rank], [1.0], comm.size)).nnz == comm.size
    own.Free()
    other.Free()
