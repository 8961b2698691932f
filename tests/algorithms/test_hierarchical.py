"""Hierarchical: the result of the inner algorithm, and bytes between nodes that do not grow with ranks per node."""

import copy
from functools import partial

import numpy as np
import pytest
from cases import DISTRIBUTIONS, case, pairwise, same_bits
from oracles import oracle

import sparsecoll
from sparsecoll import ALGORITHMS, Hierarchical, SparseVector, simulate

INNER = [name for name in ALGORITHMS if name != "hierarchical"]


@pytest.mark.parametrize(
    ("inner", "name", "shape"), pairwise(INNER, DISTRIBUTIONS, [(1, 1), (5, 2), (7, 7), (12, 4)]), ids=str
)
def test_any_inner_algorithm_sums_over_nodes_with_the_same_bits(inner, name, shape):
    P, ranks_per_node = shape
    inputs = [case(name, rank, P) for rank in range(P)]
    results = simulate(
        P,
        lambda comm: sparsecoll.allreduce(comm, inputs[comm.rank], Hierarchical(inner=inner), return_reduction=True),
        ranks_per_node=ranks_per_node,
    ).results
    assert all(same_bits(results[0].value, r.value) for r in results)
    entered = sum(r.contributed.to_dense() for r in results)
    np.testing.assert_array_equal(entered, results[0].value.to_dense())
    if ALGORITHMS[inner]().semantics != "approximate_top_k":
        np.testing.assert_array_equal(entered, oracle(inputs, inner, max(x.nnz for x in inputs)))


@pytest.mark.parametrize("inner", INNER)
def test_dense_arrays_are_summed_with_the_same_bits(inner):
    """Also of inner algorithms that take dense vectors as they are."""
    inputs = [np.random.default_rng(rank).standard_normal(600) for rank in range(5)]

    def program(comm):
        algo = Hierarchical(inner=inner)
        return sparsecoll.allreduce(comm, inputs[comm.rank], algo, k=40, return_reduction=True)

    results = simulate(5, program, ranks_per_node=2).results
    assert all(same_bits(results[0].value, r.value) for r in results) and results[0].value.nnz
    entered = sum(r.contributed.to_dense() for r in results)
    np.testing.assert_allclose(entered, results[0].value.to_dense(), atol=1e-12)


@pytest.mark.parametrize("value_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("inner", INNER)
def test_rounding_on_the_wire_is_conserved(inner, value_dtype):
    def program(comm):
        rng = np.random.default_rng(comm.rank)
        indices = np.sort(rng.choice(400, 80, replace=False))
        x = SparseVector(indices, (rng.integers(-(2**14), 2**14, 80) / 512).astype(np.float32), 400)
        return sparsecoll.allreduce(
            comm, x, Hierarchical(inner=inner), k=60, value_dtype=value_dtype, return_reduction=True
        )

    results = simulate(6, program, ranks_per_node=2).results
    assert all(same_bits(results[0].value, r.value) for r in results)
    entered = sum(r.contributed.to_dense().astype(np.float64) for r in results)
    np.testing.assert_array_equal(entered, results[0].value.to_dense())


@pytest.mark.parametrize("inner", ["oktopk", "allgather", "gtopk"])
def test_a_node_whose_ranks_have_the_same_indices_sends_what_one_rank_does(inner):
    """Ranks of a node with the same support (data parallel ranks see similar gradients)."""

    def between(ranks_per_node):
        def program(comm):
            rng = np.random.default_rng(comm.rank // ranks_per_node)
            x = SparseVector(np.sort(rng.choice(50_000, 1000, replace=False)), np.ones(1000, np.float32), 50_000)
            y = sparsecoll.allreduce(comm, x, Hierarchical(inner=inner), return_reduction=True)
            return sum(c.bytes_received for name, c in y.traffic.phases.items() if name not in ("inside", "agree"))

        return max(simulate(4 * ranks_per_node, program, ranks_per_node=ranks_per_node).results)

    assert between(1) * 1.05 >= between(2) >= between(8) * 0.95


def test_time_on_nodes_of_eight_ranks():
    """The flat algorithm sends eight times through each node's port."""

    def program(comm, algo):
        rng = np.random.default_rng(comm.rank // 8)
        x = SparseVector(np.sort(rng.choice(500_000, 10_000, replace=False)), np.ones(10_000, np.float32), 500_000)
        sparsecoll.allreduce(comm, x, algo)

    flat, nodes = (
        simulate(32, lambda comm, a=algo: program(comm, a), ranks_per_node=8).seconds
        for algo in ("allgather", Hierarchical(inner="allgather"))
    )
    assert nodes < 0.4 * flat


def test_an_error_between_nodes_reaches_every_rank():
    def program(comm):
        x = SparseVector([1], np.array([np.inf if comm.rank // 2 % 2 else -np.inf]), 9)
        with pytest.raises(ValueError, match="got NaN"):
            sparsecoll.allreduce(comm, x, "hierarchical")
        return sparsecoll.allreduce(comm, SparseVector([2], np.ones(1), 9), "hierarchical").values[0]

    assert simulate(8, program, ranks_per_node=2).results == [8.0] * 8


@pytest.mark.parametrize(("k", "expected"), [(None, 7), (5, 5)])
def test_k_is_that_of_inner_unless_given(k, expected):
    def program(comm):
        x = np.random.default_rng(comm.rank).standard_normal(1000)
        return sparsecoll.allreduce(comm, x, Hierarchical(k=k, inner=sparsecoll.OkTopk(k=7))).nnz

    assert simulate(4, program, ranks_per_node=2).results == [expected] * 4


def test_state_is_saved_and_wrong_options_are_refused():
    algorithm = Hierarchical(inner=sparsecoll.OkTopk(tau_prime=4), k=5)
    x = np.random.default_rng(0).standard_normal(1000)
    simulate(1, lambda comm: sparsecoll.allreduce(comm, x, algorithm))
    other = Hierarchical(inner=sparsecoll.OkTopk(tau_prime=4), k=5)
    other.load_state_dict(algorithm.state_dict())
    assert other.state_dict() == algorithm.state_dict() and algorithm.state_dict()["between"]["calls"] == 1
    assert Hierarchical(inner="allgather").semantics == "exact_sum"
    with pytest.raises(ValueError, match="algo: expected one of"):
        Hierarchical(inner="none")
    with pytest.raises(ValueError, match="ranks_per_node: expected at least 1"):
        simulate(2, lambda comm: None, ranks_per_node=0)


def test_ranks_that_do_not_lead_their_node_get_the_dtype_of_the_input():
    """Such as bfloat16, which no format decodes to."""
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16

    def program(comm):
        x = SparseVector([1, 2 + comm.rank], np.array([1 / 3, 2.0], bfloat16), 9)
        y = sparsecoll.allreduce(comm, x, "hierarchical", op="mean")
        return y.dtype.name, y.values.tobytes()

    results = simulate(4, program, ranks_per_node=2).results
    assert results[0][0] == "bfloat16" and len(set(results)) == 1


@pytest.mark.parametrize("inner", ["cltk", "oktopk", sparsecoll.Auto(want="top_k_of_sum")], ids=str)
def test_a_state_is_loaded_on_other_nodes(inner):
    """Whose first ranks have had no state."""
    x = [[np.random.default_rng([rank, t]).standard_normal(300) for t in range(6)] for rank in range(4)]

    def run(comm, states=None):
        algo = Hierarchical(inner=copy.deepcopy(inner))
        if states:
            algo.load_state_dict(states[comm.rank])
        sums = [sparsecoll.allreduce(comm, own, algo, k=5) for own in x[comm.rank]]
        return algo.state_dict(), [y.values.tobytes() for y in sums]

    states = [state for state, _ in simulate(4, run, ranks_per_node=4).results]
    for ranks_per_node in (2, 1):
        results = simulate(4, partial(run, states=states), ranks_per_node=ranks_per_node).results
        assert len({tuple(sums) for _, sums in results}) == 1


def test_no_coordinate_waits_for_ever_with_fewer_entries_than_ranks():
    def program(comm):
        algo, acc = Hierarchical(inner="spardl"), np.zeros(40)
        for _ in range(400):
            acc += 1
            acc -= sparsecoll.allreduce(comm, acc, algo, k=1, return_reduction=True).contributed.to_dense()
        return acc.max()

    assert max(simulate(4, program, ranks_per_node=2).results) < 200


@pytest.mark.parametrize("inner", INNER)
def test_sparse_vectors_are_selected_like_dense_ones(inner):
    def program(comm, sparse):
        x = np.random.default_rng(comm.rank).standard_normal(1000)
        x = SparseVector.from_dense(x) if sparse else x
        y = sparsecoll.allreduce(comm, x, Hierarchical(inner=inner), k=5, return_reduction=True)
        return y.contributed.nnz, y.traffic.phases["inside"].bytes_sent

    sparse, dense = (simulate(4, partial(program, sparse=kind), ranks_per_node=2).results for kind in (True, False))
    assert all(nnz <= 5 for nnz, _ in sparse) and max(sent for _, sent in sparse) < 2000, (sparse, dense)
