"""Every pair of (call, operation, type of values, type of x, format), on 1 to 9 virtual ranks (over MPI: tests/mpi)."""

import numpy as np
import pytest
from contract import CASES, check

import sparsecoll
from sparsecoll import RowSparse, SparseVector, simulate

VECTORS = {
    "allreduce": lambda comm, x: sparsecoll.allreduce(comm, x),
    "reduce": lambda comm, x: sparsecoll.reduce(comm, x, 0),
    "reduce_scatter": lambda comm, x: sparsecoll.reduce_scatter(comm, x),
    "ireduce": lambda comm, x: sparsecoll.ireduce(comm, x).wait(),
    "allreduce_init": lambda comm, x: sparsecoll.allreduce_init(comm, x)(x),
    "allgather": lambda comm, x: sparsecoll.allgather(comm, x),
    "gather": lambda comm, x: sparsecoll.gather(comm, x, 0),
    "bcast": lambda comm, x: sparsecoll.bcast(comm, x, 0),
    "scatter": lambda comm, x: sparsecoll.scatter(comm, [x] * comm.size, 0),
    "alltoall": lambda comm, x: sparsecoll.alltoall(comm, [x] * comm.size),
    "alltoallv": lambda comm, x: list(sparsecoll.alltoallv(comm, {comm.rank: x}).values()),
}
ROWS = ("allreduce", "reduce_scatter", "allgather", "bcast", "alltoall", "alltoallv")


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("P", range(1, 10))
def test_what_is_offered_is_right_and_what_is_not_is_refused(P, tensors):
    if tensors:
        pytest.importorskip("torch")
    cases = [case for case in CASES if (case["kind"] == "torch") == tensors]
    simulate(P, lambda comm: check(comm, cases[P % 4 :: 4]), ranks_per_node=2)


@pytest.mark.parametrize("others", [0, 70], ids=["alone", "all"])
@pytest.mark.parametrize("P", [1, 2])
@pytest.mark.parametrize("call", VECTORS)
def test_results_share_no_memory_with_x(call, P, others):
    """Also where the other ranks have no entries, in messages of any kind."""

    def program(comm):
        count = 70 if comm.rank == 0 else others
        vector = SparseVector(np.arange(count), np.arange(1.0, count + 1), 100)
        rows = RowSparse(np.arange(count), np.ones((count, 3)), 100)
        for x in (vector, rows) if call in ROWS else (vector,):
            results = VECTORS[call](comm, x)
            for y in results if isinstance(results, list) else [results]:
                assert y is None or not _overlap(_arrays(x), _arrays(y))

    simulate(P, program)


def _arrays(x):
    return (x.values, x.indices if isinstance(x, SparseVector) else x.rows)


def _overlap(some, others):
    return any(np.shares_memory(a, b) for a in some for b in others)
