"""reduce: the sum on the root, of the caller's kind; the same errors on all ranks."""

import numpy as np
import pytest
from cases import DISTRIBUTIONS, RANKS, case

import sparsecoll
from sparsecoll import simulate


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("P", RANKS)
def test_the_root_gets_the_sum_and_others_nothing(P, name):
    inputs, root = [case(name, rank, P) for rank in range(P)], P // 2
    total = np.sum([x.to_dense() for x in inputs], axis=0, dtype=np.float32)
    results = simulate(P, lambda comm: sparsecoll.reduce(comm, inputs[comm.rank], root)).results
    assert [y is None for y in results] == [rank != root for rank in range(P)]
    np.testing.assert_array_equal(results[root].to_dense(), total)


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32", "int64"])
def test_vectors_of_every_dtype_are_summed(dtype):
    inputs = [case("random", rank, 4, dtype) for rank in range(4)]
    total = np.sum([x.to_dense() for x in inputs], axis=0, dtype=dtype)
    y = simulate(4, lambda comm: sparsecoll.reduce(comm, inputs[comm.rank])).results[0]
    assert y.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(y.to_dense(), total)


def test_entries_are_selected_first_and_values_travel_narrow():
    dense = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    y, _ = simulate(2, lambda comm: sparsecoll.reduce(comm, dense, density=0.01, value_dtype="float16")).results
    top = sparsecoll.select.topk(dense, 10)
    assert y.indices.tolist() == top.indices.tolist() and y.dtype == np.float32
    np.testing.assert_array_equal(y.values, 2 * top.values.astype(np.float16).astype(np.float32))


def test_the_callers_kind_comes_back():
    sparse = pytest.importorskip("scipy.sparse")
    x = sparse.random_array((6, 7), density=0.3, format="csr", dtype=np.float64)
    y = simulate(2, lambda comm: sparsecoll.reduce(comm, x, 1)).results[1]
    np.testing.assert_allclose(y.toarray(), 2 * x.toarray())
