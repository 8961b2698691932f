"""What `sparsecoll.torch.fsdp.attach` and its reductions refuse, on all ranks."""

import contextlib
import re

import pytest
import torch
from sharded_models import TORCHRUN, Linear, Net, W, attached, batch, loss_of, mesh_of, sharded

import sparsecoll.torch.fsdp
from sparsecoll import CommunicationError

pytestmark = [pytest.mark.mpi, TORCHRUN, pytest.mark.usefixtures("process_group")]


def refused(kind, text, model, *arguments, **options):
    with pytest.raises(kind, match=re.escape(text)):
        sparsecoll.torch.fsdp.attach(model, *arguments, **options)


@pytest.mark.skipif(W == 1, reason="needs two ranks")
def test_what_cannot_be_served_is_refused(comm):
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of(W)
    refused(TypeError, "model: expected one after torch.distributed.fsdp.fully_shard(model)", Net())
    refused(TypeError, "model: expected a module after torch.distributed.fsdp.fully_shard(module)", object())
    native = fully_shard(Net(), mesh=mesh)
    refused(ValueError, "got HSDP's two, over which torch sums gradients densely", native, mesh["replicate"])
    partly = Net()
    fully_shard(partly.first, mesh=mesh["shard"])
    refused(ValueError, "expected all trainable parameters to be sharded, got 'twice.weight'", partly)
    model = sharded(Net(), mesh)
    refused(ValueError, "comm: expected a DeviceMesh of one dimension", model, mesh)
    refused(TypeError, "replicas: expected a one-dimensional DeviceMesh or a ProcessGroup, got", model, "replicate")
    refused(ValueError, "compressor: expected one that works bucket by bucket", model, None, "covap")
    refused(ValueError, "compressor: expected 'topk', 'fp16' or 'none' without replicas, got", model, None, "qsgd")
    refused(ValueError, "algo: expected 'auto' without replicas", model, None, "oktopk")
    refused(ValueError, "clip: expected None", model, None, sparsecoll.torch.compressors.dgc(clip=1.0))
    refused(ValueError, "verify: expected 0 without replicas", model, verify=True)
    refused(ValueError, "replicas: expected this rank", sharded(Net(), mesh_of(1)), mesh["replicate"])
    outside = torch.distributed.new_group([0])
    if comm.rank:
        refused(ValueError, "comm: this process is not in the process group", model, outside)
    _ = sparsecoll.torch.fsdp.attach(model, mesh["replicate"])
    refused(ValueError, "model: expected one that nothing is attached to", model, mesh["replicate"])


@pytest.mark.skipif(W == 1, reason="needs two ranks")
def test_ranks_that_differ(comm):
    for nodes in (None, W):
        with pytest.raises(CommunicationError, match="compressor: expected the same value on all ranks, got"):
            attached(nodes, "topk" if comm.rank else "none")
        net = torch.nn.Linear(6, 5 + (comm.rank == 0))
        with pytest.raises(CommunicationError, match="expected the same value on all ranks"):
            attached(nodes, "topk", net)


@pytest.mark.parametrize(("method", "scale"), [("topk", 64.0), ("topk", 1.0), ("none", 64.0)])
def test_a_scaler_that_residuals_do_not_know_is_refused(comm, method, scale):
    model, _ = attached(None, method, Linear())
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(model(batch(comm.rank, 0)[0])).backward()
    refused = pytest.raises(
        RuntimeError, match=r"attach has to know the GradScaler .* pass grad_scaler=scaler to attach"
    )
    with refused if (method, scale) == ("topk", 64.0) else contextlib.nullcontext():
        scaler.step(optimizer)


def test_an_optimizer_within_back_propagation_is_refused(comm):
    model, _ = attached(None, "topk", Linear())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    next(model.parameters()).register_post_accumulate_grad_hook(lambda p: optimizer.step())
    with pytest.raises(RuntimeError, match="step after back-propagation, not within it"):
        model(batch(comm.rank, 0)[0]).backward()


def test_momentum_that_would_count_twice_in_a_step_is_refused_by_the_hook(comm):
    """Also in the first step, in which DDP makes its buckets again; the next back-propagation goes on."""
    model = torch.nn.parallel.DistributedDataParallel(Net())
    model.register_comm_hook(sparsecoll.torch.HookState(None, "dgc", model), sparsecoll.torch.comm_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        loss_of(model, batch(comm.rank, step)).backward()
        if step < 2:
            with pytest.raises(ValueError, match=r"momentum: .* accumulate within no_sync\(\)"):
                loss_of(model, batch(comm.rank, step)).backward()
        else:
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.skipif(W % 2, reason="needs two stages")
def test_schedules_of_pipelines_are_refused(comm):
    """They reduce gradients outside of backward(), at whose end ranks learn of failures."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    mesh = init_device_mesh("cpu", (2, W // 2), mesh_dim_names=("stage", "shard"))
    stage, model = mesh.get_local_rank("stage"), torch.nn.Linear(6, 6)
    fully_shard(model, mesh=mesh["shard"])
    _ = sparsecoll.torch.fsdp.attach(model, None, "topk")
    pipeline = PipelineStage(model, stage, 2, torch.device("cpu"), group=mesh.get_group("stage"))
    schedule = ScheduleGPipe(pipeline, 2, loss_fn=lambda out, target: (out - target).square().mean())
    x = torch.ones(4, 6)
    with pytest.raises(RuntimeError, match=r"attach: gradients are reduced outside of backward\(\)"):
        schedule.step(*[] if stage else [x], **{"target": x} if stage else {})


@pytest.mark.parametrize("frozen", [torch.uint8, torch.float32])
def test_gradients_have_the_dtype_of_what_is_trained(frozen):
    """Not that of a frozen parameter that comes first."""
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(6, 4, dtype=torch.float64)
    model.register_parameter("bias", torch.nn.Parameter(torch.zeros(4, dtype=frozen), requires_grad=False))
    model._parameters = {"bias": model.bias, "weight": model.weight}
    model.forward = lambda x: x @ model.weight.T / 3
    fully_shard(model, mesh=mesh_of(None)["shard"])
    _ = sparsecoll.torch.fsdp.attach(model, None, "none")
    model(torch.full((2, 6), 0.1, dtype=torch.float64)).sum().backward()
    torch.testing.assert_close(model.weight.grad.full_tensor()[0, 0].item(), 0.2 / 3, rtol=1e-15, atol=0)
