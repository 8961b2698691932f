"""Seconds of calls, which the simulator knows exactly."""

import numpy as np
import pytest
from launching import python

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


def test_seconds_of_nested_phases_are_not_those_of_the_outer_one():
    def program(comm):
        transport = comm.transport
        with transport.phase("outer"):
            comm.Barrier()
            with transport.phase("inner"), transport.phase("outer"):
                transport.isend(1 - comm.rank, np.zeros(1000, np.uint8))
                transport.recv(1 - comm.rank)
            with transport.phase("inner"):
                transport.isend(1 - comm.rank, np.zeros(3000, np.uint8))
                transport.recv(1 - comm.rank)
        return [transport.traffic.phases[name].seconds for name in ("outer", "inner")]

    for seconds in simulate(2, program, network=sparsecoll.Network(0, 1e-6)).results:
        assert seconds == pytest.approx([1e-3, 3e-3])


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


ALONE = """
import numpy as np
import sparsecoll

x = np.arange(9.0)
requests = [sparsecoll.iallreduce(None, x, k=2) for _ in range(4)]
sparsecoll.allreduce(None, x, k=2)
assert all(request.test() for request in requests)  # calls are made in order
print(sparsecoll.traffic(None) is sparsecoll.traffic(None), sparsecoll.traffic(None).total.seconds > 0)
"""


def test_without_mpi_and_torch_none_is_one_communicator():
    blocked = f"import sys; sys.modules['mpi4py'] = None{ALONE}"
    assert python("-c", blocked, check=True).stdout == "True True\n"
