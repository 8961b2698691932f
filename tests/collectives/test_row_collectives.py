"""Collectives of rows on the simulator: every owner method, operation and P, types of rows, and wrong arguments."""

import numpy as np
import pytest

import sparsecoll
from sparsecoll import Allgather, CommunicationError, OkTopk, RowSparse, SparseVector, simulate
from sparsecoll.algorithms.owners import OWNERS, RowOwners
from sparsecoll.select import TopK

ALGORITHMS = ["auto", "allgather", *map(RowOwners, OWNERS)]
N, D = 40, 3


def rows_of(rank, dtype=np.float32, n=N, d=D):
    """Rows with Zipf-like ids and values that are multiples of 1/8, of which every sum is exact; rank 2 has none."""
    rng = np.random.default_rng(rank)
    count = 0 if rank == 2 else 25
    ids = (rng.zipf(1.2, count) - 1) % n
    return RowSparse.from_pairs(ids, (rng.integers(-64, 64, (count, d)) / 8).astype(dtype), n)


def stored(inputs):
    return np.unique(np.concatenate([x.rows for x in inputs]))


@pytest.mark.parametrize("P, d", [*((P, 3) for P in range(1, 8)), (3, 1), (5, 64)])
def test_sums_are_exact_and_the_same_on_all_ranks(P, d):
    inputs = [rows_of(rank, d=d) for rank in range(P)]
    expected = sum(x.to_dense() for x in inputs)
    for algo in ALGORITHMS:
        found = simulate(P, lambda comm, algo=algo: sparsecoll.allreduce(comm, inputs[comm.rank], algo)).results
        assert all(y == found[0] for y in found)
        assert np.array_equal(found[0].rows, stored(inputs)) and np.array_equal(found[0].to_dense(), expected)
    for owner in OWNERS:
        parts = simulate(P, lambda comm, o=owner: sparsecoll.reduce_scatter(comm, inputs[comm.rank], owner=o)).results
        assert RowSparse.join(parts) == found[0]
        if owner == "hash":
            assert all((part.owners(P) == rank).all() for rank, part in enumerate(parts))


@pytest.mark.parametrize("dtype", ["float16", "uint8", "complex64", "bool"])
@pytest.mark.parametrize("op", ["sum", "mean", "min", "prod", "replace"])
def test_operations_are_those_of_the_entries_of_vectors(dtype, op):
    if (op == "mean" and np.dtype(dtype).kind in "biu") or (op in ("min", "max") and dtype == "complex64"):
        with pytest.raises(TypeError, match="op: expected"):
            simulate(2, lambda comm: sparsecoll.allreduce(comm, rows_of(comm.rank, dtype), op=op))
        return
    inputs = [rows_of(rank, dtype) for rank in range(3)]
    flat = [SparseVector((x.rows[:, None] * D + np.arange(D)).reshape(-1), x.values.reshape(-1), N * D) for x in inputs]
    expected = simulate(3, lambda comm: sparsecoll.allreduce(comm, flat[comm.rank], op=op)).results[0]
    for algo in ("allgather", "owners", RowOwners("quantile")):
        y = simulate(3, lambda comm, a=algo: sparsecoll.allreduce(comm, inputs[comm.rank], a, op=op)).results[0]
        assert np.array_equal(y.rows, stored(inputs)) and np.array_equal(y.values.reshape(-1), expected.values)


def test_rows_that_cancel_stay():
    def program(comm):
        x = RowSparse([1, 3], np.array([[1.0, 2.0], [5.0, 0.0]]) * (-1) ** comm.rank, 6)
        return sparsecoll.allreduce(comm, x, "owners")

    assert simulate(2, program).results[1] == RowSparse([1, 3], np.zeros((2, 2)), 6)


def test_gathers_and_broadcasts():
    def program(comm):
        x = rows_of(comm.rank)
        return sparsecoll.allgather(comm, x), sparsecoll.bcast(comm, x if comm.rank == 1 else None, root=1)

    for gathered, spread in simulate(4, program).results:
        assert gathered == [rows_of(rank) for rank in range(4)] and spread == rows_of(1)


@pytest.mark.parametrize(
    "program, error, text",
    [
        (lambda c: sparsecoll.allreduce(c, rows_of(0, d=3 + c.rank)), CommunicationError, "d: expected the same"),
        (lambda c: sparsecoll.allreduce(c, rows_of(0, n=40 + c.rank)), CommunicationError, "n: expected the same"),
        (lambda c: sparsecoll.allreduce(c, rows_of(0), "oktopk"), ValueError, "algo: expected one of auto"),
        (lambda c: sparsecoll.allreduce(c, rows_of(0), OkTopk()), TypeError, "another one for rows, got oktopk"),
        (lambda c: sparsecoll.allreduce(c, np.ones(3), RowOwners(), k=1), TypeError, "one for a vector, got owners"),
        (
            lambda c: sparsecoll.allreduce(c, rows_of(0), Allgather(selector=TopK()), k=1),
            ValueError,
            "selector: expected None for rows",
        ),
        (lambda c: sparsecoll.allreduce(c, rows_of(0), format="coo"), ValueError, "format: expected 'auto'"),
        (lambda c: sparsecoll.reduce_scatter(c, rows_of(0), owner="zen"), ValueError, "owner: expected one of hash"),
        (lambda c: sparsecoll.reduce_scatter(c, np.ones(3), owner="hash", k=1), ValueError, "owner: expected None"),
        (lambda c: sparsecoll.reduce(c, rows_of(0)), TypeError, "got sparsecoll.vector.rows.RowSparse: use allreduce"),
        (
            lambda c: sparsecoll.allreduce(c, rows_of(0) if c.rank else SparseVector([1], np.ones(1), 9)),
            CommunicationError,
            "x: expected the same value on all ranks, got 'a vector' on rank 0",
        ),
    ],
)
def test_wrong_arguments_raise_on_all_ranks(program, error, text):
    def tried(comm):
        with pytest.raises(error, match=text):
            program(comm)
        return sparsecoll.allreduce(comm, rows_of(comm.rank)).nnz

    assert len(set(simulate(3, tried).results)) == 1


@pytest.mark.parametrize("owner", ["hash", "range"])
@pytest.mark.parametrize("value_dtype", [None, "float16"])
def test_top_rows_with_error_feedback_conserve_mass(owner, value_dtype):
    """The results of all steps and what is left in the residuals add up to all gradients."""
    P, steps = 4, 3

    def program(comm):
        residual, sums = sparsecoll.RowResidual(N, D, np.float64), np.zeros((N, D))
        for step in range(steps):
            acc = residual.compensate(rows_of(comm.rank + 10 * step, np.float64) * (1 / 3))
            y = sparsecoll.allreduce(comm, acc, RowOwners(owner), k=3, value_dtype=value_dtype, return_reduction=True)
            residual.update(y.contributed)
            assert y.value.nnz <= 3 * P and y.traffic.total.bytes_received > 0
            y.value.add_to(sums)
        return sums, residual.rows.to_dense()

    results = simulate(P, program).results
    given = sum(rows_of(r + 10 * step, np.float64).to_dense() for r in range(P) for step in range(steps)) / 3
    assert np.allclose(results[0][0] + sum(left for _, left in results), given, rtol=1e-12, atol=1e-12)


def test_the_top_rows_are_those_of_largest_norm():
    x = RowSparse([1, 3, 5, 7], np.array([[3.0, 4.0], [5.0, 0.0], [1e30, 1e30], [2e30, 0.0]], np.float32), 9)
    assert x.topk(3).rows.tolist() == [1, 5, 7] and x.topk(1).rows.tolist() == [7] and x.topk(9) is x


@pytest.mark.parametrize("outer, inner", [((6,), (2,)), ((6,), (2, 3)), ((4, 5), (3,))])
def test_hybrid_tensors_of_torch_are_rows(outer, inner):
    torch = pytest.importorskip("torch")

    def tensor(rank):
        rng = np.random.default_rng(rank)
        index = np.stack([rng.integers(0, size, 7) for size in outer])  # repeated ones among them
        values = torch.from_numpy(rng.integers(-8, 8, (7, *inner)).astype(np.float32))
        return torch.sparse_coo_tensor(torch.from_numpy(index), values, (*outer, *inner), check_invariants=True)

    def program(comm):
        x = tensor(comm.rank)
        y, z = sparsecoll.allreduce(comm, x, "owners"), sparsecoll.bcast(comm, x, root=2)
        received = sparsecoll.traffic(comm).phases["split"].bytes_received
        return y, z, sparsecoll.reduce_scatter(comm, x, owner="hash"), received

    def selected(comm, x):
        own = sparsecoll.Allgather(k=3)
        plan = sparsecoll.allreduce_init(comm, x, own)
        return [sparsecoll.allreduce(comm, x, own), sparsecoll.allreduce(comm, x, "allgather", k=3), plan(x)]

    for rows in simulate(3, lambda comm: [y.to_dense() for y in selected(comm, tensor(comm.rank))]).results:
        assert torch.equal(rows[0], rows[1]) and torch.equal(rows[0], rows[2])
    expected = sum(tensor(rank).to_dense() for rank in range(3))
    results = simulate(3, program).results
    for y, z, _, _ in results:
        assert y.is_coalesced() and y.sparse_dim() == len(outer)
        assert torch.equal(y.to_dense(), expected) and torch.equal(z.to_dense(), tensor(2).to_dense())
    assert torch.equal(sum(part.to_dense() for _, _, part, _ in results), expected)


def test_boundaries_say_which_rank_gets_a_row():
    def program(comm):
        return sparsecoll.reduce_scatter(comm, rows_of(comm.rank), [0, 1, 30, N]).rows.tolist()

    rows = stored([rows_of(rank) for rank in range(3)])
    assert simulate(3, program).results == [
        rows[(rows >= a) & (rows < b)].tolist() for a, b in ((0, 1), (1, 30), (30, N))
    ]


def test_values_beyond_half_precision_and_infinities():
    def program(comm, value=1e30):
        return sparsecoll.allreduce(
            comm,
            RowSparse([2], np.full((1, 2), value, np.float32), 9),
            "owners",
            value_dtype="float16",
            nonfinite="pass",
        ).values

    assert (simulate(3, program).results[0] == 65504).all()  # as of a SparseVector, whose sums saturate, too
    assert np.isinf(simulate(3, lambda comm: program(comm, np.inf)).results[0]).all()
    with pytest.raises(ValueError, match="in row 2"):
        simulate(3, lambda c: sparsecoll.allreduce(c, RowSparse([2], np.full((1, 2), np.inf, np.float32), 9)))


def test_rows_on_some_ranks_alone():
    def program(comm):
        x = rows_of(comm.rank)
        text = "^x: expected the same value on all ranks, got 'rows' on ranks 0, 2, 'a vector' on rank 1$"
        for call in (sparsecoll.allreduce, sparsecoll.allgather):
            with pytest.raises(sparsecoll.CommunicationError, match=text):
                call(comm, x if comm.rank != 1 else sparsecoll.SparseVector([1], np.ones(1), 3))
        return sparsecoll.allreduce(comm, x).nnz

    assert len(set(simulate(3, program).results)) == 1


def test_hybrid_tensors_of_other_shapes_are_refused():
    torch = pytest.importorskip("torch")

    def program(comm):
        x = torch.ones((4, 2, 3) if comm.rank else (4, 6)).to_sparse(1)
        with pytest.raises(CommunicationError, match=r"shape: .* \[4, 6\] on rank 0, \[4, 2, 3\] on rank 1"):
            sparsecoll.allreduce(comm, x)

    simulate(2, program)
