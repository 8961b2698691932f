"""Use a compressor as the communication hook of DistributedDataParallel, under mpirun (DDP's own start-up uses gloo).

mpirun -n 4 python examples/ddp.py
"""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

import sparsecoll.torch
from sparsecoll.transport import default_comm


def main() -> None:
    comm = default_comm()
    sparsecoll.torch.init_process_group(comm)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(50, 400), torch.nn.ReLU(), torch.nn.Linear(400, 5))
    model = DistributedDataParallel(model)
    model.register_comm_hook(sparsecoll.torch.HookState(comm, "topk"), sparsecoll.torch.comm_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    teacher = torch.randn(50, 5, generator=torch.Generator().manual_seed(9))
    generator = torch.Generator().manual_seed(1 + comm.rank)
    for step in range(100):
        x = torch.randn(32, 50, generator=generator)
        loss = torch.nn.functional.cross_entropy(model(x), (x @ teacher).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if comm.rank == 0 and step % 33 == 0:
            print(f"step {step:3}, loss {loss.item():.3f}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
