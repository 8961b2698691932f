"""Starts torch.distributed with gloo in a job of mpirun."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch.distributed as dist


def start(comm: Any, interface: str | None) -> None:
    """Make the default process group of these ranks, which meet at a file, since hosts may have no names; collective.

    Args:
        comm: communicator of all ranks, on one machine.
        interface: network interface for gloo; None for its own choice.
    """
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    where = comm.bcast(tempfile.mkdtemp(prefix="gloo-") if comm.rank == 0 else None)
    dist.init_process_group("gloo", f"file://{where}/store", rank=comm.rank, world_size=comm.size)
