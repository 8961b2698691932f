"""Use a compressor as the communication hook of DistributedDataParallel.

torchrun --nproc-per-node 4 examples/ddp.py
mpirun -n 4 python -m mpi4py examples/ddp.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sparsecoll.torch


def main() -> None:
    sparsecoll.torch.init_process_group()  # the processes of torchrun or of mpirun
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(50, 400), torch.nn.ReLU(), torch.nn.Linear(400, 5))
    model = DistributedDataParallel(model)
    model.register_comm_hook(sparsecoll.torch.HookState(None, "topk", model), sparsecoll.torch.comm_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    teacher = torch.randn(50, 5, generator=torch.Generator().manual_seed(9))
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for step in range(100):
        x = torch.randn(32, 50, generator=generator)
        loss = torch.nn.functional.cross_entropy(model(x), (x @ teacher).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 33 == 0:
            print(f"step {step:3}, loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
