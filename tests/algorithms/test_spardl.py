"""SparDL: exactly 4k(P-1)/P words and 2 ceil(log2 P) messages for any P, and nothing lost."""

import formulas
import numpy as np
import pytest
from cases import SUPPORTS
from volume import HEADER_WORDS, measure

import sparsecoll
from sparsecoll import SparDL, SparseVector, select, simulate
from sparsecoll.algorithms.primitives import estimates


@pytest.mark.parametrize("P", [2, 3, 6, 7, 16, 33])
@pytest.mark.parametrize("name", SUPPORTS)
def test_volume_is_at_most_that_of_the_formula_in_two_rounds_a_level(name, P):
    k = 3000
    volume = measure(SparDL, name, P, k)
    assert volume.received <= formulas.spardl_words(k, P) + 4 * P + 2 * HEADER_WORDS * P
    assert volume.messages == 2 * estimates.rounds(P)
    assert volume.nnz <= k
    if name in ("random", "same"):  # nearly full blocks: nearly the formula
        assert volume.received >= 0.8 * formulas.spardl_words(k, P)


@pytest.mark.parametrize("P", [4, 6, 7])
def test_full_blocks_meet_the_formula(P):
    """Dense input: every block has its k/P, so that every message is full."""
    k = 6000

    def program(comm):
        x = np.random.default_rng(comm.rank).standard_normal(60_000).astype(np.float32)
        y = sparsecoll.allreduce(comm, x, "spardl", k=k, format="coo", return_reduction=True)
        return sum(y.traffic.phases[p].words_received for p in ("split", "gather")), y.value.nnz

    for words, nnz in simulate(P, program).results:
        assert nnz == k
        assert (
            formulas.spardl_words(k, P) - 4 * P <= words <= formulas.spardl_words(k, P) + 4 * P + 2 * HEADER_WORDS * P
        )


@pytest.mark.parametrize("P", [3, 8])
def test_discarded_mass_is_collected(P):
    """Over steps with a residual: what was put in is in the results and the residuals."""
    n, k = 2000, 100

    def program(comm):
        rng, residual = np.random.default_rng(comm.rank), sparsecoll.Residual(n, np.float64)
        entered, results = np.zeros(n), np.zeros(n)
        for _ in range(5):
            gradient = rng.standard_normal(n)
            entered += gradient
            acc = residual.compensate(gradient)
            y = sparsecoll.allreduce(comm, acc.values, "spardl", k=k, return_reduction=True)
            residual.update(y.contributed)
            results += y.value.to_dense()
        return entered, results, residual.array.copy()

    rows = simulate(P, program).results
    np.testing.assert_allclose(sum(r[0] for r in rows), rows[0][1] + sum(r[2] for r in rows), atol=1e-9)


def test_selection_is_by_blocks():
    x = np.arange(1, 101, dtype=np.float32)
    assert SparDL().select(sparsecoll.DenseVector(x), 4, ranks=4).indices.tolist() == [24, 49, 74, 99]
    sparse = SparseVector.from_dense(x)
    assert SparDL().select(sparse, 4, ranks=4).indices.tolist() == [24, 49, 74, 99]
    chosen = SparDL(selector=select.TopK()).select(sparse, 4, ranks=4)
    assert chosen.indices.tolist() == [96, 97, 98, 99]


def test_nan_that_arises_in_a_sum_raises_on_every_rank():
    def program(comm):
        x = SparseVector([1, 5], np.array([np.inf if comm.rank % 2 else -np.inf, 1.0]), 9)
        with pytest.raises(ValueError, match="got NaN"):
            sparsecoll.allreduce(comm, x, "spardl", k=9)
        return sparsecoll.allreduce(comm, SparseVector([2], np.ones(1), 9), "spardl", k=9).values[0]

    assert simulate(5, program).results == [5.0] * 5
