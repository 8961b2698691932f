"""The collectives other than allreduce over MPI: the bits and bytes of the simulator."""

from collections import Counter

import numpy as np
import pytest
from cases import case, same_bits
from simulated import simulated

import sparsecoll


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["random", "empty_ranks", "one_region"])
def test_bits_and_bytes_are_those_of_the_simulator(comm, name):
    P = comm.size

    def program(comm):
        x, root = case(name, comm.rank, P), P - 1
        before = sparsecoll.traffic(comm).copy()
        made = [
            sparsecoll.reduce(comm, x, root, check=False),
            sparsecoll.reduce_scatter(comm, x, check=False),
            *sparsecoll.allgather(comm, x, check=False),
            sparsecoll.bcast(comm, x, root, check=False),
            *(sparsecoll.gather(comm, x, root, check=False) or []),
            sparsecoll.scatter(comm, x, root, check=False),
            *sparsecoll.alltoall(comm, [x] * P, check=False),
            *sparsecoll.alltoallv(comm, {(comm.rank + 1) % P: x, P // 2: x}, check=False).values(),
        ]
        return made, sparsecoll.traffic(comm).since(before).total.bytes_received

    mine, received = program(comm)
    theirs, expected = simulated(comm, program)
    assert received == expected
    for a, b in zip(mine, theirs, strict=True):
        assert a is b is None or same_bits(a, b)


@pytest.mark.mpi
def test_counters_are_summed_and_gathered(comm):
    parts = [Counter({rank: 1, 7: rank, 2**62 + rank // 2: 5}) if rank != 1 else Counter() for rank in range(comm.size)]
    expected = {}
    for key, value in (item for part in parts for item in part.items()):
        expected[key] = expected.get(key, 0) + value
    x = parts[comm.rank]
    total = sparsecoll.allreduce(comm, x)
    assert type(total) is Counter and total == expected and total == sparsecoll.iallreduce(comm, x).wait()
    assert sparsecoll.allgather(comm, x) == parts
    with pytest.raises(TypeError, match=f"rank {comm.size - 1}: x: expected keys that are integers"):
        sparsecoll.allreduce(comm, {"a": 1, 2: 1} if comm.rank == comm.size - 1 else {1: 1})
    assert sparsecoll.allreduce(comm, {1: 0.5}) == {1: 0.5 * comm.size}


@pytest.mark.mpi
@pytest.mark.parametrize("form", ["csr_array", "csc_matrix", "bsr_array", "coo_array"])
def test_bcast_keeps_type_and_shape_on_every_rank(comm, form):
    sparse = pytest.importorskip("scipy.sparse")
    dense, root = np.kron(np.eye(3), np.ones((2, 4))), comm.size - 1
    x = getattr(sparse, form)(dense)
    y = sparsecoll.bcast(comm, x if comm.rank == root else None, root)
    assert type(y) is type(x) and y.shape == x.shape and getattr(y, "blocksize", 0) == getattr(x, "blocksize", 0)
    np.testing.assert_array_equal(y.toarray(), dense)
    keys = sparsecoll.bcast(comm, Counter({5: 2}) if comm.rank == root else None, root)
    assert type(keys) is Counter and keys == {5: 2}


@pytest.mark.mpi
def test_an_intercommunicator_is_refused(comm, mpi):
    if comm.size == 1:
        pytest.skip("an intercommunicator connects two groups")
    first = comm.rank == 0
    group = comm.Split(first)
    inter = group.Create_intercomm(0, comm, 1 if first else 0)
    x = case("random", 0, 1)
    for call in (sparsecoll.allreduce, sparsecoll.gather, sparsecoll.iallreduce):
        with pytest.raises(TypeError, match=r"intracommunicator, got Intercomm: use comm\.Merge\(\)"):
            call(inter, x)
    merged = inter.Merge()
    assert same_bits(sparsecoll.allreduce(merged, x), sparsecoll.allreduce(comm, x))
    for made in (merged, inter, group):
        made.Free()


@pytest.mark.mpi
def test_words_are_summed_over_mpi(comm):
    parts = [Counter(f"the cat of rank {rank // 2}".split()) for rank in range(comm.size)]
    assert sparsecoll.allreduce(comm, parts[comm.rank]) == sum(parts, Counter())
    total = sparsecoll.reduce(comm, Counter({key.encode(): n for key, n in parts[comm.rank].items()}), comm.size - 1)
    assert total is None or total == {key.encode(): n for key, n in sum(parts, Counter()).items()}


@pytest.mark.mpi
def test_words_are_scattered_with_their_own_part(comm):
    P, words = comm.size, {f"{i}" * 500: i for i in range(comm.size * 100)}

    def program(comm):
        before = sparsecoll.traffic(comm).copy()
        y = sparsecoll.scatter(comm, words if comm.rank == P - 1 else None, P - 1, check=False)
        none = sparsecoll.scatter(comm, words if comm.rank == 0 else None, 0, [0] * P + [len(words)])
        return y, none, sparsecoll.traffic(comm).since(before).total.bytes_received

    mine, none, received = program(comm)
    assert list(mine.items()) == list(words.items())[100 * comm.rank : 100 * (comm.rank + 1)]
    assert none == (words if comm.rank == P - 1 else {})
    assert received == simulated(comm, program)[2]
    assert comm.rank == P - 1 or received < 2 * sum(map(len, mine)) + 2000 * P


@pytest.mark.mpi
def test_operations_of_mpi4py(comm, mpi):
    rng = np.random.default_rng(comm.rank)
    own = rng.integers(-5, 6, 60) * (rng.random(60) < 0.5)
    logical = [mpi.LAND, mpi.LOR, mpi.LXOR]
    numbers = [mpi.SUM, mpi.MAX, mpi.MIN, mpi.PROD, *logical, mpi.BAND, mpi.BOR, mpi.BXOR]
    for dtype, ops in ((np.int64, numbers), (bool, logical)):
        for op in ops:
            dense = own.astype(dtype)
            x, expected = sparsecoll.SparseVector.from_dense(dense), np.empty_like(dense)
            comm.Allreduce(dense, expected, op)
            for algo in ("auto", "dense", "densestream"):
                y = sparsecoll.allreduce(comm, x, algo, op=op, missing="zero")
                np.testing.assert_array_equal(y.to_dense(), expected)
    ranks = sparsecoll.SparseVector([3, 4 + comm.rank], np.full(2, comm.rank), 60)
    last = sparsecoll.allreduce(comm, ranks, op=mpi.REPLACE)
    assert last.values.tolist() == [comm.size - 1, *range(comm.size)]
    largest = sparsecoll.reduce(comm, x, op=mpi.MAX, root=0)
    assert (largest is None) == (comm.rank != 0)
    mine = mpi.Op.Create(lambda a, b, dtype: None)
    with pytest.raises(ValueError, match=r"op: expected one of MPI\.SUM, MPI\.MAX"):
        sparsecoll.allreduce(comm, x, op=mine)
    mine.Free()
    for call in (sparsecoll.allreduce, sparsecoll.allreduce_init):
        with pytest.raises(TypeError, match=r"algo: expected a name .* an operation of mpi4py: use op="):
            call(comm, x, mpi.MAX)


@pytest.mark.mpi
def test_tuples_as_keys(comm):
    parts = [Counter({(rank, 1): 2, ("a", rank // 2): 1, (0,): 1}) for rank in range(comm.size)]
    total = sparsecoll.allreduce(comm, parts[comm.rank])
    assert type(total) is Counter and total == sum(parts, Counter())
    sent = sparsecoll.bcast(comm, parts[-1] if comm.rank == comm.size - 1 else None, comm.size - 1)
    assert type(sent) is Counter and sent == parts[-1]


@pytest.mark.mpi
def test_integers_that_a_sum_might_not_hold_are_refused_on_all_ranks(comm):
    if comm.size > 1:
        for last in (2**62, 0.5):
            with pytest.raises(ValueError, match=r"rank 0: x: expected a sum of integers|rank 0: x: expected integers"):
                sparsecoll.allreduce(comm, {"a": last if comm.rank == comm.size - 1 else 2**62})
    assert sparsecoll.allreduce(comm, {"a": 2**50}) == {"a": comm.size * 2**50}


@pytest.mark.mpi
@pytest.mark.parametrize("x", [np.arange(12.0).reshape(3, 4).T, np.array(True), np.zeros((0, 3)), np.arange(1 << 17)])
def test_dense_arrays_are_moved_and_belong_to_the_receiver(comm, x):
    P, rank = comm.size, comm.rank
    found = [sparsecoll.bcast(comm, x if rank == P - 1 else None, P - 1), *sparsecoll.allgather(comm, x)]
    found += [*sparsecoll.alltoall(comm, [x] * P), *sparsecoll.alltoallv(comm, {(rank + 1) % P: x}).values()]
    found += [sparsecoll.scatter(comm, [x] * P), *(sparsecoll.gather(comm, x, P - 1) or [])]
    for y in found:
        assert y.dtype == x.dtype and y.shape == x.shape and np.array_equal(y, x)
        y[...] = 1
