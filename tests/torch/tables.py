"""Tables of embeddings, whose gradients are rows."""

import torch

from sparsecoll import RowSparse

P, N, D = 3, 50, 4


def table(dtype=torch.float32, n=N):
    torch.manual_seed(0)
    return torch.nn.Embedding(n, D, sparse=True, dtype=dtype)


def backward(embedding, rank, step, scale=1.0):
    (loss_of(embedding, rank, step) * scale).backward()


def loss_of(embedding, rank, step):
    """Zipf-like ids, some of them several times, and gradients whose sums round."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    ids = (embedding.num_embeddings * torch.rand(12, generator=generator) ** 2).long()
    weight = torch.randn(12, D, generator=generator).to(embedding.weight.dtype)
    return (embedding(ids) * weight).sum()


def rows_of(gradient):
    accumulated = torch.float64 if gradient.dtype == torch.float64 else torch.float32
    values = gradient._values().to(accumulated).numpy()
    return RowSparse.from_pairs(gradient._indices()[0].numpy(), values, gradient.shape[0])


def train(comm, embedding, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        backward(embedding, comm.rank, step)
        optimizer.step()
