"""DistributedDataParallel with a compressor as its hook, under mpirun; gloo is there for DDP's own start-up.

mpirun -n 4 python examples/ddp.py
"""

from __future__ import annotations

import os
import socket

import torch
from torch.nn.parallel import DistributedDataParallel

import sparsecoll.torch
from sparsecoll.transport import default_comm


def main() -> None:
    comm = default_comm()
    host, port = "127.0.0.1", 0
    if comm.rank == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            host, port = socket.gethostname() if "SLURM_JOB_ID" in os.environ else host, free.getsockname()[1]
    host, port = comm.bcast((host, port)) if comm.size > 1 else (host, port)
    torch.distributed.init_process_group("gloo", f"tcp://{host}:{port}", rank=comm.rank, world_size=comm.size)

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
