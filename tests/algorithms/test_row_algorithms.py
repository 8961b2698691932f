"""Volume and balance of the algorithms for rows, counted on ids by Zipf's law, and what `auto` chooses."""

import numpy as np
import pytest
from formulas import row_sums

import sparsecoll
from sparsecoll import Network, RowGather, RowSparse, simulate
from sparsecoll.algorithms import RowAuto, RowOwners

N, D, BATCH = 300_000, 8, 4096
ROW = 8 * D  # of float64, whose exponents are not coded


def batch(rank, exponent):
    """Distinct ids of a batch, the most frequent ones first in the table."""
    probability = np.cumsum(np.arange(1, N + 1) ** -exponent)
    ids = np.unique(np.searchsorted(probability / probability[-1], np.random.default_rng(rank).random(BATCH)))
    return RowSparse(ids, np.ones((ids.size, D)), N)


def measured(P, algorithm, inputs, scatter=False):
    """Bytes received and sent by each rank, without the agreement."""

    def program(comm):
        if scatter:
            sparsecoll.reduce_scatter(comm, inputs[comm.rank], owner=algorithm.owner)
        else:
            sparsecoll.allreduce(comm, inputs[comm.rank], algorithm)
        total, agree = sparsecoll.traffic(comm).total, sparsecoll.traffic(comm).phases["agree"]
        return total.bytes_received - agree.bytes_received, total.bytes_sent - agree.bytes_sent

    return np.array(simulate(P, program).results)


@pytest.mark.parametrize("exponent", [1.05, 1.2])
@pytest.mark.parametrize("owner", ["hash", "quantile"])
@pytest.mark.parametrize("P", [4, 7, 16])
def test_the_busiest_rank_moves_a_tenth_more_than_the_mean_at_most(P, owner, exponent):
    inputs = [batch(rank, exponent) for rank in range(P)]
    held, union = [x.nnz for x in inputs], np.unique(np.concatenate([x.rows for x in inputs])).size
    moved = measured(P, RowOwners(owner), inputs)
    received = measured(P, RowOwners(owner), inputs, scatter=True)[:, 0]
    assert moved.max() <= 1.1 * moved.mean() and received.max() <= 1.1 * received.mean()
    expected = row_sums(np.mean(held), union, P)[1] * ROW
    assert expected <= moved.mean() <= 1.12 * expected  # and indices


def test_gathering_takes_the_rows_of_the_others():
    inputs = [batch(rank, 1.2) for rank in range(5)]
    received = measured(5, RowGather(), inputs)[:, 0].sum()
    expected = row_sums(sum(x.nnz for x in inputs), 0, 5)[0] * ROW
    assert expected <= received <= 1.05 * expected


@pytest.mark.parametrize("P, most", [(4, 0.8), (16, 0.54), (64, 0.36)])
def test_the_busiest_rank_receives_fewer_bytes_than_by_gloo(P, most):
    """Whose sparse sum brings the row numbers, of 8 bytes, and the rows of all other ranks to each."""
    d, inputs = 16, []
    for rank in range(P):
        rows = batch(rank, 1.05).rows
        values = np.random.default_rng(rank).standard_normal((rows.size, d), np.float32)
        inputs.append(RowSparse(rows, values, N))
    gloo = sum(x.nnz for x in inputs[1:]) * (8 + 4 * d)
    assert measured(P, "auto", inputs)[:, 0].max() <= most * gloo


@pytest.mark.parametrize("d, most", [(64, 1.003), (16, 1.01), (4, 1.03)])
def test_with_all_rows_on_all_ranks_owners_move_what_a_dense_sum_moves(d, most):
    n = 20_000
    x = RowSparse(np.arange(n), np.ones((n, d), np.float32), n)
    moved = measured(4, RowOwners(), [x] * 4)[:, 0].max()
    assert moved <= most * row_sums(n, n, 4)[1] * 4 * d


@pytest.mark.parametrize("P, shared, expected", [(2, True, "allgather"), (4, False, "allgather"), (8, True, "owners")])
def test_auto_takes_owners_from_some_number_of_ranks(P, shared, expected, monkeypatch):
    chosen = []
    for kind in (RowGather, RowOwners):
        call = kind.__call__
        monkeypatch.setattr(kind, "__call__", lambda self, *a, call=call: chosen.append(self.name) or call(self, *a))
    rows = np.arange(4000)

    def program(comm):
        own = rows * 8 + (0 if shared else comm.rank)
        return sparsecoll.allreduce(comm, RowSparse(own, np.ones((4000, D), np.float32), N), RowAuto())

    results = simulate(P, program, network=Network()).results
    assert set(chosen) == {expected} and all(y == results[0] for y in results)


@pytest.mark.parametrize("P", [2, 3, 5])
@pytest.mark.parametrize("dtype, wire", [("float32", None), ("float64", None), ("float32", "float16"), ("int64", None)])
def test_parts_of_many_rows_that_travel_meanwhile_are_summed_as_one_vector(P, dtype, wire, monkeypatch):
    """The ranks hold other numbers of rows, one of them none and one fewer than there are parts."""
    counts = [9000, 0, 3, 5000, 8000][:P]
    rng = np.random.default_rng(P)
    inputs = []
    for count in counts:
        rows = np.sort(rng.choice(12_000, count, replace=False))
        inputs.append(RowSparse(rows, (100 * rng.standard_normal((count, 48))).astype(dtype), 12_000))

    def program(comm):
        before = sparsecoll.traffic(comm).total.messages_sent
        y = sparsecoll.allreduce(comm, inputs[comm.rank], RowGather(), value_dtype=wire)
        least = sparsecoll.allreduce(comm, inputs[comm.rank], RowGather(), op="min")
        return y, least, sparsecoll.traffic(comm).total.messages_sent - before

    apart = simulate(P, program).results
    assert apart[0][2] > 4 * (P - 1)
    monkeypatch.setattr("sparsecoll.algorithms.primitives.pipeline.CHUNK_BYTES", 1 << 40)
    for (y, least, _), (whole, other, messages) in zip(apart, simulate(P, program).results, strict=True):
        assert y.rows.tobytes() == whole.rows.tobytes() and y.values.tobytes() == whole.values.tobytes()
        assert y == apart[0][0] and least == other and messages <= 4 * (P - 1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("algo", ["allgather", "auto", "owners"])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_a_rank_keeps_what_rounding_takes_from_rows_of_halves(algo, dtype, size):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")

    def program(comm):
        values = np.array([[16000.0, 1 + comm.rank], [2048.0, 1.0]]).astype(dtype)
        x = sparsecoll.RowSparse([1, 5 + comm.rank % 2], values, 9)
        y = sparsecoll.allreduce(comm, x, algo, return_reduction=True)
        return y.value.to_dense().astype(np.float64), y.contributed.to_dense().astype(np.float64)

    results = simulate(size, program).results
    for value, _ in results:
        np.testing.assert_array_equal(value, sum(contributed for _, contributed in results))
