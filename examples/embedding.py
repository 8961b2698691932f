"""Sum the gradients of an embedding as sparse tensors, then train with sparse updates of its rows.

python examples/embedding.py
mpirun -n 4 python examples/embedding.py
"""

from __future__ import annotations

import torch

import sparsecoll
import sparsecoll.torch
from sparsecoll.torch.compressors import TopK
from sparsecoll.transport import default_comm

WORDS, WIDTH = 50_000, 32


def main() -> None:
    comm = default_comm()
    torch.manual_seed(0)
    embedding, head = torch.nn.Embedding(WORDS, WIDTH, sparse=True), torch.nn.Linear(WIDTH, 2)
    generator = torch.Generator().manual_seed(1 + comm.rank)  # every rank has its own texts

    def loss() -> torch.Tensor:
        texts = torch.randint(0, 500, (64, 9), generator=generator)
        labels = ((texts % 2).float().mean(1) > 0.5).long()  # label 1: most words are odd
        return torch.nn.functional.cross_entropy(head(embedding(texts).mean(1)), labels)

    loss().backward()
    gradient = embedding.weight.grad.coalesce()
    total = sparsecoll.allreduce(comm, gradient, "allgather")  # takes and returns a sparse_coo tensor
    here, everywhere = gradient.indices().shape[1], total.indices().shape[1]
    received = sparsecoll.traffic(comm).total.bytes_received
    if comm.rank == 0:
        print(f"{here} rows here, {everywhere} rows of {WORDS} on all ranks; {received:,} bytes received")

    named = [*embedding.named_parameters("embedding"), *head.named_parameters("head")]
    inner = torch.optim.SGD([p for _, p in named], lr=5.0)
    optimizer = sparsecoll.torch.DistributedOptimizer(inner, named, comm, TopK(0.05, "allgather"))
    first = last = 0.0
    for step in range(200):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        first, last = (value.item(), 0.0) if step == 0 else (first, value.item())
    if comm.rank == 0:
        print(f"loss {first:.3f} at first, {last:.3f} after 200 steps")
    optimizer.close()


if __name__ == "__main__":
    main()
