"""reduce_scatter: each rank gets its region of the sum."""

import numpy as np
import pytest
from cases import DISTRIBUTIONS, RANKS, case

import sparsecoll
from sparsecoll import SparseVector, simulate


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
    for wrong in ([0, 5], [0, 9, 5, 2003], [1, 2, 3, 2003], [0, 1, 2, 2002]):
        with pytest.raises(ValueError, match="boundaries: expected 4 ascending ones from 0 to 2003"):
            simulate(3, lambda comm, wrong=wrong: sparsecoll.reduce_scatter(comm, inputs[comm.rank], wrong))


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
