"""Nonblocking calls over MPI: several in flight complete in order, errors come at wait, memory stays."""

import asyncio
import gc
import os
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cases import case, same_bits
from failing import Held, refused_in_a_fork
from simulated import simulated

import sparsecoll
from sparsecoll import CommunicationError, OkTopk, SparseVector
from sparsecoll.transport import as_transport

pytestmark = pytest.mark.mpi


@pytest.fixture
def comm(comm):
    own = comm.Dup()
    yield own
    own.Free()


def test_many_in_flight_complete_in_order_and_equal_the_simulator(comm):
    """Blocking calls in between wait for those before them."""

    def program(c):
        algorithm, results, requests = OkTopk(tau_prime=3), [], []
        rng = np.random.default_rng(c.rank)
        for step in range(12):
            x = rng.standard_normal(5000).astype(np.float32)
            algo = algorithm if step % 2 else "allgather"
            requests.append(sparsecoll.iallreduce(c, x, algo, density=0.02))
            if step % 5 == 4:
                results.append(sparsecoll.allreduce(c, case("random", c.rank, c.size), "sparcml"))
        return [request.wait() for request in requests] + results

    for mine, theirs in zip(program(comm), simulated(comm, program), strict=True):
        assert same_bits(mine, theirs)


def test_communicators_go_on_side_by_side(comm):
    other = comm.Dup()
    x = case("random", comm.rank, comm.size)
    pending = [sparsecoll.iallreduce(c, x) for c in (comm, other, comm, other)]
    results = [request.wait(60) for request in reversed(pending)]
    assert all(same_bits(results[0], y) for y in results)
    assert all(request.test() for request in pending)
    other.Free()


def test_errors_come_at_wait_on_every_rank_and_later_calls_work(comm):
    bad = ([3, 1] if comm.rank == comm.size - 1 else [1, 3], np.ones(2), 9)
    first = sparsecoll.iallreduce(comm, bad)
    second = sparsecoll.iallreduce(comm, SparseVector([1], np.ones(1), 9))
    assert second.wait().values[0] == comm.size
    with pytest.raises(ValueError, match="strictly ascending"):
        first.wait()


def test_wait_with_a_timeout(comm):
    if comm.size == 1:
        pytest.skip("a call of one rank waits for nobody")
    sparsecoll.traffic(comm)  # the first call on a communicator waits for all ranks
    if comm.rank == 0:
        for source in range(1, comm.size):
            comm.recv(source=source)  # the others have waited in vain
    request = sparsecoll.iallreduce(comm, SparseVector([1], np.ones(1), 9))
    if comm.rank:
        with pytest.raises(CommunicationError, match=r"has not finished within 0\.01 s"):
            request.wait(0.01)
        comm.send(None, 0)
    assert request.wait().values[0] == comm.size


def test_a_persistent_allreduce(comm):
    rng = np.random.default_rng(comm.rank)
    xs = [rng.standard_normal(3000).astype(np.float32) for _ in range(4)]
    for algo, options in (("oktopk", {"k": 30}), ("auto", {"density": 0.01}), ("dense", {"value_dtype": "float16"})):
        plan, kept = sparsecoll.allreduce_init(comm, xs[0], algo, **options), sparsecoll.ALGORITHMS[algo]()
        for x in xs:
            request = plan.start(x)
            assert same_bits(request.wait(), sparsecoll.allreduce(comm, x, kept, **options))
        with pytest.raises(ValueError, match="rank 0: x: expected a DenseVector of length 3000"):
            plan(xs[0] if comm.rank else xs[0][:9])
        assert plan(xs[1]).nnz > 0


def test_a_started_call_is_finished_where_its_plan_is_gone(comm):
    """Rank 0 makes its calls last: on the others, the started one waits."""
    x = case("random", comm.rank, comm.size)
    plan = sparsecoll.allreduce_init(comm, x)
    if comm.rank == 0:
        for source in range(1, comm.size):
            comm.recv(source=source)
    sparsecoll.iallreduce(comm, x)
    request = plan.start(x)
    del plan
    gc.collect()
    if comm.rank:
        comm.send(None, 0)
    assert same_bits(request.wait(60), sparsecoll.allreduce(comm, x))


def test_the_others_of_the_family_and_await(comm):
    x, P = case("random", comm.rank, comm.size), comm.size

    async def program():
        made = [
            sparsecoll.ireduce(comm, x),
            sparsecoll.iallgather(comm, x),
            sparsecoll.ialltoallv(comm, {0: x}),
            sparsecoll.ireduce_scatter(comm, x),
            sparsecoll.ibcast(comm, x, P - 1),
        ]
        return await asyncio.gather(*made)

    total, parts, received, region, last = asyncio.run(program())
    assert total == sparsecoll.reduce(comm, x) and len(parts) == P and last == parts[-1]
    assert len(received) == (P if comm.rank == 0 else 0) and region == sparsecoll.reduce_scatter(comm, x)
    bad = sparsecoll.iallgather(comm, "words" if comm.rank == P - 1 else x)
    with pytest.raises(TypeError, match=f"rank {P - 1}: x: expected "):
        sparsecoll.Request.waitall([bad, sparsecoll.igather(comm, x)])
    assert sparsecoll.gather(comm, x, P - 1) is None or comm.rank == P - 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
@pytest.mark.parametrize("nonblocking", [False, True])
def test_a_forked_process_takes_no_part(comm, nonblocking):
    """It has no thread for nonblocking calls, and its messages would be taken for those of its parent."""
    if comm.size == 1:
        pytest.skip("a call of one rank takes no messages")
    x = case("random", comm.rank, comm.size)
    expected, plan = sparsecoll.allreduce(comm, x), sparsecoll.allreduce_init(comm, x)
    if nonblocking:
        sparsecoll.iallreduce(comm, x).wait()
    calls = [lambda: sparsecoll.allreduce(comm, x), lambda: sparsecoll.ibcast(comm, x).wait(), lambda: plan(x)]
    assert comm.rank or refused_in_a_fork(*calls)
    assert same_bits(sparsecoll.allreduce(comm, x), expected)


@pytest.mark.mpich
@pytest.mark.parametrize("algo", sparsecoll.ALGORITHMS)
def test_a_steady_call_allocates_nothing_of_the_size_of_the_vector(comm, algo):
    n = 1_000_000
    x = np.random.default_rng(comm.rank).standard_normal(n).astype(np.float32)
    algorithm = sparsecoll.ALGORITHMS[algo](k=1000)
    for _ in range(4):
        sparsecoll.allreduce(comm, x, algorithm)
    peaks = []
    for _ in range(3):  # compiled kernels may be loaded in one of them
        tracemalloc.start()
        sparsecoll.allreduce(comm, x, algorithm)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert min(peaks) < n / 2 + 100 * 1000 * comm.size**0.5  # bytes; the vector has 4n


def test_two_threads_in_calls_at_the_same_time_are_an_error_on_all_ranks(comm):
    """Sums of different calls were added to each other."""
    if not as_transport(comm).threads:
        pytest.skip("needs MPI_THREAD_MULTIPLE")
    x, held = SparseVector([comm.rank], np.ones(1), 99), Held()
    if comm.rank:
        held.goes_on.set()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(sparsecoll.allreduce, comm, x, held)
        if comm.rank == 0:
            assert held.begun.wait(60)
            with pytest.raises(CommunicationError, match="two threads made calls at the same time on rank 0"):
                sparsecoll.allreduce(comm, x)
            held.goes_on.set()
        with pytest.raises(CommunicationError, match="two threads made calls at the same time on rank 0"):
            first.result(60)
            sparsecoll.allreduce(comm, x)
