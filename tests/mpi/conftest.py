"""Communicators for the tests over MPI."""

import pytest


@pytest.fixture(scope="session")
def comm():
    """All ranks of the mpirun."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture(scope="module")
def process_group(comm):
    """The same ranks, as torch.distributed's group too; PyTorch computes in one thread."""
    import torch

    from sparsecoll.torch import init_process_group

    torch.set_num_threads(1)
    init_process_group(comm)
    yield comm
    torch.distributed.destroy_process_group()
