"""CLT-k: ranks lead in turn, k entries at any P, no index but the leader's travels, and a residual loses nothing."""

import formulas
import numpy as np
import pytest
from cases import same_bits
from volume import HEADER_WORDS, measure

import sparsecoll
from sparsecoll import CLTk, Residual, simulate


@pytest.mark.parametrize("P", [2, 3, 8, 16])
@pytest.mark.parametrize("name", ["random", "same"])
def test_indices_and_values_take_at_most_the_words_of_the_formula(name, P):
    k = 2000
    volume = measure(CLTk, name, P, k)
    assert volume.received <= formulas.cltk_words(k, P) + HEADER_WORDS * P
    assert volume.received < k / 3 + 2 * k * (P - 1) / P + HEADER_WORDS * P  # indices are coded
    assert volume.nnz == k


@pytest.mark.parametrize("P", [1, 2, 5])
def test_ranks_lead_in_turn_and_nothing_is_lost(P):
    n, k, steps = 300, 20, 7
    gradients = np.random.default_rng(0).integers(-9, 9, (steps, P, n)).astype(np.float32)

    def program(comm):
        algo, residual, leaders, applied = CLTk(), Residual(n), [], np.zeros(n, np.float32)
        for step in range(steps):
            acc = residual.compensate(gradients[step][comm.rank])
            expected = acc.topk(k).indices
            y = sparsecoll.allreduce(comm, acc.values, algo, k=k, return_reduction=True)
            residual.update(y.contributed)
            applied += y.value.to_dense()
            if np.array_equal(y.value.indices, expected):
                leaders.append(step)
        return leaders, applied, residual.array, algo.state_dict()

    results = simulate(P, program).results
    for rank, (leaders, _, _, state) in enumerate(results):
        assert set(range(rank, steps, P)) <= set(leaders) and state["calls"] == steps
    rest = results[0][1] + np.sum([residual for _, _, residual, _ in results], axis=0)
    np.testing.assert_array_equal(rest, gradients.sum(axis=(0, 1)))


def test_a_saved_state_goes_on_with_the_same_leader():
    x = [np.random.default_rng(rank).standard_normal(500).astype(np.float32) for rank in range(3)]

    def program(comm):
        first, second = CLTk(k=9), CLTk(k=9)
        sparsecoll.allreduce(comm, x[comm.rank], first)
        second.load_state_dict(first.state_dict())
        return [sparsecoll.allreduce(comm, x[comm.rank], algo) for algo in (first, second)]

    for a, b in simulate(3, program).results:
        assert same_bits(a, b) and a.indices.tolist() == np.sort(np.argsort(-np.abs(x[1]))[:9]).tolist()


def test_a_selector_is_the_leaders():
    x = np.arange(100, dtype=np.float32)
    algo = lambda: CLTk(selector=sparsecoll.select.RandomK(3))  # noqa: E731
    results = simulate(3, lambda comm: sparsecoll.allreduce(comm, x, algo(), k=10)).results
    assert all(same_bits(y, results[0]) and y.nnz == 10 for y in results)
    np.testing.assert_array_equal(results[0].values, 3 * results[0].indices.astype(np.float32))


def test_a_state_that_is_loaded_after_a_failed_call_stays():
    """The next call discarded it."""

    def program(comm):
        algo, x = CLTk(k=2), np.arange(1, 11.0) * (comm.rank + 1)
        sparsecoll.allreduce(comm, x, algo)
        saved = algo.state_dict()
        with pytest.raises(ValueError, match="NaN"):
            sparsecoll.allreduce(comm, x * np.nan, algo)
        algo.load_state_dict(saved)
        sparsecoll.allreduce(comm, x, algo)
        return algo.state_dict()["calls"]

    assert simulate(3, program).results == [2] * 3


def test_a_state_of_another_algorithm_is_refused_and_changes_nothing():
    algo, other = sparsecoll.OkTopk(), CLTk()
    before, state = algo.state_dict(), {**other.state_dict(), "calls": 7}
    with pytest.raises(ValueError, match="state: expected that of OkTopk, got one without "):
        algo.load_state_dict(state)
    assert algo.state_dict() == before
