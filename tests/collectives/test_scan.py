"""scan: the sum of the ranks up to each one, in ceil(log2 P) messages; exscan: without its own."""

import numpy as np
import pytest
from cases import case

import sparsecoll
from sparsecoll import SparseVector, simulate


@pytest.mark.parametrize("name", ["random", "same_support", "empty_ranks", "one_rank_has_all", "cancelling"])
@pytest.mark.parametrize("P", [1, 2, 3, 7, 8])
def test_sums_of_the_ranks_up_to_each_one(P, name):
    inputs = [case(name, rank, P) for rank in range(P)]

    def program(comm):
        x = inputs[comm.rank]
        return sparsecoll.scan(comm, x), sparsecoll.exscan(comm, x)

    for rank, (y, before) in enumerate(simulate(P, program).results):
        for result, ranks in ((y, inputs[: rank + 1]), (before, inputs[:rank])):
            total = sum((x.to_dense() for x in ranks), np.zeros(inputs[0].length, np.float32))
            held = np.unique(np.concatenate([np.empty(0, np.uint32), *(x.indices for x in ranks)]))
            np.testing.assert_array_equal(result.to_dense(), total)
            np.testing.assert_array_equal(result.indices, held)  # sums that cancel stay
            assert result.dtype == np.float32


@pytest.mark.parametrize("P", [2, 5, 8])
@pytest.mark.parametrize("call", [sparsecoll.scan, sparsecoll.exscan])
def test_a_rank_receives_what_as_many_ranks_hold_as_the_step_is_long(P, call):
    """In the step of distance d a rank receives the entries of d ranks, or fewer if there are no more."""
    run = simulate(P, lambda comm: call(comm, SparseVector([comm.rank], np.ones(1, np.float32), P), format="coo"))
    for rank, traffic in enumerate(run.traffic):
        steps = [d for d in (1, 2, 4, 8) if d < P]
        counts = traffic.phases["scan"]
        assert counts.messages_received == sum(rank >= d for d in steps)
        assert counts.messages_sent == sum(rank + d < P for d in steps)
        received = sum(16 + 8 * min(d, rank - d + 1) for d in steps if rank >= d)
        assert counts.bytes_received == received


def test_entries_are_selected_first_values_travel_narrow_and_nan_passes():
    dense = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    y = simulate(2, lambda comm: sparsecoll.exscan(comm, dense, density=0.01, value_dtype="float16")).results[1]
    top = sparsecoll.select.topk(dense, 10)
    np.testing.assert_array_equal(y.values, top.values.astype(np.float16).astype(np.float32))
    x = SparseVector([1], np.array([np.nan]), 3)
    assert np.isnan(simulate(2, lambda comm: sparsecoll.scan(comm, x, nonfinite="pass")[1]).results).all()


def test_types_come_back_and_nothing_shares_the_callers_memory():
    sparse = pytest.importorskip("scipy.sparse")
    x = sparse.random_array((6, 7), density=0.3, format="csr", dtype=np.float64)

    def program(comm):
        y, before = sparsecoll.scan(comm, x), sparsecoll.exscan(comm, x)
        assert type(y) is type(before) is type(x) and not np.shares_memory(y.data, x.data)
        return y.toarray(), before.toarray(), sparsecoll.exscan(comm, {7: 1, comm.rank: 1})

    for rank, (y, before, counted) in enumerate(simulate(3, program).results):
        np.testing.assert_allclose(y, (rank + 1) * x.toarray())
        np.testing.assert_allclose(before, rank * x.toarray())
        assert counted == dict.fromkeys(range(rank), 1) | ({7: rank} if rank else {})


@pytest.mark.parametrize("op", ["max", "prod", "bitwise_or", "logical_xor"])
@pytest.mark.parametrize("missing", ["ignore", "zero"])
def test_operations_are_those_of_allreduce_over_the_first_ranks(op, missing):
    inputs = [SparseVector([1 + rank % 2, 5, 9 - rank % 3], np.array([-1 - rank, rank, 3]), 10) for rank in range(6)]

    def program(comm):
        y = sparsecoll.scan(comm, inputs[comm.rank], op, missing=missing)
        before = sparsecoll.exscan(comm, inputs[comm.rank], op, missing=missing)
        first = [comm.Split(comm.rank < ranks) for ranks in range(1, 7)]
        sums = [sparsecoll.allreduce(c, inputs[comm.rank], "allgather", op=op, missing=missing) for c in first]
        return y, before, sums

    results = simulate(6, program).results
    for rank, (y, before, _) in enumerate(results):
        assert y == results[0][2][rank]
        assert before == results[0][2][rank - 1] if rank else before.nnz == 0


def test_means_are_refused():
    with pytest.raises(ValueError, match="op: expected neither 'mean' nor 'replace' for a scan, got 'mean'"):
        simulate(2, lambda comm: sparsecoll.scan(comm, SparseVector([1], np.ones(1), 3), "mean"))
