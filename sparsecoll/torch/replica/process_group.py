"""torch.distributed's process group of the ranks of a communicator, for frameworks that get rank and size from it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from sparsecoll.errors import CommunicationError
from sparsecoll.torch.replica.calls import communicator
from sparsecoll.transport import SimComm, Transport, launcher
from sparsecoll.transport.all_ranks import barrier, node_members, spread
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.process_groups import bind

_told: dict[str, str] = {}  # environment variables of torchrun that were set here


def init_process_group(comm: Any = None, backend: str = "gloo", **options: Any) -> None:
    """Create torch.distributed's default process group of the ranks of a communicator, or of torchrun. Collective.

    A script that calls this first, and passes None as the communicator afterwards, runs under torchrun and mpirun.

    Accelerate, the Transformers Trainer and Lightning get rank and world size from this group and from the environment
    variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), which are set
    here, too. DistributedDataParallel starts up with the group. Call it before you create any object of a framework.

    An existing group is kept if it has the same ranks in the same order. sparsecoll's own messages continue to use
    `comm`, also where the group, or None, is passed as the communicator.

    Args:
        comm: mpi4py intracommunicator; None, the default, for the processes that torchrun has started, else
            MPI.COMM_WORLD, else one rank.
        backend: backend of torch.distributed (default: "gloo", for tensors on the CPU and on CUDA devices).
        **options: further arguments of `torch.distributed.init_process_group`, such as `timeout`.

    Raises:
        RuntimeError: On every rank, if there is another process group already, or `comm` is None and a launcher that
            MPI does not recognize has started several processes.
        TypeError: `comm` is a virtual rank of `sparsecoll.simulate`, which share one process.
    """
    if isinstance(comm, SimComm):
        raise TypeError("comm: expected an mpi4py communicator, got virtual ranks, which share one process")
    if comm is None and launcher.by_torchrun() and os.environ["WORLD_SIZE"] != _told.get("WORLD_SIZE"):
        if not dist.is_initialized():
            _join_torchrun(backend, **options)
        return
    transport = communicator(comm)
    if (known := transport.in_order(lambda: _meet(transport))) is not None:
        store, environment = known
        os.environ.update(environment)
        _told.update(environment)
        dist.init_process_group(backend, store=store, rank=transport.rank, world_size=transport.size, **options)
    bind(transport)


@contextlib.contextmanager
def torchrun_group(**options: Any) -> Iterator[Any]:
    """Context manager: the default process group of torchrun's ranks, for the time of the block if there was none."""
    if dist.is_initialized():
        yield dist.group.WORLD
        return
    _join_torchrun("gloo", **options)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def _join_torchrun(backend: str, **options: Any) -> None:
    """Create the default process group of torchrun's processes, also after a restart.

    torchrun may keep its store when it restarts the job (PyTorch 2.13 does), and then gloo finds the addresses of
    processes that have ended. So each start of the job gets a part of the store of its own, whose name rank 0 draws.
    """
    limit = {name: value for name, value in options.items() if name == "timeout" and value is not None}
    store, rank, size = next(iter(dist.rendezvous("env://", **limit)))  # type: ignore[no-untyped-call, attr-defined]
    if limit:
        store.set_timeout(options["timeout"])
    part = name_of_start(store, rank, size, options.get("timeout") or store.timeout)
    dist.init_process_group(
        backend, store=PrefixStore(f"sparsecoll/{part}", store), rank=rank, world_size=size, **options
    )


def name_of_start(store: Any, rank: int, size: int, timeout: timedelta) -> str:
    """Return a name that only the processes of this start of the job have.

    Every other rank asks with a random number, rank 0 answers what it finds, questions of processes that have ended
    included, until each rank has confirmed its answer.

    Raises:
        CommunicationError: A rank has not come within the timeout.
    """
    own, ends, answer = secrets.token_hex(8), time.monotonic() + timeout.total_seconds(), "sparsecoll/answer"

    def pause(waiting: set[int]) -> None:
        if time.monotonic() > ends:
            raise CommunicationError(
                f"init_process_group: expected all {size} ranks within {timeout}, rank {rank} has got no word of"
                f" {sorted(waiting)}: call it on all ranks"
            )
        time.sleep(0.005)

    if rank > 0:
        store.set(f"sparsecoll/question/{rank}", own)
        while not store.check([f"{answer}/{own}"]):
            pause({0})
        name: str = store.get(f"{answer}/{own}").decode()
        store.set(f"sparsecoll/confirmed/{own}/{name}", "")
        return name
    waiting = set(range(1, size))
    while waiting:
        pause(waiting)
        for other in list(waiting):
            if store.check([f"sparsecoll/question/{other}"]):
                question = store.get(f"sparsecoll/question/{other}").decode()
                store.set(f"{answer}/{question}", own)
                if store.check([f"sparsecoll/confirmed/{question}/{own}"]):
                    waiting.remove(other)
    return own


def _meet(transport: Transport) -> tuple[Any, dict[str, str]] | None:
    """Return a store that all ranks have joined and the environment variables, or None if there is a group already."""
    rank, size = transport.rank, transport.size
    with CollectiveCall(transport, "init_process_group") as call:
        if (exists := dist.is_initialized()) and (dist.get_rank(), dist.get_world_size()) != (rank, size):
            raise RuntimeError(
                f"torch.distributed: expected no process group yet, or rank {rank} of {size},"
                f" got rank {dist.get_rank()} of {dist.get_world_size()}"
            )
        call.signature["exists"] = exists
        call.agree(entries=rank)  # a message in every call: what one rank finds wrong, all hear
        if exists:
            return None
        nodes = node_members(transport)
        address, store = b"", None
        if rank == 0:
            host = "127.0.0.1" if len(nodes) == 1 else socket.gethostname()
            store = TCPStore(host, 0, size, is_master=True, wait_for_workers=False)
            address = json.dumps([host, store.port]).encode()
        host, port = json.loads(bytes(spread(transport, np.frombuffer(address, np.uint8))))
        if store is None:
            store = TCPStore(host, port, size, is_master=False)
        barrier(transport)  # the ranks that have a store wait for those that cannot reach it
    mine = next(members for members in nodes if rank in members)
    places = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": mine.index(rank), "LOCAL_WORLD_SIZE": len(mine)}
    return store, {name: str(value) for name, value in (places | {"MASTER_ADDR": host, "MASTER_PORT": port}).items()}
