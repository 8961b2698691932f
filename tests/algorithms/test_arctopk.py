"""ARC-Top-K: rows chosen by a sketch of the sum, a volume without indices, and a residual that loses nothing."""

import formulas
import numpy as np
import pytest
from cases import same_bits
from volume import HEADER_WORDS, measure

import sparsecoll
from sparsecoll import ARCTopK, Residual, SparseVector, simulate
from sparsecoll.algorithms.arctopk import random_signs


@pytest.mark.parametrize("P", [2, 3, 8, 16])
@pytest.mark.parametrize("name", ["random", "same"])
def test_sketch_and_rows_take_at_most_the_words_of_the_formula(name, P):
    k, columns = 2000, 100
    volume = measure(lambda: ARCTopK(columns=columns), name, P, k)
    assert volume.received <= formulas.arctopk_words(400_000, k, P, columns) + HEADER_WORDS * P


@pytest.mark.parametrize("P", [3, 8])
def test_volume_of_few_entries_is_that_of_the_sketch(P):
    n, k = 400_000, 200  # below sqrt(n)
    volume = measure(ARCTopK, "random", P, k, n)
    words = 2 * (k + n / k) * (P - 1) / P
    assert 0.9 * words <= volume.received <= words + HEADER_WORDS * P


def test_the_signs_are_balanced_and_new_in_each_call():
    signs = random_signs(3, 500, 4)
    assert set(np.unique(signs)) == {-1, 1} and abs(signs.mean()) < 0.1
    assert (np.abs(signs.T.astype(int) @ signs - 500 * np.eye(4, dtype=int)) < 100).all()
    assert (signs != random_signs(4, 500, 4)).any()


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("P", [1, 2, 5])
def test_rows_that_are_large_in_the_sum_alone_are_found(P, sparse):
    """Each rank has large values that cancel in the sum, and a small share of what does not."""
    n, columns = 1003, 10

    def program(comm):
        x = np.zeros(n)
        x[500:510] = 3.0 / P
        if P > 1:
            x[20:30] = 100 if comm.rank == 0 else -100 if comm.rank == 1 else 0
        x[-1] = 1.0 / P  # in the last row, which is short
        given = sparsecoll.DenseVector(x).to_sparse() if sparse else x
        y = sparsecoll.allreduce(comm, given, ARCTopK(columns=columns), k=20)
        return y if sparse else sparsecoll.as_vector(y)

    for y in simulate(P, program).results:
        dense = y.to_dense()
        assert np.flatnonzero(dense).tolist() == [*range(500, 510), n - 1]
        np.testing.assert_allclose(dense[500:510], 3)


def test_what_is_not_applied_waits_in_residuals():
    n, k, P, steps = 300, 40, 3, 6
    gradients = np.random.default_rng(0).integers(-9, 9, (steps, P, n)).astype(np.float32)

    def program(comm):
        algo, residual, applied = ARCTopK(columns=8), Residual(n), np.zeros(n, np.float32)
        for step in range(steps):
            acc = residual.compensate(gradients[step][comm.rank])
            y = sparsecoll.allreduce(comm, acc.values, algo, k=k, return_reduction=True)
            residual.update(y.contributed)
            applied += y.value.to_dense()
        return applied, residual.array, algo.state_dict()

    results = simulate(P, program).results
    assert results[0][2] == {"calls": steps}
    rest = results[0][0] + np.sum([residual for _, residual, _ in results], axis=0)
    np.testing.assert_array_equal(rest, gradients.sum(axis=(0, 1)))


def test_a_saved_state_goes_on_with_the_same_signs():
    def program(comm):
        first, second = ARCTopK(k=64), ARCTopK(k=64)
        x = np.random.default_rng(comm.rank).standard_normal(2000)
        sparsecoll.allreduce(comm, x, first)
        second.load_state_dict(first.state_dict())
        return same_bits(*(sparsecoll.allreduce(comm, x, algo) for algo in (first, second)))

    assert simulate(3, program).results == [True] * 3


def test_a_nan_raises_on_every_rank():
    def program(comm):
        x = np.ones(90)
        x[7] = np.nan if comm.rank == 1 else 2
        with pytest.raises(sparsecoll.NonFiniteError, match="got NaN"):
            sparsecoll.allreduce(comm, x, "arctopk", k=4, nonfinite="pass")
        return sparsecoll.allreduce(comm, np.ones(90), "arctopk", k=4).nnz

    assert simulate(3, program).results == [4] * 3


@pytest.mark.parametrize("options", [{"columns": 0}, {"sketch": 0}, {"selector": sparsecoll.select.TopK()}])
def test_options_out_of_range(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        ARCTopK(**options)


def test_few_entries_of_a_very_long_vector_are_refused_and_none_is_fine():
    def program(comm):
        x = sparsecoll.SparseVector([comm.rank], np.ones(1), 2**40)
        with pytest.raises(ValueError, match="sketch would have 549755813888 values: use columns="):
            sparsecoll.allreduce(comm, x, "arctopk", k=2)
        y = sparsecoll.allreduce(comm, x, "arctopk", k=0)
        return y.nnz, sparsecoll.allreduce(comm, x, ARCTopK(columns=2**20, sketch=1), k=2**20).nnz

    assert simulate(2, program).results == [(0, 2)] * 2


@pytest.mark.parametrize("x", [np.zeros(0, np.float16), SparseVector.empty(0, np.float32)], ids=["dense", "sparse"])
@pytest.mark.parametrize("P", [1, 3])
def test_vectors_without_coordinates(P, x):
    assert simulate(P, lambda comm: sparsecoll.allreduce(comm, x, "arctopk", k=1).nnz).results == [0] * P
