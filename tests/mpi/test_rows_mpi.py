"""Rows over MPI: the bits and bytes of the simulator, nonblocking calls, and errors that all ranks hear of."""

import numpy as np
import pytest
from simulated import simulated

import sparsecoll
from sparsecoll import CommunicationError, RowSparse

pytestmark = pytest.mark.mpi


def rows_of(rank, n=400, d=5, count=200, dtype=np.float32):
    rng = np.random.default_rng(rank)
    ids = (rng.zipf(1.2, count) - 1) % n
    return RowSparse.from_pairs(ids, rng.standard_normal((count, d)).astype(dtype), n)


def test_bits_and_bytes_are_those_of_the_simulator(comm):
    def program(comm):
        before, x = sparsecoll.traffic(comm).copy(), rows_of(comm.rank)
        made = [sparsecoll.allreduce(comm, x, algo) for algo in ("allgather", "owners")]
        made += [sparsecoll.iallreduce(comm, x, "owners", op="mean", value_dtype="bfloat16").wait()]
        made += [sparsecoll.reduce_scatter(comm, x, owner=owner) for owner in ("hash", "quantile", "range")]
        made += [*sparsecoll.allgather(comm, x), sparsecoll.bcast(comm, x, root=comm.size - 1)]
        texts = [(y.rows.tobytes(), y.values.tobytes()) for y in made]
        return texts, sparsecoll.traffic(comm).since(before).total.bytes_received

    mine, theirs = program(comm), simulated(comm, program)
    assert mine == theirs and all(len(set(comm.allgather(mine[0][i]))) == 1 for i in range(3))


def test_ranks_without_rows_and_wrong_arguments(comm):
    x = rows_of(0) if comm.rank == comm.size - 1 else RowSparse.empty(400, 5, np.float32)
    assert sparsecoll.allreduce(comm, x, "owners") == rows_of(0)
    bad = RowSparse([3], np.full((1, 5), np.nan, np.float32), 400) if comm.rank == 0 else x
    with pytest.raises(ValueError, match="rank 0: x: expected finite values, got NaN or infinity, the first in row 3"):
        sparsecoll.allreduce(comm, bad)
    if comm.size > 1:
        with pytest.raises(CommunicationError, match="d: expected the same value on all ranks"):
            sparsecoll.allreduce(comm, rows_of(comm.rank, d=5 + comm.rank // (comm.size - 1)))
    assert sparsecoll.allreduce(comm, rows_of(1)).nnz == rows_of(1).nnz
