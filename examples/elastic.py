"""Train under torchrun with restarts: after the loss of a worker, the ranks that are left go on from the checkpoint.

    torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint localhost:29400 \
        examples/elastic.py          # in two terminals: end one of the two
    torchrun --nproc-per-node 4 --max-restarts 3 examples/elastic.py

A small net learns which of three numbers is the largest. Every rank saves its own residuals; a job with another number
of ranks loads them all, since they belong to parameters by name.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import sparsecoll.torch


def save(folder: Path, epoch: int, model: torch.nn.Module, optimizer: Any) -> None:
    """Save a checkpoint in `folder`, which all hosts see. It counts when `last.pt` names it."""
    here = folder / f"epoch-{epoch}"
    here.mkdir(parents=True, exist_ok=True)
    sparsecoll.torch.save(optimizer.state_dict(), here / f"optimizer-{dist.get_rank()}.pt")
    if dist.get_rank() == 0:
        sparsecoll.torch.save(model.state_dict(), here / "model.pt")
    dist.barrier()  # every rank has written its file
    if dist.get_rank() == 0:
        sparsecoll.torch.save({"epoch": epoch, "size": dist.get_world_size()}, folder / "last.pt")


def load(folder: Path, model: torch.nn.Module, optimizer: Any) -> int:
    """Load the last checkpoint, of any number of ranks, if there is one. Return the number of epochs that are done."""
    last = [sparsecoll.torch.load(folder / "last.pt") if (folder / "last.pt").exists() else None]
    dist.broadcast_object_list(last)  # rank 0 decides
    if last[0] is None:
        return 0
    epoch, size, rank = last[0]["epoch"], last[0]["size"], dist.get_rank()
    here = folder / f"epoch-{epoch}"
    model.load_state_dict(sparsecoll.torch.load(here / "model.pt"))
    if size == dist.get_world_size():
        state = sparsecoll.torch.load(here / f"optimizer-{rank}.pt")
    else:
        states = [sparsecoll.torch.load(here / f"optimizer-{other}.pt") for other in range(size)]
        state = sparsecoll.torch.redistribute(states, rank, dist.get_world_size())
    optimizer.load_state_dict(state)
    return epoch


def samples(count: int, seed: int) -> TensorDataset:
    """Return vectors of 20 numbers, labelled with the index of the largest of the first three."""
    x = torch.randn(count, 20, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :3].argmax(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=Path("elastic-results"), help="of checkpoints (%(default)s)")
    args = parser.parse_args()
    sparsecoll.torch.init_process_group()
    model = torch.nn.Sequential(torch.nn.Linear(20, 100), torch.nn.ReLU(), torch.nn.Linear(100, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = sparsecoll.torch.DistributedOptimizer(optimizer, model.named_parameters(), compressor="nesterovtopk")
    start = load(args.folder, model, optimizer)
    data, (x, y) = samples(4000, seed=0), samples(300, seed=1).tensors
    sampler = DistributedSampler(data, seed=42)
    loader = DataLoader(data, batch_size=64 // dist.get_world_size(), sampler=sampler)  # 64 a step, or a few less
    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        save(args.folder, epoch + 1, model, optimizer)
        right = 100 * float((model(x).argmax(1) == y).float().mean())
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: {right:.1f} % right on {dist.get_world_size()} ranks", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
