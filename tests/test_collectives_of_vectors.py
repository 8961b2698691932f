"""reduce, reduce_scatter, allgather and bcast of sparse vectors, on the simulator."""

import numpy as np
import pytest
from cases import DISTRIBUTIONS, case, same_bits

import sparsecoll
from sparsecoll import SparseVector, simulate

RANKS = [1, 2, 3, 5, 6, 7, 8, 12]


def run(P, program):
    return simulate(P, program).results


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("P", RANKS)
def test_all_four_equal_their_oracles(P, name):
    inputs = [case(name, rank, P) for rank in range(P)]
    total = np.sum([x.to_dense() for x in inputs], axis=0, dtype=np.float32)
    root = P // 2

    def program(comm):
        mine = inputs[comm.rank]
        return (
            sparsecoll.reduce(comm, mine, root),
            sparsecoll.reduce_scatter(comm, mine),
            sparsecoll.allgather(comm, mine),
            sparsecoll.bcast(comm, mine if comm.rank == root else None, root),
        )

    n = inputs[0].length
    for rank, (reduced, part, gathered, sent) in enumerate(run(P, program)):
        assert (reduced is None) == (rank != root)
        if reduced is not None:
            np.testing.assert_array_equal(reduced.to_dense(), total)
        low, high = n * rank // P, n * (rank + 1) // P
        np.testing.assert_array_equal(part.to_dense()[low:high], total[low:high])
        assert part.nnz == 0 or (part.indices[0] >= low and part.indices[-1] < high)
        assert all(same_bits(a, b) for a, b in zip(gathered, inputs, strict=True))
        assert same_bits(sent, inputs[root])


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32", "int64"])
def test_dtypes(dtype):
    inputs = [case("random", rank, 4, dtype) for rank in range(4)]
    total = np.sum([x.to_dense() for x in inputs], axis=0, dtype=dtype)

    def program(comm):
        x = inputs[comm.rank]
        return sparsecoll.reduce(comm, x), sparsecoll.bcast(comm, x), sparsecoll.allgather(comm, x)[3]

    for reduced, sent, gathered in run(4, program):
        assert sent.dtype == gathered.dtype == np.dtype(dtype)
        if reduced is not None:
            assert reduced.dtype == np.dtype(dtype)
            np.testing.assert_array_equal(reduced.to_dense(), total)


def test_boundaries_of_ones_own():
    inputs = [case("random", rank, 3) for rank in range(3)]
    edges = [0, 10, 10, inputs[0].length]
    parts = run(3, lambda comm: sparsecoll.reduce_scatter(comm, inputs[comm.rank], edges))
    assert parts[1].nnz == 0 and (parts[0].nnz == 0 or parts[0].indices[-1] < 10)
    for wrong in ([0, 5], [0, 9, 5, 2003], [1, 2, 3, 2003], [0, 1, 2, 2002]):
        with pytest.raises(ValueError, match="boundaries: expected 4 ascending ones from 0 to 2003"):
            run(3, lambda comm, wrong=wrong: sparsecoll.reduce_scatter(comm, inputs[comm.rank], wrong))


def test_selection_first_and_narrow_values():
    dense = np.random.default_rng(0).standard_normal(1000).astype(np.float32)

    def program(comm):
        reduced = sparsecoll.reduce(comm, dense, density=0.01, value_dtype="float16")
        sent = sparsecoll.bcast(comm, SparseVector.from_dense(dense), value_dtype="bfloat16")
        return reduced, sent, sparsecoll.traffic(comm).total.bytes_received

    (reduced, sent, _), _ = run(2, program)
    top = sparsecoll.select.topk(dense, 10)
    assert reduced.indices.tolist() == top.indices.tolist() and reduced.dtype == np.float32
    np.testing.assert_array_equal(reduced.values, 2 * top.values.astype(np.float16).astype(np.float32))
    np.testing.assert_allclose(sent.values, dense, rtol=2**-8)


def test_bytes_of_reduce_scatter():
    """2k(P-1)/P words for equal supports, k log2 P for disjoint ones."""
    P, k, n = 8, 800, 80_000
    for name, words in (("same", 2 * k * (P - 1) / P), ("random", 2 * k * 3)):
        seed = (lambda rank: 0) if name == "same" else (lambda rank: rank)
        rows = [np.sort(np.random.default_rng(seed(rank)).choice(n, k, replace=False)) for rank in range(P)]
        inputs = [SparseVector(row, np.ones(k, np.float32), n) for row in rows]

        def program(comm, inputs=inputs):
            sparsecoll.reduce_scatter(comm, inputs[comm.rank], format="coo")
            return sparsecoll.traffic(comm).phases["split"].bytes_received

        assert max(run(P, program)) <= 4 * words * 1.15 + 8 * 40


def test_errors_are_the_same_on_all_ranks():
    x = case("random", 0, 3)
    dense = np.ones(10, np.float32)
    cases = [
        (lambda comm: sparsecoll.reduce(comm, x, root=3), "root: expected a rank from 0 to 2, got 3"),
        (lambda comm: sparsecoll.reduce(comm, x, root=comm.rank), "root: expected the same value on all ranks"),
        (lambda comm: sparsecoll.allgather(comm, dense), "expected a sparse one, such as SparseVector.from_dense"),
        (lambda comm: sparsecoll.reduce(comm, x, format="slots"), "expected one that loses nothing with partial sums"),
        (lambda comm: sparsecoll.bcast(comm, "no" if comm.rank == 0 else None), "x: expected a SparseVector"),
        (lambda comm: sparsecoll.reduce(comm, x.with_values(x.values * np.nan)), "expected finite values"),
    ]
    for program, text in cases:

        def both(comm, program=program, text=text):
            with pytest.raises((ValueError, TypeError, sparsecoll.CommunicationError), match=text):
                program(comm)
            return sparsecoll.allreduce(comm, x).nnz  # the communicator goes on

        assert len(set(run(3, both))) == 1


def test_callers_kinds_come_back():
    sparse = pytest.importorskip("scipy.sparse")
    x = sparse.random_array((6, 7), density=0.3, format="csr", dtype=np.float64)

    def program(comm):
        return sparsecoll.reduce(comm, x, 1), sparsecoll.allgather(comm, x)[0], sparsecoll.bcast(comm, x)

    results = run(2, program)
    np.testing.assert_allclose(results[1][0].toarray(), 2 * x.toarray())
    assert results[0][1].format == "csr" and results[0][2].format == "csr"
