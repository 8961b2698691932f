"""init_process_group: torch.distributed's group has the ranks of the communicator, and frameworks are told."""

import os

import pytest
import torch
import torch.distributed as dist

from sparsecoll import CommunicationError, simulate
from sparsecoll.torch import init_process_group

pytestmark = pytest.mark.mpi
TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def comm(monkeypatch, mpi):
    for name in TOLD:
        monkeypatch.setenv(name, "")  # what was there before comes back
    yield mpi.COMM_WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_group_of_the_communicators_ranks(comm):
    for _ in range(2):  # the second time there is nothing to do
        init_process_group(comm)
        assert (dist.get_rank(), dist.get_world_size()) == (comm.rank, comm.size)
    dist.destroy_process_group()
    turned = comm.Split(0, -comm.rank)
    init_process_group(turned)
    assert (dist.get_rank(), dist.get_world_size()) == (turned.rank, comm.size)
    sums = torch.tensor([turned.rank, 1])
    dist.all_reduce(sums)
    assert sums.tolist() == [comm.size * (comm.size - 1) // 2, comm.size]
    rank, size, local, here, _, port = (os.environ[name] for name in TOLD)
    assert (int(rank), int(size)) == (turned.rank, comm.size)
    assert int(local) < int(here) <= comm.size and int(port) > 0
    if comm.size > 1:  # every rank raises, the middle one too, which has the same number in both
        with pytest.raises((RuntimeError, CommunicationError), match="expected no process group yet"):
            init_process_group(comm)
    turned.Free()


def test_virtual_ranks_are_refused():
    def program(comm):
        with pytest.raises(TypeError, match="virtual ranks"):
            init_process_group(comm)

    simulate(2, program)
