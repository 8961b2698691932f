"""A small net, its data and helpers that the adapter's tests share."""

import torch


def net(seed=0, dtype=torch.float64):
    """1,959 parameters: matrices, vectors, and an order of gradients unlike that of registration."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(12, 24), torch.nn.Tanh(), torch.nn.Linear(24, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3)
    ).to(dtype)


def batch(rank, step, dtype=torch.float64, count=16):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(count, 12, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(0, 3, (count,), generator=generator)


def loss_of(model, data):
    return torch.nn.functional.cross_entropy(model(data[0]), data[1])


def bits(model):
    return b"".join(p.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for p in model.parameters())


def train(comm, model, optimizer, steps, dtype=torch.float64):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, batch(comm.rank, step, dtype)).backward()
        optimizer.step()
