"""Sharded models (FSDP2, HSDP) under torchrun, against one process that has the global batch; 4 ranks show most.

torchrun --nproc-per-node 4 --no-python python -m pytest tests/mpi/test_fsdp*.py
"""

import pytest
import torch
from sharded_models import (
    HYBRID,
    LAYOUTS,
    MIDDLE,
    NODES,
    TORCHRUN,
    Chain,
    Linear,
    Net,
    W,
    attached,
    batch,
    close,
    loss_of,
    mesh_of,
    reference,
    sharded,
    train,
    whole,
)

import sparsecoll.torch.fsdp
from sparsecoll import CommunicationError

pytestmark = [pytest.mark.mpi, TORCHRUN, pytest.mark.usefixtures("process_group")]


@LAYOUTS
@pytest.mark.parametrize("dense", [True, False])
def test_without_compression_it_is_one_process(comm, nodes, dense):
    """Also if the norm of the mean is clipped, and with AdamW."""
    method = "none" if dense else sparsecoll.torch.compressors.TopKCompressor(1.0)
    clip = torch.nn.utils.clip_grad_norm_
    model, _ = attached(nodes, method, options={"reshard_after_forward": dense})
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    train(model, optimizer, comm.rank, range(3), lambda: clip(model.parameters(), 0.1))
    close(model, reference(range(3), lambda params: clip(params, 0.1), torch.optim.AdamW, 0.01), atol=1e-5)


@LAYOUTS
def test_reductions_run_while_back_propagation_continues(comm, nodes):
    """Where torch only makes views of the results: not if gradients are accumulated, hooked, or of another dtype."""
    model, reductions = attached(nodes, "none")
    loss_of(model, batch(comm.rank, 0)).backward()
    values, groups = torch.zeros(1), reductions._groups
    assert all(group.reads_at_once(values) for group in groups)
    model.zero_grad()
    assert not any(group.reads_at_once(values) for group in groups)
    assert all(group.reads_at_once(values.bfloat16()) for group in groups)
    model.first.bias.register_post_accumulate_grad_hook(lambda p: None)
    assert [group.reads_at_once(values) for group in groups].count(True) == 1


def test_gradients_are_those_of_ddp(comm, process_group):
    """Bit for bit where both add in the order of two ranks, otherwise within rounding."""
    ddp = torch.nn.parallel.DistributedDataParallel(Net())
    loss_of(ddp, batch(comm.rank, 0)).backward()
    for nodes in NODES:
        model, _ = attached(nodes)
        loss_of(model, batch(comm.rank, 0)).backward()
        for own, other in zip(whole(p.grad for p in model.parameters()), ddp.module.parameters(), strict=True):
            torch.testing.assert_close(own, other.grad, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize(
    ("nodes", "reduce_dtype"), [(None, torch.bfloat16), (MIDDLE, torch.float32), (MIDDLE, torch.bfloat16)]
)
def test_mixed_precision(comm, nodes, reduce_dtype):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    model, reductions = attached(nodes, sparsecoll.torch.compressors.TopKCompressor(0.5), options={"mp_policy": policy})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, optimizer, comm.rank, range(8))
    assert {t.dtype for t in reductions.state_dict()["tensors"]["residual"].values()} == {torch.float32}
    close(model, reference(range(8)), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("name", ["oktopk", "dgc", "powersgd", "efsignsgd"])
def test_all_compressors_between_nodes(comm, name):
    """Replicas keep the same bits, which `verify` compares."""
    nodes = MIDDLE
    model, _ = attached(nodes, name, verify=1)
    train(model, torch.optim.SGD(model.parameters(), 0.01), comm.rank, range(3))
    with torch.no_grad():
        next(model.parameters()).to_local().add_(comm.rank == W - 1)  # ranks that have other shards hear of it, too
    with pytest.raises(CommunicationError, match="verify: expected the same bits on all ranks after step 4"):
        train(model, torch.optim.SGD(model.parameters(), 0.01), comm.rank, [3])


def test_replicas_are_compared_whichever_parameters_the_optimizer_has_first(comm):
    model, _ = attached(MIDDLE, verify=1)
    first = torch.nn.Linear(2, 2).parameters(), model.first.requires_grad_(False).parameters(), model.out.parameters()
    optimizer = torch.optim.SGD([{"params": [*group]} for group in first], 0.1)
    with torch.no_grad():
        model.out.bias.to_local().add_(comm.rank)
    with pytest.raises(CommunicationError, match="verify: expected the same bits on all ranks after step 1"):
        train(model, optimizer, comm.rank, [0])


def test_replicas_are_compared_after_a_step_that_the_loop_takes_by_itself(comm):
    model, _ = attached(MIDDLE, "topk", verify=2)

    def step(number):
        loss_of(model, batch(comm.rank, number)).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad, alpha=0.1)
        model.zero_grad()

    for number in range(4):
        step(number)
    with torch.no_grad():
        model.out.bias.to_local().add_(comm.rank)
    with pytest.raises(CommunicationError, match="verify: expected the same bits on all ranks after step 4"):
        step(4)


def test_activation_checkpoints(comm):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
    from torch.distributed.fsdp import fully_shard

    net, mesh = Net(), mesh_of(MIDDLE)
    apply_activation_checkpointing(net, check_fn=lambda module: module is net.twice or module is net.first)
    model = fully_shard(net, mesh=mesh["shard"])
    reductions = sparsecoll.torch.fsdp.attach(model, mesh["replicate"], "none")
    train(model, torch.optim.SGD(model.parameters(), 0.1), comm.rank, range(3))
    close(model, reference(range(3)))
    assert "first.weight" in {shard.name for shard in reductions._shards}


def test_replicas_start_as_the_first_one(comm):
    for nodes in HYBRID:
        model, _ = attached(nodes, net=Net(seed=comm.rank // (W // nodes)))
        for own, other in zip(whole(model.parameters()), Net(seed=0).parameters(), strict=True):
            assert torch.equal(own, other.detach())


def test_replicas_compute_as_the_first_one_after_a_forward_pass_before(comm):
    """FSDP keeps the whole parameters of the root, and of modules with reshard_after_forward=False."""
    for nodes in HYBRID:
        model = sharded(Net(seed=comm.rank // (W // nodes)), mesh_of(nodes), reshard_after_forward=False)
        data = batch(0, 0)[0]
        with torch.no_grad():
            model(data)
            sparsecoll.torch.fsdp.attach(model, mesh_of(nodes)["replicate"])
            torch.testing.assert_close(model(data), Net(seed=0)(data))


def test_few_bytes_between_nodes(comm):
    """1 % of the entries of a shard, against all of them."""
    nodes, received = W, {}
    for compressor in ("none", sparsecoll.torch.compressors.TopKCompressor(0.01, algo="allgather")):
        mesh = mesh_of(nodes)
        model, _ = attached(nodes, compressor, torch.nn.Linear(100, 40), mesh)
        traffic = sparsecoll.traffic(mesh["replicate"])
        traffic.reset()
        model(torch.randn(2, 100)).sum().backward()
        received[compressor == "none"] = traffic.total.bytes_received
    dense = 2 * 4 * 4040 // (W // nodes) * (nodes - 1) / nodes
    assert dense <= received[True] <= dense + 500 and received[False] < received[True] / 8


def test_a_shard_group_of_one_rank(comm):
    """Without replicas there is nothing to reduce, also where gradients are accumulated."""
    net, mesh = Linear(), mesh_of(W)
    model = sharded(Linear(), mesh)
    reductions = sparsecoll.torch.fsdp.attach(model, compressor=sparsecoll.torch.compressors.TopKCompressor(1.0))
    for step in range(2):
        data = batch(comm.rank, step)[0]
        model(data).backward()
        net(data).backward()
    for own, other in zip(model.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(own.grad.full_tensor(), other.grad)
    assert set(reductions.state_dict()["tensors"]["residual"]) == set(net.state_dict())


def test_the_compressor_of_one_rank_selects_and_counts_steps(comm):
    model = sharded(Linear(), mesh_of(W))
    method = sparsecoll.torch.compressors.TopKCompressor(0.1)
    reductions = sparsecoll.torch.fsdp.attach(model, compressor=method)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(comm.rank, step)[0]).backward()
        optimizer.step()
    gradients = [p.grad.full_tensor() for p in model.parameters()]
    assert sum(int((g != 0).sum()) for g in gradients) <= 0.2 * sum(g.numel() for g in gradients)
    assert reductions.state_dict()["step"] == 3


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("nodes", HYBRID)
def test_momentum_counts_once_a_step(comm, nodes, nesterov):
    """However often gradients are reduced in it: a module that is used twice, and accumulation that is not put off."""
    trained = []
    for synchronizes in (True, False):
        method = sparsecoll.torch.compressors.TopKCompressor(1.0, momentum=0.9, nesterov=nesterov)
        model, _ = attached(nodes, method)
        optimizer = torch.optim.SGD(model.parameters(), 0.02)
        for step in range(4):
            for part in range(2):
                model.set_requires_gradient_sync(synchronizes or part == 1)
                loss_of(model, batch(comm.rank, 2 * step + part)).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append(whole(model.parameters()))
    torch.testing.assert_close(*trained, atol=1e-5, rtol=1e-4)
    batches = [[batch(rank, step) for rank in range(W)] for step in range(8)]
    own = torch.optim.SGD((net := Net()).parameters(), 0.02, 0.9, nesterov=nesterov)
    for pair in zip(batches[::2], batches[1::2], strict=True):
        own.zero_grad()
        (sum(loss_of(net, data) for data in (*pair[0], *pair[1])) / W).backward()
        own.step()
    torch.testing.assert_close(trained[0], [p.detach() for p in net.parameters()], atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(W % 2 == 1 or W < 4, reason="needs two halves of a node")
def test_attached_after_a_forward_pass_that_has_kept_smaller_shards(comm):
    """FSDP then has other parameters until the next pass, with reshard_after_forward=2."""
    model = sharded(Net(), mesh_of(1), reshard_after_forward=2)
    model(batch(0, 0)[0])
    sparsecoll.torch.fsdp.attach(model, None, "none")
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    train(model, optimizer, comm.rank, range(3))
    close(model, reference(range(3), lambda params: None, torch.optim.AdamW, 0.01), atol=1e-5)


class Idle(torch.nn.Module):
    """Two parameters in one group, one of which is not used."""

    def __init__(self):
        super().__init__()
        self.used, self.idle = (torch.nn.Parameter(torch.ones(8, 6)) for _ in range(2))

    def forward(self, x, both=False):
        return x @ self.used.T + (x @ self.idle.T if both else 0)


@LAYOUTS
def test_accumulated_gradients_of_another_dtype_beside_an_unused_parameter(comm, nodes):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, _ = attached(nodes, sparsecoll.torch.compressors.TopKCompressor(1.0), Idle(), options={"mp_policy": policy})
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    expected = torch.ones(8, 6)
    for step in range(3):
        for part in range(2):
            model.set_requires_gradient_sync(part == 1)
            model(batch(comm.rank, 2 * step + part)[0]).float().sum().backward()
            expected -= sum(batch(rank, 2 * step + part)[0].sum(0) for rank in range(W)) / W
        optimizer.step()
        optimizer.zero_grad()
    used, idle = whole(model.parameters())
    assert (idle == 1).all()
    torch.testing.assert_close(used, expected, atol=0.1, rtol=0.05)


@LAYOUTS
def test_a_parameter_that_only_the_last_part_of_a_step_uses(comm, nodes):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, _ = attached(nodes, sparsecoll.torch.compressors.TopKCompressor(1.0), Idle(), options={"mp_policy": policy})
    for part in range(2):
        model.set_requires_gradient_sync(part == 1)
        model(batch(comm.rank, part)[0], part == 1 and comm.rank == 0).float().sum().backward()
    expected = sum(batch(0, part)[0].sum(0) for part in range(1, 2)) / W
    torch.testing.assert_close(model.idle.grad.full_tensor(), expected.expand(8, 6), atol=0.05, rtol=0.05)


@LAYOUTS
def test_a_module_that_is_frozen_and_then_not_run(comm, nodes):
    model, reductions = attached(nodes, sparsecoll.torch.compressors.TopKCompressor(0.1), Chain())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(number, skip):
        model(batch(comm.rank, number)[0], skip).square().backward()
        optimizer.step()
        optimizer.zero_grad()

    def of_first():
        waits = reductions.state_dict()["tensors"]["residual"]
        return whole([*model.a.parameters(), waits["a.weight"], waits["a.bias"]])

    step(0, False)
    before = of_first()
    model.a.requires_grad_(False)
    for number in range(1, 4):
        step(number, True)
    assert all(map(torch.equal, of_first(), before))
    model.a.requires_grad_(True)
    step(4, True)
    step(5, False)
    assert not all(map(torch.equal, of_first(), before))
