"""Sharded models for tests, and one process that has the global batch."""

import functools
import os

import pytest
import torch

import sparsecoll.torch.fsdp

W = int(os.environ.get("WORLD_SIZE", "1"))
NODES = [None, *sorted({1, W, *([2] if W % 2 == 0 else [])})]  # number of replicas; None: the mean is scattered
HYBRID = [nodes for nodes in NODES if nodes]
MIDDLE = HYBRID[len(HYBRID) // 2]  # of 4 ranks: 2 nodes with 2 shards
LAYOUTS = pytest.mark.parametrize("nodes", NODES)
TORCHRUN = pytest.mark.skipif("TORCHELASTIC_RUN_ID" not in os.environ, reason="needs torchrun")


class Net(torch.nn.Module):
    """Layers of sizes that few numbers of ranks divide, one that is used twice, and one with tied weights."""

    def __init__(self, seed=0, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(6, 11)
        self.twice = torch.nn.Linear(11, 11)
        self.embed, self.out = torch.nn.Linear(11, 5, bias=False), torch.nn.Linear(11, 5)
        self.out.weight = self.embed.weight
        self.to(dtype)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        return self.out(x) + 0.5 * self.embed(x)


class Linear(torch.nn.Module):
    """Its gradients do not depend on its parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = torch.nn.Linear(6, 7), torch.nn.Linear(6, 3)

    def forward(self, x):
        return (self.a(x) * 3).sum() + self.b(x).sum()


class Chain(torch.nn.Module):
    """Two modules, one after the other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = torch.nn.Linear(6, 7), torch.nn.Linear(7, 3)

    def forward(self, x, skip=False):
        return self.b(x.new_ones(4, 7) if skip else torch.tanh(self.a(x))).sum()


@functools.cache
def mesh_of(nodes):
    from torch.distributed.device_mesh import init_device_mesh

    shape = (1, W) if nodes is None else (nodes, W // nodes)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def sharded(net, mesh, **options):
    from torch.distributed.fsdp import fully_shard

    layers = {Net: ("first", "twice"), Chain: ("a", "b")}.get(type(net), ())
    for layer in (getattr(net, name) for name in layers):
        fully_shard(layer, mesh=mesh["shard"], **options)
    return fully_shard(net, mesh=mesh["shard"], **options)


def attached(nodes, compressor="none", net=None, mesh=None, options=None, **more):
    mesh = mesh or mesh_of(nodes)
    model = sharded(net or Net(), mesh, **(options or {}))
    return model, sparsecoll.torch.fsdp.attach(model, None if nodes is None else mesh["replicate"], compressor, **more)


def batch(rank, step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(4, 6, generator=generator).to(dtype), torch.randint(0, 5, (4,), generator=generator)


def loss_of(model, data):
    return torch.nn.functional.cross_entropy(model(data[0]).float(), data[1])


def train(model, optimizer, rank, steps, between=lambda: None):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        between()
        optimizer.step()


def whole(tensors):
    return [t.full_tensor().detach().clone() for t in tensors]


def reference(steps, between=lambda params: None, make=torch.optim.SGD, lr=0.1):
    """One process that has all batches."""
    net = Net()
    optimizer = make(net.parameters(), lr)
    for step in steps:
        optimizer.zero_grad()
        (sum(loss_of(net, batch(rank, step)) for rank in range(W)) / W).backward()
        between(net.parameters())
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def close(model, expected, atol=1e-6, rtol=1e-5):
    for own, other in zip(whole(model.parameters()), expected, strict=True):
        torch.testing.assert_close(own, other, atol=atol, rtol=rtol)


def mean_gradients(steps, net):
    """The sum over steps of the mean over ranks."""
    for step in steps:
        (sum(net(batch(rank, step)[0]) for rank in range(W)) / W).backward()
    return [p.grad for p in net.parameters()]


def conserved(model, reductions, steps, before, net=None, **tolerance):
    """What was applied with a learning rate of 1 and what waits in residuals is the sum of the mean gradients."""
    waiting = reductions.state_dict()["tensors"]["residual"]
    names = [name for name, _ in model.named_parameters()]
    after = dict(zip(names, whole(model.parameters()), strict=True))
    for name, start, gradient in zip(names, before, mean_gradients(steps, net or Linear()), strict=True):
        moved, waits = start - after[name], waiting[name].full_tensor().mean(0).float()
        torch.testing.assert_close(moved + waits, gradient, **tolerance)
