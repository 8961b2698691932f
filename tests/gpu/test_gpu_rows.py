"""Rows on device arrays: the bits and the bytes are those of the host."""

import numpy as np
import pytest
from test_gpu_kernels import same

import sparsecoll
from sparsecoll import RowSparse, simulate
from sparsecoll.algorithms.owners import RowOwners


def rows_of(rank, n=60, d=3):
    rng = np.random.default_rng(rank)
    count = 0 if rank == 2 else 40
    ids = (rng.zipf(1.2, count) - 1) % n
    return RowSparse.from_pairs(ids, rng.standard_normal((count, d)).astype(np.float32), n)


def lifted(cp, x):
    return RowSparse(cp.asarray(x.rows), cp.asarray(x.values), x.n)


def equal(mine, theirs):
    assert mine.on_gpu and mine.n == theirs.n
    same(mine.rows, theirs.rows)
    same(mine.values, theirs.values)


def test_what_users_do(cp):
    x, y = rows_of(0), rows_of(1)
    on = [lifted(cp, z) for z in (x, y)]
    equal(on[0] + on[1], x + y)
    equal(on[0].topk(4) * 2, x.topk(4) * 2)
    ids, values = np.array([5, 1, 5]), np.arange(6, dtype=np.float32).reshape(3, 2)
    equal(RowSparse.from_pairs(cp.asarray(ids), cp.asarray(values), 9), RowSparse.from_pairs(ids, values, 9))
    same(on[0].to_dense(), x.to_dense())
    table, device = np.ones(x.shape, np.float32), cp.asarray(np.ones(x.shape, np.float32))
    x.add_to(table)
    on[0].add_to(device)
    same(device, table)


@pytest.mark.parametrize("value_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("P", [1, 3])
def test_collectives(cp, P, value_dtype):
    host = [rows_of(rank) for rank in range(P)]
    device = [lifted(cp, x) for x in host]
    algorithms = ["auto", "allgather", *(RowOwners(owner, False) for owner in ("hash", "quantile", "range"))]

    def program(comm, given):
        x = given[comm.rank]
        made = [sparsecoll.allreduce(comm, x, algo, op="mean", value_dtype=value_dtype) for algo in algorithms]
        made += [*sparsecoll.allgather(comm, x), sparsecoll.reduce_scatter(comm, x, owner="range")]
        return made, sparsecoll.traffic(comm).total.bytes_received

    for mine, theirs in zip(*(simulate(P, lambda c, g=g: program(c, g)).results for g in (device, host)), strict=True):
        for y, wanted in zip(mine[0], theirs[0], strict=True):
            equal(y, wanted)


@pytest.mark.parametrize("call", ["bcast", "allgather", "gather", "scatter", "alltoall", "alltoallv"])
def test_arrays_in_calls_that_only_move_data(cp, call):
    arrays = [np.arange(24.0, dtype=np.float32).reshape(2, 3, 4), np.array(7), np.zeros((0, 5)), np.arange(9)[::2]]

    def program(comm, x):
        given = {"scatter": [x] * 3, "alltoall": [x] * 3, "alltoallv": {0: x, 2: x}}.get(call, x)
        y = getattr(sparsecoll, call)(comm, given)
        return list(y.values()) if isinstance(y, dict) else y if isinstance(y, list) else [y] * (y is not None)

    for x in arrays:
        device = cp.asarray(x)
        for found in simulate(3, lambda comm, x=device: program(comm, x)).results:
            for y in found:
                assert type(y) is type(device) and y.shape == x.shape
                same(y, x)
