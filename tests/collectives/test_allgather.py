"""allgather: every rank has every vector, as it was given."""

import numpy as np
import pytest
from cases import DISTRIBUTIONS, DTYPES, RANKS, case, pairwise, same_bits

import sparsecoll
from sparsecoll import simulate


@pytest.mark.parametrize(("P", "name", "dtype"), pairwise(RANKS, DISTRIBUTIONS, DTYPES))
def test_every_rank_has_every_vector(P, name, dtype):
    inputs = [case(name, rank, P, dtype) for rank in range(P)]
    for gathered in simulate(P, lambda comm: sparsecoll.allgather(comm, inputs[comm.rank])).results:
        assert all(same_bits(a, b) for a, b in zip(gathered, inputs, strict=True))


def test_the_callers_kind_comes_back():
    sparse = pytest.importorskip("scipy.sparse")
    x = sparse.random_array((6, 7), density=0.3, format="csr", dtype=np.float64)
    assert simulate(2, lambda comm: sparsecoll.allgather(comm, x)).results[0][1].format == "csr"
