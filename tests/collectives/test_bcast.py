"""bcast: the root's vector on every rank."""

import numpy as np
import pytest
from cases import DISTRIBUTIONS, RANKS, case, same_bits

import sparsecoll
from sparsecoll import SparseVector, simulate


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("P", RANKS)
def test_every_rank_has_the_roots_vector(P, name):
    inputs, root = [case(name, rank, P) for rank in range(P)], P // 2

    def program(comm):
        return sparsecoll.bcast(comm, inputs[root] if comm.rank == root else None, root)

    assert all(same_bits(y, inputs[root]) for y in simulate(P, program).results)


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32", "int64"])
def test_every_dtype(dtype):
    inputs = [case("random", rank, 4, dtype) for rank in range(4)]
    results = simulate(4, lambda comm: sparsecoll.bcast(comm, inputs[comm.rank])).results
    assert all(same_bits(y, inputs[0]) for y in results)


def test_values_travel_narrow():
    x = SparseVector.from_dense(np.random.default_rng(0).standard_normal(1000).astype(np.float32))
    y = simulate(2, lambda comm: sparsecoll.bcast(comm, x, value_dtype="bfloat16")).results[1]
    np.testing.assert_allclose(y.values, x.values, rtol=2**-8)
    assert (y.values != x.values).any()


def test_what_the_root_finds_wrong_is_raised_on_all_ranks():
    def program(comm):
        with pytest.raises(TypeError, match="x: expected a SparseVector") as caught:
            sparsecoll.bcast(comm, "no" if comm.rank == 0 else None)
        return str(caught.value), sparsecoll.bcast(comm, SparseVector([1], np.ones(1), 9)).nnz

    assert len(set(simulate(3, program).results)) == 1


def test_the_callers_kind_comes_back_on_the_root():
    sparse = pytest.importorskip("scipy.sparse")
    x = sparse.random_array((6, 7), density=0.3, format="csr", dtype=np.float64)
    y, other = simulate(2, lambda comm: sparsecoll.bcast(comm, x)).results
    assert y.format == "csr" and isinstance(other, SparseVector)
