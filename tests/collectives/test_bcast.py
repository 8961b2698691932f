"""bcast: the root's vector on every rank."""

import numpy as np
import pytest
from cases import DISTRIBUTIONS, DTYPES, RANKS, case, pairwise, same_bits

import sparsecoll
from sparsecoll import SparseVector, simulate


@pytest.mark.parametrize(("P", "name", "dtype"), pairwise(RANKS, DISTRIBUTIONS, DTYPES))
def test_every_rank_has_the_roots_vector(P, name, dtype):
    inputs, root = [case(name, rank, P, dtype) for rank in range(P)], P // 2

    def program(comm):
        return sparsecoll.bcast(comm, inputs[root] if comm.rank == root else None, root)

    assert all(same_bits(y, inputs[root]) for y in simulate(P, program).results)


def test_values_travel_narrow():
    x = SparseVector.from_dense(np.random.default_rng(0).standard_normal(1000).astype(np.float32))
    y = simulate(2, lambda comm: sparsecoll.bcast(comm, x, value_dtype="bfloat16")).results[1]
    np.testing.assert_allclose(y.values, x.values, rtol=2**-8)
    assert (y.values != x.values).any()


@pytest.mark.parametrize("P", [1, 2, 3, 5])
@pytest.mark.parametrize("form", ["coo_array", "csr_matrix", "csc_array", "bsr_array"])
def test_type_and_shape_are_the_roots_on_every_rank(form, P):
    sparse = pytest.importorskip("scipy.sparse")
    dense = np.kron(np.eye(3), np.ones((2, 4)))
    x = getattr(sparse, form)(dense)
    for y in simulate(P, lambda comm: sparsecoll.bcast(comm, x if comm.rank == 0 else None)).results:
        assert type(y) is type(x) and y.shape == (6, 12) and y.dtype == np.float64
        np.testing.assert_array_equal(y.toarray(), dense)
        assert getattr(y, "blocksize", None) == getattr(x, "blocksize", None)


def test_tuples_and_tensors_arrive_as_their_type():
    results = simulate(2, lambda comm: sparsecoll.bcast(comm, ([1, 4], np.ones(2, np.float32), 6))).results
    assert all(isinstance(y, tuple) and y[0].tolist() == [1, 4] and y[2] == 6 for y in results)
    sparse, torch = pytest.importorskip("sparse"), pytest.importorskip("torch")
    dense = np.arange(24.0).reshape(2, 3, 4)
    for form in ("coo", "gcxs"):
        x = sparse.COO.from_numpy(dense).asformat(form)
        for y in simulate(3, lambda comm, x=x: sparsecoll.bcast(comm, x if comm.rank == 1 else None, 1)).results:
            assert type(y) is type(x)
            np.testing.assert_array_equal(y.todense(), dense)
    x = torch.from_numpy(dense).to_sparse(2)
    for y in simulate(2, lambda comm: sparsecoll.bcast(comm, x if comm.rank == 0 else None)).results:
        assert y.sparse_dim() == 2 and torch.equal(y.to_dense(), x.to_dense())
