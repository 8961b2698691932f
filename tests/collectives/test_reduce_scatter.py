"""reduce_scatter: each rank gets its region of the sum."""

import numpy as np
import pytest
from cases import DISTRIBUTIONS, RANKS, case

import sparsecoll
from sparsecoll import DenseVector, SparseVector, simulate
from sparsecoll.collectives.options import CallOptions
from sparsecoll.collectives.reduce_scatter import reduce_scatter_vectors


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("P", RANKS)
def test_each_rank_gets_its_region_of_the_sum(P, name):
    inputs = [case(name, rank, P) for rank in range(P)]
    total = np.sum([x.to_dense() for x in inputs], axis=0, dtype=np.float32)
    n = inputs[0].length
    parts = simulate(P, lambda comm: sparsecoll.reduce_scatter(comm, inputs[comm.rank])).results
    for rank, part in enumerate(parts):
        low, high = n * rank // P, n * (rank + 1) // P
        np.testing.assert_array_equal(part.to_dense()[low:high], total[low:high])
        assert part.nnz == 0 or (part.indices[0] >= low and part.indices[-1] < high)


def test_boundaries_of_ones_own():
    inputs = [case("random", rank, 3) for rank in range(3)]
    edges = [0, 10, 10, inputs[0].length]
    parts = simulate(3, lambda comm: sparsecoll.reduce_scatter(comm, inputs[comm.rank], edges)).results
    assert parts[1].nnz == 0 and (parts[0].nnz == 0 or parts[0].indices[-1] < 10)
    for wrong in ([0, 9, 5, 2003], [1, 2, 3, 2003], [0, 1, 2, 2002]):
        with pytest.raises(ValueError, match="boundaries: expected 4 ascending ones from 0 to 2003"):
            simulate(3, lambda comm, wrong=wrong: sparsecoll.reduce_scatter(comm, inputs[comm.rank], wrong))
    with pytest.raises(ValueError, match="boundaries: expected 4 ascending ones from 0 to the length, got 3000000"):
        simulate(3, lambda comm: sparsecoll.reduce_scatter(comm, inputs[comm.rank], np.arange(3_000_000)))


@pytest.mark.parametrize("wrong", [[0, 2.9, 6.9, 10], np.linspace(0, 10, 4), "abc", 3])
def test_boundaries_are_integers(wrong):
    x, rows = SparseVector([2, 3, 6], np.ones(3), 10), sparsecoll.RowSparse([2], np.ones((1, 1)), 10)

    def program(comm):
        for call in (sparsecoll.reduce_scatter, sparsecoll.scatter):
            for given in (x, rows) if call is sparsecoll.reduce_scatter else (x,):
                with pytest.raises(TypeError, match="rank 0: boundaries: expected a sequence of integers or None, got"):
                    call(comm, given, boundaries=wrong)
        return sparsecoll.reduce_scatter(comm, x, np.array([0, 3, 6, 10])).nnz

    assert simulate(3, program).results == [1, 1, 1]


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

        assert max(simulate(P, program).results) <= 4 * words * 1.15 + 8 * 40


@pytest.mark.parametrize("P", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "options", [{}, {"value_dtype": "float16"}, {"format": "packed_codes"}, {"format": "slots"}], ids=str
)
def test_vectors_are_scattered_without_losing_anything_but_rounding(P, options):
    """Regions count from 0, and what contributed is what has arrived."""
    given = [np.random.default_rng(rank).standard_normal(6 * P).astype(np.float32) for rank in range(P)]

    def program(comm, dense):
        x = DenseVector(given[comm.rank].copy())
        vector = x if dense else x.topk(P + 1 if comm.rank else 0)
        reduction = reduce_scatter_vectors(comm.transport, vector, CallOptions(**options))
        assert np.array_equal(x.values, given[comm.rank])
        assert comm.transport.traffic.total.messages_sent >= P - 1
        return reduction.value.to_dense(), reduction.contributed.to_dense()

    for dense in (True, False):
        results = simulate(P, lambda comm, dense=dense: program(comm, dense)).results
        whole = np.concatenate([region for region, _ in results])
        sums = np.sum([sent for _, sent in results], axis=0, dtype=np.float32)
        own = dense and "value_dtype" in options  # a rank does not round its own chunk of a dense vector
        np.testing.assert_allclose(whole, sums, atol=5e-3 if own else 1e-6)


def test_a_length_that_the_ranks_do_not_divide_is_refused():
    def program(comm):
        reduce_scatter_vectors(comm.transport, DenseVector(np.ones(5, np.float32)), CallOptions())

    with pytest.raises(ValueError, match="x: expected a length that 2 ranks divide, got 5"):
        simulate(2, program)
