"""gather: the root has every vector, as it was given; one message from every other rank."""

import numpy as np
import pytest
from cases import case, same_bits

import sparsecoll
from sparsecoll import SparseVector, simulate


@pytest.mark.parametrize("name", ["random", "empty_ranks", "all_empty"])
@pytest.mark.parametrize("P", [1, 2, 3, 6, 7])
def test_the_root_has_every_vector(P, name):
    inputs, root = [case(name, rank, P) for rank in range(P)], P // 2

    def program(comm):
        return sparsecoll.gather(comm, inputs[comm.rank], root, format="coo", check=False)

    run = simulate(P, program)
    assert [y is None for y in run.results] == [rank != root for rank in range(P)]
    assert all(same_bits(a, b) for a, b in zip(run.results[root], inputs, strict=True))
    counts = [traffic.phases["gather"] for traffic in run.traffic]
    assert [c.messages_received for c in counts] == [P - 1 if rank == root else 0 for rank in range(P)]
    assert counts[root].bytes_received == sum(16 + 8 * x.nnz for i, x in enumerate(inputs) if i != root)


def test_results_are_rounded_and_share_no_memory_with_the_input():
    x = SparseVector(np.arange(9), np.arange(9) / 7, 9)
    for narrow in (None, "float32"):
        parts = simulate(2, lambda comm, v=narrow: sparsecoll.gather(comm, x, value_dtype=v)).results[0]
        expected = x.values if narrow is None else x.values.astype(np.float32).astype(np.float64)
        for part in parts:
            np.testing.assert_array_equal(part.values, expected)
            assert not np.shares_memory(part.values, x.values) and not np.shares_memory(part.indices, x.indices)


def test_types_come_back():
    sparse = pytest.importorskip("scipy.sparse")
    x = sparse.random_array((6, 7), density=0.3, format="csr", dtype=np.float64)
    parts = simulate(3, lambda comm: sparsecoll.gather(comm, x * (comm.rank + 1), 1)).results[1]
    assert [type(part) for part in parts] == [type(x)] * 3
    np.testing.assert_array_equal(parts[2].toarray(), 3 * x.toarray())
    counters = simulate(2, lambda comm: sparsecoll.gather(comm, {3: 1, comm.rank: 5})).results[0]
    assert counters == [{0: 5, 3: 1}, {1: 5, 3: 1}]
