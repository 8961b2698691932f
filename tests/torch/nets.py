"""A small net, its data and helpers that the adapter's tests share."""

import torch

import sparsecoll
from sparsecoll import simulate
from sparsecoll.torch import DistributedOptimizer, SparseSGD
from sparsecoll.torch.compressors import oktopk

P = 3
ALGORITHM = sparsecoll.OkTopk(tau=3, tau_prime=4)
EXACT = [{"algo": "dense"}, {"algo": "allgather", "density": 1.0}, {"algo": "oktopk", "density": 1.0}]  # no compression


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


def parameters(model):
    return [p.detach().clone() for p in model.parameters()]


def close(mine, theirs, rtol=1e-9, atol=1e-12):
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def residuals(optimizer):
    return optimizer.state_dict()["sparsecoll"]["tensors"].get("residual", {})


def compared(run, *, P=P, **options):
    """Run a loop on one process with the global batch, and on P ranks; the results must be close.

    `run(make, ranks, comm)` builds a model, calls `make(params, **settings)` and trains on the batches of `ranks`.
    """
    expected = run(torch.optim.SGD, range(P), None)

    def program(comm):
        return run(lambda params, *a, **s: SparseSGD(params, *a, comm=comm, **options, **s), [comm.rank], comm)

    for result in simulate(P, program).results:
        close(result, expected)


def mean_loss(model, ranks, step):
    return sum(loss_of(model, batch(rank, step)) for rank in ranks) / len(ranks)


def sparse(comm, model, **options):
    return SparseSGD(model.parameters(), 0.1, comm=comm, algo=ALGORITHM, density=0.1, **options)


def wrapped(comm, model, algo=ALGORITHM, **options):
    inner = torch.optim.SGD(model.parameters(), 0.1)
    options = {"bucket_bytes": 6000, "dense_below": 10, **options}
    return DistributedOptimizer(inner, model.named_parameters(), comm, oktopk(0.1, algo=algo), **options)
