"""Seconds of calls, which the simulator knows exactly."""

import numpy as np
import pytest

import sparsecoll
from sparsecoll import SparseVector, simulate
from sparsecoll.transport.call import CollectiveCall

P = 3


def planned(comm, x):
    return sparsecoll.allreduce_init(comm, x)(x)


def nested(comm, x):
    with CollectiveCall(comm.transport, "outer"):
        sparsecoll.allgather(comm, x)
        return sparsecoll.allreduce(comm, x)


CALLS = {
    "allreduce": sparsecoll.allreduce,
    "allgather": sparsecoll.allgather,
    "alltoallv": lambda comm, x: sparsecoll.alltoallv(comm, {(comm.rank + 1) % P: x}),
    "reduce_scatter": sparsecoll.reduce_scatter,
    "plan": planned,
    "two calls inside one": nested,
}


@pytest.mark.parametrize("name", CALLS)
def test_total_seconds_are_those_inside_calls_and_counted_once(name):
    def program(comm):
        x = SparseVector([comm.rank, 30], np.ones(2), 40)
        sparsecoll.allreduce(comm, x)  # with the set-up
        before, start = sparsecoll.traffic(comm).total.seconds, comm.transport.now()
        CALLS[name](comm, x)
        return sparsecoll.traffic(comm).total.seconds - before, comm.transport.now() - start

    for counted, passed in simulate(P, program, network=sparsecoll.Network(1e-3, 1e-6)).results:
        assert counted == pytest.approx(passed) and passed > 0
