"""iallreduce: requests complete in order, and errors come at `wait` (over MPI: mpi/test_progress.py)."""

import numpy as np
import pytest
from cases import case, same_bits

import sparsecoll
from sparsecoll import SparseVector, simulate
from sparsecoll.transport import LocalTransport


def test_requests_give_what_allreduce_gives():
    def program(comm):
        x = case("random", comm.rank, 3)
        request = sparsecoll.iallreduce(comm, x, "oktopk", k=20)
        return request.wait(), request.test(), sparsecoll.allreduce(comm, x, "oktopk", k=20)

    assert all(same_bits(y, z) and done for y, done, z in simulate(3, program).results)


def test_blocking_calls_follow_the_nonblocking_ones_before_them():
    comm, order = LocalTransport(), []

    class Noting(sparsecoll.Allgather):
        def select(self, x, k, ranks=1):
            order.append(k)
            return super().select(x, k, ranks)

    x = SparseVector(np.arange(9), np.ones(9), 9)
    requests = [sparsecoll.iallreduce(comm, x, Noting(), k=k) for k in range(5)]
    sparsecoll.allreduce(comm, x, Noting(), k=5)
    assert [request.wait().nnz for request in requests] == list(range(5)) and order == list(range(6))


def test_errors_come_at_wait():
    request = sparsecoll.iallreduce(LocalTransport(), ([3, 1], np.ones(2), 9))
    with pytest.raises(ValueError, match="strictly ascending"):
        request.wait()
