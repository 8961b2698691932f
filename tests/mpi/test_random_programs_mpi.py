"""Random training programs over MPI, see tests/torch for many more on the simulator."""

import os

import pytest
from play import run
from runs import alike

pytestmark = [pytest.mark.mpi, pytest.mark.mpich, pytest.mark.usefixtures("process_group")]
COUNT = int(os.environ.get("SPARSECOLL_PROGRAMS", "8"))


def test_random_programs_lose_nothing(comm):
    for seed in range(COUNT):
        assert alike(comm, run(comm, seed)), seed
