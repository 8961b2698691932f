"""The same code over MPI: the same bits and the same counted bytes as the simulator, and what only MPI can show.

Run by `mpirun -n 8 python -m pytest --with-mpi`; any number of ranks works.
"""

import gc
import time

import numpy as np
import pytest
from cases import DISTRIBUTIONS, case, same_bits
from simulated import simulated

import sparsecoll
from sparsecoll import ALGORITHMS, CommunicationError, Network, OkTopk, SparseVector
from sparsecoll.algorithms.auto.costmodel import CHOICES, fastest
from sparsecoll.transport import as_transport
from sparsecoll.transport.all_ranks import allgather, node_members
from sparsecoll.transport.network import ONE_NODE

pytestmark = pytest.mark.mpi


@pytest.fixture
def pair(comm):
    """A sub-communicator of the first two ranks (None elsewhere)."""
    part = comm.Split(int(comm.rank > 1), comm.rank)
    yield part if comm.rank < 2 <= comm.size else None
    part.Free()


def counts(traffic):
    return {
        name: (c.bytes_sent, c.bytes_received, c.messages_sent, c.messages_received)
        for name, c in {**traffic.phases, "total": traffic.total}.items()
        if c.messages_sent or c.messages_received
    }


def test_communicators_of_one_rank_are_taken_as_they_are(comm, mpi):
    """In a job whose ranks MPI knows, also where the launcher says how many there are."""
    part = comm.Split(comm.rank)
    for own in (part, mpi.COMM_SELF):
        assert sparsecoll.allreduce(own, {0: comm.rank + 1}) == {0: comm.rank + 1}
    part.Free()


EVERYWHERE = ("random", "one_region", "empty_ranks")
CASES = [
    *(pytest.param(n, "float32", marks=[] if n in EVERYWHERE else [pytest.mark.mpich]) for n in DISTRIBUTIONS),
    ("random", "float16"),
    pytest.param("ties", "int64", marks=[pytest.mark.mpich]),
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_same_bits_and_same_bytes_as_the_simulator(comm, algo, name, dtype):
    def program(c):
        node_members(as_transport(c))  # asked for once in the life of a communicator
        as_transport(c).agreed.clear()  # each call is new, as on the simulator
        chosen = sparsecoll.Auto(network=Network()) if algo == "auto" else algo  # else each transport has its own
        return sparsecoll.allreduce(c, case(name, c.rank, c.size, dtype), chosen, return_reduction=True)

    on_node = 1 if algo != "hierarchical" else len(node_members(as_transport(comm))[0])  # one machine, or equal ones
    own = comm.Dup()  # on which no arguments have been compared yet, as in the simulator
    mine = program(own)
    own.Free()
    theirs = simulated(comm, program, ranks_per_node=on_node)
    assert same_bits(mine.value, theirs.value)
    assert same_bits(mine.contributed, theirs.contributed)
    assert counts(mine.traffic) == counts(theirs.traffic)


@pytest.mark.parametrize("format", ["coo", "auto"])
def test_oktopk_over_many_steps_equals_the_simulator(comm, format):
    """Thresholds and boundaries are reused, found again, and carried over: 12 steps of random floats."""

    def program(c):
        algorithm, rng, results = OkTopk(tau=5, tau_prime=3), np.random.default_rng(c.rank), []
        base = rng.standard_normal(20_000).astype(np.float32)
        for _ in range(12):
            base += 0.05 * rng.standard_normal(base.size).astype(np.float32)
            results.append(sparsecoll.allreduce(c, base, algorithm, density=0.02, format=format))
        return results

    for mine, theirs in zip(program(comm), simulated(comm, program), strict=True):
        assert same_bits(mine, theirs)


@pytest.mark.parametrize("k", [1, 20_000, 300_000])
def test_the_first_call_of_auto_sends_its_own_sum_and_the_agreement_alone(comm, k):
    """As the algorithm that it chooses sends by its name, in the same format."""
    x = SparseVector(np.arange(k), np.full(k, 0.5, np.float32), 400_000)

    def counted(algo, **options):
        own = comm.Dup()
        before = as_transport(own).traffic.copy()
        sparsecoll.allreduce(own, x, algo, k=k, **options)
        after = sparsecoll.traffic(own)
        own.Free()
        return counts(after), after.set_up.bytes_sent - before.set_up.bytes_sent

    auto = counted("auto")
    named = CHOICES[fastest(x.length, k, comm.size, 4, True, ONE_NODE)]()
    assert auto == counted(named, format=sparsecoll.formats.AutoFormat(beta=ONE_NODE.beta))


def test_messages_longer_than_a_chunk_arrive_whole(comm):
    transport = as_transport(comm)
    x = SparseVector(np.arange(comm.rank, 5000, 7), np.full(len(range(comm.rank, 5000, 7)), 0.5, np.float32), 5000)
    whole = sparsecoll.allreduce(comm, x, "allgather")
    try:
        for chunk in (64, 1000, 8 + 16 + 8):
            transport.chunk = chunk
            assert same_bits(whole, sparsecoll.allreduce(comm, x, "allgather"))
    finally:
        transport.chunk = 1 << 30


def test_users_own_messages_are_not_taken(comm, mpi):
    token = np.array([comm.rank], np.int64)
    request = comm.Isend([token, mpi.INT64_T], (comm.rank + 1) % comm.size, 0)
    y = sparsecoll.allreduce(comm, case("random", comm.rank, comm.size), "oktopk")
    received = np.empty(1, np.int64)
    comm.Recv([received, mpi.INT64_T], (comm.rank - 1) % comm.size, 0)
    request.Wait()
    assert y.nnz and received[0] == (comm.rank - 1) % comm.size


def test_duplicate_is_cached_and_freed_with_the_users_communicator(comm, mpi):
    for _ in range(3000 if comm.size <= 3 else 300):  # MPICH runs out of context ids after about 2000 leaks
        mine = comm.Dup()
        assert as_transport(mine) is as_transport(mine)
        duplicate = as_transport(mine).comm
        mine.Free()
        assert duplicate == mpi.COMM_NULL
    gc.collect()


def test_a_plan_ends_with_its_communicator(comm, mpi):
    if comm.size == 1:
        pytest.skip("one rank sends nothing")
    mine, x = comm.Dup(), case("random", comm.rank, comm.size)
    plan = sparsecoll.allreduce_init(mine, x)
    plan.start(x).wait()
    mine.Free()
    for call in (plan, lambda x: plan.start(x).wait()):
        with pytest.raises(CommunicationError, match="communicator is out of use since it was freed"):
            call(x)


def test_sub_communicators_work_apart(comm):
    half = comm.Split(comm.rank % 2, comm.rank)
    y = sparsecoll.allreduce(half, SparseVector([comm.rank], np.ones(1), comm.size))
    np.testing.assert_array_equal(y.indices, np.arange(comm.rank % 2, comm.size, 2))
    half.Free()


def test_invalid_input_on_one_rank_raises_on_all_and_the_communicator_stays_usable(comm):
    culprit = comm.size - 1
    bad = ([3, 1] if comm.rank == culprit else [1, 3], np.ones(2), 9)
    with pytest.raises(ValueError, match=f"rank {culprit}: indices: expected strictly ascending"):
        sparsecoll.allreduce(comm, bad)
    if comm.size > 1:
        with pytest.raises(CommunicationError, match="length: expected the same value on all ranks"):
            sparsecoll.allreduce(comm, SparseVector([1], np.ones(1), 10 + (comm.rank == culprit)))
    assert sparsecoll.allreduce(comm, SparseVector([1], np.ones(1), 9)).values[0] == comm.size


def test_timeout_names_the_rank_waited_for(pair):
    """The other rank comes too late: an error, not a hang; afterwards this communicator is out of use."""
    if pair is None:
        return
    x = SparseVector([pair.rank], np.ones(1), 4)
    sparsecoll.allreduce(pair, x)
    if pair.rank == 0:
        start = time.monotonic()
        with pytest.raises(CommunicationError, match="rank 0 waits for a message of rank 1"):
            sparsecoll.allreduce(pair, x, timeout=0.3)
        assert time.monotonic() - start < 5
        sends = len(as_transport(pair)._sends)
        for _ in range(3):
            with pytest.raises(CommunicationError, match="out of use"):
                sparsecoll.allreduce(pair, x)
        assert len(as_transport(pair)._sends) == sends  # farewell is said once
        pair.send("done", 1)
    else:
        pair.recv(source=0)
        with pytest.raises(CommunicationError, match=r"^rank 0 waits for a message of rank 1|length: expected the"):
            sparsecoll.allreduce(pair, SparseVector([0], np.ones(1), 5), timeout=60)  # meets the stale message


def test_intercommunicators_and_other_objects_are_refused(mpi):
    with pytest.raises(TypeError, match="comm: expected an mpi4py intracommunicator"):
        sparsecoll.allreduce(mpi.COMM_NULL, SparseVector([0], np.ones(1), 4))


def test_an_mpi_that_cannot_shrink_leaves_the_communicator_as_it_was(comm, mpi):
    """Not even a rank that is alone may wait for ever, or find its communicator out of use."""
    dup = comm.Dup()
    assert sparsecoll.allreduce(dup, {0: 1}) == {0: comm.size}
    with pytest.raises(CommunicationError, match="start the job by mpirun --with-ft ulfm"):
        sparsecoll.shrink(dup)
    assert sparsecoll.allreduce(dup, {0: 1}) == {0: comm.size}
    dup.Free()


def test_a_rank_that_waits_leaves_its_core_to_others(comm):
    """Share of processor time in waits of 0.3 s, the median of three; MPI is polled, sockets sleep."""
    transport, used = as_transport(comm), []
    for _ in range(3):
        comm.Barrier()
        if comm.rank == 0:
            time.sleep(0.3)
        start, before = time.perf_counter(), time.thread_time()
        allgather(transport, np.zeros(1, np.uint8))
        transport.waitall()
        used.append((time.thread_time() - before) / (time.perf_counter() - start))
    assert comm.rank == 0 or sorted(used)[1] < 0.18  # one that spins has a quarter of a core even with 8 ranks on 2


def test_progress_visits_only_the_ranks_that_something_is_expected_of(comm, mpi):
    """A call of P ranks makes P / 8 of them: looking at all P each time would be quadratic work."""
    transport, visited = as_transport(comm), []

    class Queues(list):
        def __getitem__(self, source):
            visited.append(source)
            return super().__getitem__(source)

        def __iter__(self):
            visited.append("all")
            return super().__iter__()

    sparsecoll.allreduce(comm, case("random", comm.rank, comm.size), "oktopk")
    transport.progress()
    transport.expected = Queues(transport.expected)
    transport.progress()
    assert visited == []
    pending = transport.irecv(comm.rank)
    visited.clear()
    transport.progress()
    assert set(visited) == {comm.rank}
    transport.isend(comm.rank, np.ones(1, np.uint8))
    assert pending.wait().size == 1
    transport.waitall()
