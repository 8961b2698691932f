"""allgather: every rank has every vector, as it was given."""

import numpy as np
import pytest
from cases import DISTRIBUTIONS, RANKS, case, same_bits

import sparsecoll
from sparsecoll import simulate


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("P", RANKS)
def test_every_rank_has_every_vector(P, name):
    inputs = [case(name, rank, P) for rank in range(P)]
    for gathered in simulate(P, lambda comm: sparsecoll.allgather(comm, inputs[comm.rank])).results:
        assert all(same_bits(a, b) for a, b in zip(gathered, inputs, strict=True))


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32", "int64"])
def test_vectors_of_every_dtype_are_gathered(dtype):
    inputs = [case("random", rank, 4, dtype) for rank in range(4)]
    results = simulate(4, lambda comm: sparsecoll.allgather(comm, inputs[comm.rank])).results
    assert all(same_bits(gathered[3], inputs[3]) for gathered in results)


def test_the_callers_kind_comes_back():
    sparse = pytest.importorskip("scipy.sparse")
    x = sparse.random_array((6, 7), density=0.3, format="csr", dtype=np.float64)
    assert simulate(2, lambda comm: sparsecoll.allgather(comm, x)).results[0][1].format == "csr"
