"""gTopk: 4k log P words through the root, one message an edge, exactly k entries, and no mass lost in the tree."""

import formulas
import numpy as np
import pytest
from cases import SUPPORTS
from volume import HEADER_WORDS, measure

import sparsecoll
from sparsecoll import GTopk, SparseVector, simulate
from sparsecoll.algorithms.primitives import estimates


@pytest.mark.parametrize("P", [2, 3, 5, 8, 16, 33])
@pytest.mark.parametrize("name", SUPPORTS)
def test_a_tree_takes_at_most_the_words_of_the_formula(name, P):
    """2k log2 P words into the root and as many out of it; bits for the cut add k/32 a level."""
    k = 2000
    volume = measure(GTopk, name, P, k)
    allowance = estimates.rounds(P) * (k / 32 + HEADER_WORDS)
    assert volume.received <= formulas.gtopk_words(k, P) / 2 + allowance
    assert volume.sent <= formulas.gtopk_words(k, P) / 2 + allowance
    assert volume.received + volume.sent <= formulas.gtopk_words(k, P) + 2 * allowance
    assert volume.nnz <= k
    if name == "random":
        assert volume.nnz == k and volume.received >= 2 * k * estimates.rounds(P)


@pytest.mark.parametrize("P", [2, 3, 6, 7, 12, 16])
def test_one_message_an_edge_and_direction(P):
    def program(comm):
        x = SparseVector([comm.rank], np.ones(1), 100)
        y = sparsecoll.allreduce(comm, x, "gtopk", k=3, return_reduction=True)
        return sum(c.messages_sent for name, c in y.traffic.phases.items() if name in ("reduce", "broadcast"))

    sent = simulate(P, program).results
    assert sum(sent) == 2 * (P - 1) and max(sent) <= estimates.rounds(P)


def test_values_are_four_bytes():
    """The published code sends int and float32 together as float64, twice the bytes."""
    k = 10_000
    volume = measure(GTopk, "same", 2, k)
    assert volume.received < 2 * k + k / 32 + 3 * HEADER_WORDS


def test_an_index_in_the_result_is_not_yet_a_share_of_it():
    """Rank 3's entry 0 is cut below, and comes in by rank 0: rank 3 must keep its own."""
    n = 100
    inputs = [
        SparseVector([0, 1], np.array([9.0, 1.0]), n),
        SparseVector([2], np.array([1.0]), n),
        SparseVector([3], np.array([8.0]), n),
        SparseVector([0], np.array([2.0]), n),
    ]
    results = simulate(
        4, lambda comm: sparsecoll.allreduce(comm, inputs[comm.rank], GTopk(k=1), return_reduction=True)
    ).results
    assert results[0].value.indices.tolist() == [0] and results[0].value.values.tolist() == [9.0]
    assert [r.contributed.nnz for r in results] == [1, 0, 0, 0]


@pytest.mark.parametrize("P", [2, 3, 5, 8, 13])
@pytest.mark.parametrize("value_dtype", [None, "float16"])
def test_random_floats_conserve_mass(P, value_dtype):
    def program(comm):
        x = np.random.default_rng(comm.rank).standard_normal(3000).astype(np.float32)
        return sparsecoll.allreduce(comm, x, "gtopk", k=200, value_dtype=value_dtype, return_reduction=True)

    results = simulate(P, program).results
    total = sum(r.contributed.to_dense().astype(np.float64) for r in results)
    np.testing.assert_allclose(total, results[0].value.to_dense(), atol=1e-5)


def test_nan_that_arises_in_a_sum_raises_on_every_rank():
    def program(comm):
        x = SparseVector([1, 5], np.array([np.inf if comm.rank % 2 else -np.inf, 1.0]), 9)
        with pytest.raises(ValueError, match="got NaN"):
            sparsecoll.allreduce(comm, x, "gtopk")
        return sparsecoll.allreduce(comm, SparseVector([2], np.ones(1), 9), "gtopk").values[0]

    assert simulate(5, program).results == [5.0] * 5
