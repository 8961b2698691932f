"""Right uses of the public calls, with the types that they return; checked, not run."""

from collections import Counter
from typing import Any, assert_type

import numpy as np
import torch
from numpy.typing import NDArray

import sparsecoll
from sparsecoll import Reduction, Request, RowSparse, SparseVector
from sparsecoll.torch.compressors import TopKCompressor

Floats = NDArray[np.float32]


def sums(comm: sparsecoll.Comm, x: SparseVector, rows: RowSparse, dense: Floats, t: torch.Tensor) -> None:
    assert_type(sparsecoll.allreduce(comm, x), SparseVector)
    assert_type(sparsecoll.allreduce(comm, rows, "owners"), RowSparse)
    assert_type(sparsecoll.allreduce(comm, dense, "oktopk", density=0.01), SparseVector)
    assert_type(sparsecoll.allreduce(comm, dense, sparsecoll.LowBit()), Floats)
    assert_type(sparsecoll.allreduce(comm, t, k=3), SparseVector | torch.Tensor)
    assert_type(sparsecoll.allreduce(comm, Counter("ab")), Counter[str])
    assert_type(sparsecoll.allreduce(comm, x, return_reduction=True), Reduction[SparseVector])
    assert_type(sparsecoll.allreduce(comm, rows, return_reduction=True).contributed, RowSparse)
    assert_type(sparsecoll.reduce(comm, x, root=1, op="max", missing="zero"), SparseVector | None)
    assert_type(sparsecoll.reduce(comm, dense, k=1), SparseVector | None)
    assert_type(sparsecoll.reduce_scatter(comm, rows, owner="hash", nonfinite="pass"), RowSparse)
    indices, values, length = sparsecoll.allreduce(comm, ([1], [2.0], 5), format="coo")
    assert_type(length, int)
    assert_type(values.sum() + indices[0], Any)


def moves(comm: sparsecoll.Comm, x: SparseVector, dense: Floats) -> None:
    assert_type(sparsecoll.allgather(comm, dense), list[Floats])
    assert_type(sparsecoll.gather(comm, x), list[SparseVector] | None)
    assert_type(sparsecoll.bcast(comm, x if comm.rank == 0 else None), SparseVector)
    assert_type(sparsecoll.scatter(comm, [x] * comm.size), SparseVector)
    assert_type(sparsecoll.scatter(comm, x, boundaries=[0, 3, 9]), SparseVector)
    assert_type(sparsecoll.alltoall(comm, [x]), list[SparseVector])
    assert_type(sparsecoll.alltoallv(comm, {1: dense}, timeout=3.0), dict[int, Floats])


def later(comm: sparsecoll.Comm, x: SparseVector, dense: Floats) -> None:
    assert_type(sparsecoll.iallreduce(comm, dense, k=3), Request[SparseVector])
    assert_type(sparsecoll.ireduce(comm, x).wait(), SparseVector | None)
    assert_type(Request.waitall([sparsecoll.iallgather(comm, x)]), list[list[SparseVector]])
    plan = sparsecoll.allreduce_init(comm, dense, k=5)
    assert_type(plan(dense), SparseVector)
    assert_type(plan.start(dense).wait(), SparseVector)


def program(comm: sparsecoll.Comm) -> int:
    return comm.rank + sparsecoll.allreduce(comm, SparseVector([0], [1.0], 2)).nnz


assert_type(sparsecoll.simulate(3, program).results, list[int])
assert_type(sparsecoll.simulate(3, lambda comm: comm.Get_rank() / 2).results, list[float])
assert_type(TopKCompressor(momentum=None).momentum, float | None)
group = torch.distributed.group.WORLD
assert_type(sparsecoll.allreduce(group, {"a": 1}), dict[str, int])
