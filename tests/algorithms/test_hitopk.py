"""HiTopKComm: the sum over nodes of the top k/m of each chunk of a node's sum; words between nodes; nothing lost."""

import numpy as np
import pytest
from cases import case, same_bits
from oracles import oracle_top

import sparsecoll
from sparsecoll import HiTopK, SparseVector, simulate
from sparsecoll.algorithms.primitives import estimates
from sparsecoll.testing import check_algorithm

SHAPES = [(1, 1), (3, 1), (5, 2), (6, 3), (7, 3), (7, 7), (12, 4)]  # (P, ranks a node)


def expected(inputs, k, on_node):
    """On dense vectors; sums of the inputs are exact."""
    P, n = len(inputs), inputs[0].length
    nodes = [range(first, min(first + on_node, P)) for first in range(0, P, on_node)]
    m = min(len(node) for node in nodes)
    edges, shares = [n * j // m for j in range(m + 1)], [k * j // m for j in range(m + 1)]
    total = np.zeros(n, inputs[0].dtype)
    for node in nodes:
        whole = np.sum([inputs[rank].to_dense() for rank in node], axis=0, dtype=total.dtype)
        for j in range(m):
            part = slice(edges[j], edges[j + 1])
            total[part] += oracle_top(whole[part], shares[j + 1] - shares[j])
    return total


def test_hitopk_keeps_the_contract():
    check_algorithm(HiTopK())


def run(inputs, on_node, given, **options):
    algorithm = options.pop("algorithm", HiTopK)

    def program(comm):
        return sparsecoll.allreduce(comm, given[comm.rank], algorithm(), return_reduction=True, **options)

    return simulate(len(inputs), program, ranks_per_node=on_node).results


@pytest.mark.parametrize(("P", "on_node"), SHAPES)
@pytest.mark.parametrize("name", ["random", "ties", "empty_ranks", "cancelling", "all_empty"])
def test_equals_the_oracle_with_the_same_bits_and_nothing_lost(name, P, on_node):
    inputs = [case(name, rank, P) for rank in range(P)]
    want = expected(inputs, 40, on_node)
    for given, options in (
        (inputs, {}),
        (inputs, {"format": "dense"}),
        ([x.to_dense() for x in inputs], {}),
        ([x if rank % 2 else x.to_dense() for rank, x in enumerate(inputs)], {}),
    ):
        results = run(inputs, on_node, given, k=40, **options)
        assert all(same_bits(results[0].value, r.value) for r in results)
        np.testing.assert_array_equal(results[0].value.to_dense(), want)
        np.testing.assert_array_equal(np.sum([r.contributed.to_dense() for r in results], axis=0), want)


@pytest.mark.parametrize(
    ("dtype", "value_dtype"), [("float16", None), ("bfloat16", None), ("float32", "float16"), ("int64", None)]
)
@pytest.mark.parametrize("on_node", [1, 3])
def test_dtypes_and_rounding_are_conserved(dtype, value_dtype, on_node):
    scale = 1 if dtype == "int64" else 512
    dtype = dtype if dtype != "bfloat16" else pytest.importorskip("ml_dtypes").bfloat16
    inputs = []
    for rank in range(6):
        rng = np.random.default_rng(rank)
        indices = np.sort(rng.choice(400, 80, replace=False))
        inputs.append(SparseVector(indices, (rng.integers(-(2**14), 2**14, 80) / scale).astype(dtype), 400))
    results = run(inputs, on_node, inputs, k=60, value_dtype=value_dtype)
    assert all(same_bits(results[0].value, r.value) for r in results) and results[0].value.dtype == dtype
    entered = np.sum([r.contributed.to_dense().astype(np.float64) for r in results], axis=0)
    np.testing.assert_array_equal(entered, results[0].value.to_dense())


@pytest.mark.parametrize(("P", "on_node"), [(8, 4), (9, 3), (10, 2)])
def test_words_and_messages_between_nodes_are_those_of_the_paper(P, on_node):
    """2(k/m)(N-1) words of COO, and for each message gathered 16 bytes of header and, from 4 nodes on, 8 of size."""
    k, n, nodes = 3600, 90_000, P // on_node

    def program(comm):
        x = np.random.default_rng(comm.rank).standard_normal(n).astype(np.float32)
        y = sparsecoll.allreduce(comm, x, HiTopK(), k=k, format="coo", return_reduction=True)
        return y.traffic.phases["between"], y.traffic.phases["inside"].bytes_received

    for between, inside in simulate(P, program, ranks_per_node=on_node).results:
        assert between.bytes_received == (nodes - 1) * (8 * k // on_node + (16 if nodes <= 3 else 24))
        assert between.messages_sent == estimates.rounds(nodes)
        summed = 4 * n * (on_node - 1) / on_node + 8 * k * nodes * (on_node - 1) / on_node
        assert inside <= summed + 100 * on_node
        assert inside >= 4 * n * (on_node - 1) / on_node


def test_chunks_are_selected_from_by_the_selector():
    inputs = [np.random.default_rng(rank).standard_normal(40_000).astype(np.float32) for rank in range(4)]
    chosen = run(inputs, 2, inputs, k=1000, algorithm=lambda: HiTopK(selector=sparsecoll.select.MSTopK()))
    exact = run(inputs, 2, inputs, k=1000)
    assert all(same_bits(chosen[0].value, r.value) for r in chosen)
    assert chosen[0].value.nnz == pytest.approx(exact[0].value.nnz, rel=0.05)


def test_nan_that_arises_in_a_sum_raises_on_every_rank():
    def program(comm):
        x = SparseVector([1, 5], np.array([np.inf if comm.rank % 2 else -np.inf, 1.0]), 9)
        with pytest.raises(ValueError, match="got NaN"):
            sparsecoll.allreduce(comm, x, HiTopK(), k=9, nonfinite="pass")
        return sparsecoll.allreduce(comm, SparseVector([2], np.ones(1), 9), HiTopK(), k=9).values[0]

    assert simulate(5, program, ranks_per_node=2).results == [5.0] * 5


def test_mstopk_trains_with_it_and_gradient_mass_is_conserved():
    torch = pytest.importorskip("torch")
    from sparsecoll.torch import DistributedOptimizer
    from sparsecoll.torch.compressors import MSTopK

    def program(comm):
        torch.manual_seed(0)
        model = torch.nn.Linear(60, 50, bias=False).double()
        start = model.weight.detach().clone()
        options = {"dense_below": 0, "overlap": False}
        inner = torch.optim.SGD(model.parameters(), 1.0)
        compressor = MSTopK(0.02, algo=HiTopK())
        optimizer = DistributedOptimizer(inner, model.named_parameters(), comm, compressor, **options)
        given = torch.zeros_like(start)
        for step in range(4):
            gradient = torch.from_numpy(np.random.default_rng([comm.rank, step]).standard_normal((50, 60)))
            model.weight.grad = gradient.clone()
            given += gradient
            optimizer.step()
        residual = optimizer.state_dict()["sparsecoll"]["tensors"]
        return given.numpy(), (start - model.weight.detach()).numpy(), residual

    rows = simulate(4, program, ranks_per_node=2).results
    assert all((moved == rows[0][1]).all() for _, moved, _ in rows)
    kept = [next(iter(state["residual"].values())).numpy() for _, _, state in rows]
    np.testing.assert_allclose(sum(g for g, _, _ in rows), 4 * rows[0][1] + sum(kept), atol=1e-9)
