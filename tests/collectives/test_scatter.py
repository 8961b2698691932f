"""scatter: each rank has its vector of the root's list, or its region of the root's vector."""

import json
from collections import Counter, OrderedDict, defaultdict

import numpy as np
import pytest
from cases import N, case, same_bits

import sparsecoll
from sparsecoll import SparseVector, simulate


@pytest.mark.parametrize("name", ["random", "empty_ranks"])
@pytest.mark.parametrize("P", [1, 2, 3, 6])
def test_each_rank_receives_its_vector_of_a_list(P, name):
    inputs, root = [case(name, rank, P) for rank in range(P)], P - 1

    def program(comm):
        return sparsecoll.scatter(comm, inputs if comm.rank == root else None, root, format="coo")

    run = simulate(P, program)
    assert all(same_bits(a, b) for a, b in zip(run.results, inputs, strict=True))
    for rank, traffic in enumerate(run.traffic):
        counts = traffic.phases["scatter"]
        assert counts.messages_received == (rank != root) and counts.messages_sent == (P - 1) * (rank == root)
        if rank != root:
            assert 0 < counts.bytes_received - (16 + 8 * inputs[rank].nnz) < 100


@pytest.mark.parametrize("P", [1, 3, 5])
def test_regions_of_one_vector_are_those_of_reduce_scatter(P):
    x = case("random", 0, P)
    edges = [0, *sorted(np.random.default_rng(P).integers(0, N, P - 1).tolist()), N]

    def program(comm):
        mine = x if comm.rank == 0 else SparseVector.empty(N, x.dtype)
        for boundaries in (None, edges):
            part = sparsecoll.scatter(comm, x if comm.rank == 0 else None, boundaries=boundaries)
            assert same_bits(part, sparsecoll.reduce_scatter(comm, mine, boundaries))

    simulate(P, program)


@pytest.mark.parametrize("P", [1, 3])
def test_a_tuple_of_vectors_is_a_list(P):
    """A tuple of three vectors is not (indices, values, length)."""
    vectors = tuple(case("random", rank, P) for rank in range(P))

    def program(comm):
        root = comm.rank == 0
        assert same_bits(sparsecoll.scatter(comm, vectors if root else None), vectors[comm.rank])
        indices, values, length = sparsecoll.scatter(comm, ([0, 5], np.ones(2), np.int64(6)) if root else None)
        return length, len(indices), len(values)

    assert [length for length, _, _ in simulate(P, program).results] == [6] * P


MAPPINGS = {
    "words": lambda n: {f"word {i}": i % 7 for i in range(n)},
    "bytes": lambda n: defaultdict(float, {b"\xff%d" % i: i + 0.5 for i in range(n)}),
    "zeros in words": lambda n: OrderedDict((f"w\0{n - i}", i) for i in range(n)),
    "counter": lambda n: Counter({chr(0x10000 + i): 1 for i in range(n)}),
}


@pytest.mark.parametrize("P", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", MAPPINGS)
@pytest.mark.parametrize("n", [1, 4, 400])
def test_a_rank_receives_the_words_of_its_own_part(P, kind, n):
    x, root = MAPPINGS[kind](n), P - 1
    edges = [0, *[n // 2] * (P - 1), n]  # empty parts between the first and the last one

    def program(comm):
        mine = x if comm.rank == root else None
        return sparsecoll.scatter(comm, mine, root), sparsecoll.scatter(comm, mine, root, edges)

    run, items = simulate(P, program), list(x.items())
    equal = [n * rank // P for rank in range(P + 1)]
    for rank, results in enumerate(run.results):
        for y, bounds in zip(results, (equal, edges), strict=True):
            assert type(y) is type(x) and list(y.items()) == items[bounds[rank] : bounds[rank + 1]]
            assert getattr(y, "default_factory", 0) == getattr(x, "default_factory", 0)
        if rank != root:
            text = sum(
                len(json.dumps(key if isinstance(key, str) else key.decode("latin-1"))) + 3
                for y in results
                for key in y
            )
            received = run.traffic[rank].phases["scatter"].bytes_received
            assert received < 2 * 300 + 2 * text + 12 * sum(map(len, results))


def test_vectors_of_a_list_may_have_different_types():
    sparse = pytest.importorskip("scipy.sparse")
    matrix = sparse.csr_array(np.diag([1.0, 2.0]))
    x = [matrix, {5: 2}, SparseVector([1], np.ones(1, np.float16), 7), ([0, 3], np.array([1, 2]), 4)]
    a, b, c, d = simulate(4, lambda comm: sparsecoll.scatter(comm, x if comm.rank == 2 else None, 2)).results
    assert type(a) is type(matrix) and (a != matrix).nnz == 0
    assert b == {5: 2} and same_bits(c, x[2]) and d[1].tolist() == [1, 2] and d[2] == 4
    rows = simulate(2, lambda comm: sparsecoll.scatter(comm, matrix if comm.rank == 0 else None)).results
    np.testing.assert_array_equal([row.toarray() for row in rows], [np.diag([1.0, 0]), np.diag([0, 2.0])])
