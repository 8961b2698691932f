"""reduce, reduce_scatter, allgather and bcast over MPI: the bits and bytes of the simulator."""

import pytest
from cases import case, same_bits

import sparsecoll
from sparsecoll import simulate


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["random", "empty_ranks", "one_region"])
def test_bits_and_bytes_are_those_of_the_simulator(comm, name):
    P = comm.size

    def program(comm):
        x, root = case(name, comm.rank, P), P - 1
        before = sparsecoll.traffic(comm).copy()
        made = [
            sparsecoll.reduce(comm, x, root, check=False),
            sparsecoll.reduce_scatter(comm, x, check=False),
            *sparsecoll.allgather(comm, x, check=False),
            sparsecoll.bcast(comm, x, root, check=False),
        ]
        return made, sparsecoll.traffic(comm).since(before).total.bytes_received

    mine, received = program(comm)
    theirs, expected = simulate(P, program).results[comm.rank]
    assert received == expected
    for a, b in zip(mine, theirs, strict=True):
        assert a is b is None or same_bits(a, b)
