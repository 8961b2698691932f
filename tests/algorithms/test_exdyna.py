"""ExDyna: partitions that rotate and are balanced, a threshold that holds k, and a volume that does not grow with P."""

import formulas
import numpy as np
import pytest
from volume import HEADER_WORDS, measure

import sparsecoll
from sparsecoll import ExDyna, Residual, simulate


@pytest.mark.parametrize("P", [2, 3, 8, 16])
@pytest.mark.parametrize("name", ["random", "same"])
def test_indices_and_values_take_at_most_the_words_of_the_formula(name, P):
    k = 2000
    volume = measure(ExDyna, name, P, k)
    search = 60 * P  # the first call counts keys
    assert volume.received <= formulas.exdyna_words(k, P) + (HEADER_WORDS + 6) * P + search
    assert volume.nnz <= k


def heavy(rng, n):
    """Values of which the first tenth is ten times as large."""
    return (rng.standard_normal(n) * np.where(np.arange(n) < n // 10, 10, 1)).astype(np.float32)


@pytest.mark.parametrize("P", [1, 3, 4])
def test_about_k_entries_in_every_call_from_balanced_partitions_that_rotate(P):
    n, k, steps = 20_000, 400, 12

    def program(comm):
        rng, algo, residual, rows = np.random.default_rng(comm.rank), ExDyna(), Residual(n), []
        applied, total = np.zeros(n), np.zeros(n)
        for _ in range(steps):
            gradient = heavy(rng, n)
            total += gradient
            acc = residual.compensate(gradient)
            edges, call = list(algo._edges), algo._calls
            y = sparsecoll.allreduce(comm, acc.values.copy(), algo, k=k, return_reduction=True)
            if call:
                own = (comm.rank + call) % P
                inside = y.value.indices[(y.value.indices >= edges[own]) & (y.value.indices < edges[own + 1])]
                smallest = np.abs(acc.values[inside]).min()
                taken = np.flatnonzero(np.abs(acc.values[edges[own] : edges[own + 1]]) >= smallest)
                assert taken.size == inside.size  # by its own values, in its own partition, by one threshold
                rows.append(inside.size)
            residual.update(y.contributed)
            applied += y.value.to_dense()
        return rows, applied, total - residual.array

    results = simulate(P, program).results
    counts = np.array([rows for rows, _, _ in results])
    assert (np.abs(counts.sum(axis=0) - k) <= 0.2 * k).all()
    assert counts[:, 3:].max() <= 2 * k / P
    entered = np.sum([share for _, _, share in results], axis=0)
    np.testing.assert_allclose(results[0][1], entered, atol=1e-3)


def test_a_jump_of_the_values_is_noticed_before_anything_is_sent():
    n, k = 10_000, 100

    def program(comm):
        algo, rng = ExDyna(k=k), np.random.default_rng(comm.rank)
        return [sparsecoll.allreduce(comm, rng.standard_normal(n) * scale, algo).nnz for scale in (1, 1, 1000, 1e-3)]

    for nnz in simulate(3, program).results:
        assert all(k <= count * 1.2 and count <= 1.2 * k for count in nnz)


def test_a_nan_raises_on_every_rank():
    def program(comm):
        x = np.ones(90)
        x[30 * comm.rank + 5] = np.nan if comm.rank == 1 else 2
        with pytest.raises(ValueError, match="NaN"):
            sparsecoll.allreduce(comm, x, "exdyna", k=4)
        with pytest.raises(sparsecoll.NonFiniteError, match=r"NaN on ranks \[1\]"):
            sparsecoll.allreduce(comm, x, "exdyna", k=4, nonfinite="pass")
        return sparsecoll.allreduce(comm, np.ones(90), "exdyna", k=4).nnz

    assert simulate(3, program).results == [4] * 3


def test_a_saved_state_goes_on_with_the_same_bits():
    def program(comm):
        first, second = ExDyna(k=50), ExDyna(k=50)
        x = [np.random.default_rng([comm.rank, step]).standard_normal(2000) for step in range(4)]
        for step in range(3):
            sparsecoll.allreduce(comm, x[step], first)
        second.load_state_dict(first.state_dict())
        a, b = (sparsecoll.allreduce(comm, x[3], algo) for algo in (first, second))
        return np.array_equal(a.indices, b.indices) and np.array_equal(a.values, b.values)

    assert simulate(3, program).results == [True] * 3


@pytest.mark.parametrize("options", [{"tau_prime": 0}, {"tolerance": -1}, {"selector": sparsecoll.select.TopK()}])
def test_options_out_of_range(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        ExDyna(**options)
