"""Process groups of torch.distributed as communicators, under torchrun: which ones there are, and which are refused."""

import gc
import importlib.util
import os
import sys

import numpy as np
import pytest

import sparsecoll
from sparsecoll import CommunicationError, SparseVector
from sparsecoll.transport import as_transport

pytestmark = [pytest.mark.mpi, pytest.mark.skipif("TORCHELASTIC_RUN_ID" not in os.environ, reason="needs torchrun")]


@pytest.fixture
def dist(comm):
    import torch.distributed

    return torch.distributed


def ranks(comm):
    """The global ranks that a sum over `comm` is made of."""
    x = SparseVector([int(os.environ["RANK"])], np.ones(1), 99)
    return sparsecoll.allreduce(comm, x).indices.tolist()


def test_none_is_the_default_group_and_there_is_no_mpi(comm, dist):
    everybody = list(range(comm.size))
    assert ranks(None) == ranks(dist.group.WORLD) == ranks(comm) == everybody
    assert as_transport(None) is as_transport(dist.group.WORLD) is as_transport(comm)
    assert sparsecoll.traffic(None) is sparsecoll.traffic(comm)
    assert not [name for name in sys.modules if name.startswith("mpi4py")]


def test_groups_and_meshes(comm, dist):
    from torch.distributed.device_mesh import init_device_mesh

    last = dist.new_group([0, comm.size - 1])
    if comm.rank in (0, comm.size - 1):
        assert ranks(last) == sorted({0, comm.size - 1})
    else:
        with pytest.raises(ValueError, match="comm: this process is not in the process group"):
            ranks(last)
    mesh = init_device_mesh("cpu", (1, comm.size), mesh_dim_names=("fsdp", "dp"))
    assert ranks(mesh["dp"]) == list(range(comm.size)) and ranks(mesh["fsdp"]) == [comm.rank]
    with pytest.raises(ValueError, match=r"comm: expected a DeviceMesh of one dimension, such as mesh\['dp'\], got 2"):
        ranks(mesh)


def test_a_group_is_out_of_use_when_it_is_destroyed_and_leaves_no_socket(comm, dist):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        group = dist.new_group(list(range(comm.size)))
        ranks(group)
        transport = as_transport(group)
        assert as_transport(group) is transport
        dist.destroy_process_group(group)
        with pytest.raises(ValueError, match="comm: expected a process group, got one that was destroyed"):
            ranks(group)
        del group
        gc.collect()
        with pytest.raises(CommunicationError, match="out of use since its process group was destroyed"):
            ranks(transport)
        comm.Barrier()
    assert len(os.listdir("/proc/self/fd")) < before + 10 * comm.size  # gloo's, which outlive the group for a while


def test_what_is_no_communicator_is_refused(comm):
    for other in (7, "world", object()):
        with pytest.raises(TypeError, match=r"comm: expected an mpi4py intracommunicator, a ProcessGroup or .*, got "):
            ranks(other)
    with pytest.raises(CommunicationError, match="shrink: expected an mpi4py intracommunicator"):
        sparsecoll.shrink(comm)


def test_cuda_tensors_without_cupy_are_refused_on_all_ranks(comm):
    """Whatever the backend of the group is, they would go through the host; without CuPy they cannot."""
    import torch

    if importlib.util.find_spec("cupy"):
        pytest.skip("CuPy is installed")

    class OnGpu(torch.Tensor):
        device = property(lambda self: torch.device("cuda", 0))

    x = torch.ones(4)
    with pytest.raises(TypeError, match=r"rank 0: a \w+ on the GPU needs CuPy \(pip install cupy-cuda13x\)"):
        sparsecoll.allreduce(None, x.as_subclass(OnGpu) if comm.rank == 0 else x, k=2)


def test_beside_collectives_of_the_group(comm, dist):
    """Calls in the background and the group's own collectives do not wait for each other."""
    import torch

    requests = [sparsecoll.iallreduce(None, np.full(50_000, 1.0, np.float32), k=50_000) for _ in range(10)]
    tensors = [torch.full((1000,), float(step)) for step in range(10)]
    for tensor in tensors:
        dist.all_reduce(tensor)
    assert [t[0].item() for t in tensors] == [step * comm.size for step in range(10)]
    for request in requests:
        assert (request.wait(60).to_dense() == comm.size).all()


def test_the_ddp_hook_refuses_a_group_of_other_ranks(comm, dist):
    """The other dimension of a mesh has as many ranks; a group with its ranks in another order is the same group."""
    if comm.size < 4 or comm.size % 2:
        pytest.skip("needs a mesh of two dimensions")
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from sparsecoll.torch import HookState, comm_hook

    mesh = init_device_mesh("cpu", (2, comm.size // 2), mesh_dim_names=("nodes", "dp"))
    rows = [mesh["dp"].get_group(), dist.new_group(list(range(comm.size))[::-1])]
    for group, other in ((rows[0], mesh["nodes"] if comm.size == 4 else dist.group.WORLD), (dist.group.WORLD, rows[1])):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group)
        try:
            model.register_comm_hook(HookState(other, "none", model), comm_hook)
            model(torch.ones(1, 3)).sum().backward()
            assert group is dist.group.WORLD
        except ValueError as error:
            assert group is rows[0] and "of DDP's process group, got" in str(error)
