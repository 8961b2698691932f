"""How much communication back-propagation hides where every rank has a core, and what a rank that waits costs.

    python perf/testbed.py run --hosts 2 -- python perf/overlap.py --interface eth0 --json perf/results/overlap.json
    python perf/training.py --render                      # docs/training.md has the tables

Overlap: LAYERS layers of equal size, each in a bucket of its own, whose back-propagation takes as long in all as dense
communication. It either computes (so many products of small matrices, which release the GIL) or waits for a device
(sleep). "hidden" is (time without overlap - time with it) / min(back-propagation, communication). "CPU s" is the
processor time that communication takes without overlap, selection and encoding included, and "CPU s, overlapped" with
it; "at most" is the share that is left to hide behind a back-propagation that needs the core itself.

Waits: rank 1 waits for a message of rank 0, which comes after a given time. "core" is the CPU time of the thread that
waits as a share of the time waited, "late" the microseconds from the end of that time until the message is there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gloo
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from report import Row, markdown

from sparsecoll.cli import bench
from sparsecoll.torch import DistributedOptimizer
from sparsecoll.torch.compressors import Compressor, TopK
from sparsecoll.transport import Transport, as_transport, default_comm
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.collectives import allgather

LAYERS, VALUES = 16, 1 << 20  # of a layer
COMPRESSORS: dict[str, str | Compressor] = {"none": "none", "fp16": "fp16", "topk 1 %": TopK(0.01)}
WAITS = (0.0003, 0.001, 0.002, 0.005, 0.01, 0.05, 0.5)  # seconds


def products(count: int) -> None:
    """Multiply small matrices so many times, without the GIL."""
    a = torch.ones(192, 192)
    for _ in range(count):
        torch.mm(a, a)


def products_per_second(comm: Any, count: int = 2000) -> float:
    """Return how many of them the slowest rank computes in a second while all do."""
    products(count)
    comm.Barrier()
    start = time.perf_counter()
    products(count)
    taken = np.array([time.perf_counter() - start])
    return count / float(allgather(as_transport(comm), taken).max())


class Layer(torch.autograd.Function):
    """The identity of x; its back-propagation works, then returns a gradient for the weight."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, work: Callable[[], None], scale: float
    ) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.work, ctx.scale = work, scale
        return x + 0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.work()
        return gradient, ctx.saved_tensors[0] * ctx.scale, None, None


class Step:
    """A step of a model of LAYERS layers, whose back-propagation does `work` in each, with or without communication."""

    def __init__(self, comm: Any, work: Callable[[], None], compressor: Any = None, **options: Any) -> None:
        generator = torch.Generator().manual_seed(comm.rank)
        self._weights = [torch.nn.Parameter(torch.randn(VALUES, generator=generator)) for _ in range(LAYERS)]
        self._comm, self._work = comm, work
        self._optimizer: Any = torch.optim.SGD(self._weights, 1e-6)
        self.close: Callable[[], object] = lambda: None
        if compressor is not None:
            named = [(str(i), w) for i, w in enumerate(self._weights)]
            settings = {"bucket_bytes": 4 * VALUES, **options}
            own = comm.Dup()  # optimizers that share a communicator do not overlap
            self._optimizer = optimizer = DistributedOptimizer(self._optimizer, named, own, compressor, **settings)
            self.close = lambda: (optimizer.close(), own.Free())

    def __call__(self) -> tuple[float, float]:
        """Take a step, which all ranks begin together; return its seconds and CPU seconds on this rank."""
        self._optimizer.zero_grad()
        self._comm.Barrier()
        start, cpu = time.perf_counter(), time.process_time()
        x = torch.zeros((), requires_grad=True)
        for weight in self._weights:
            x = Layer.apply(x, weight, self._work, 1.0 + self._comm.rank)  # type: ignore[no-untyped-call]
        x.backward()
        self._optimizer.step()
        return time.perf_counter() - start, time.process_time() - cpu


def in_turns(comm: Any, repeat: int, *steps: Step) -> NDArray[np.float64]:
    """Return the (seconds, CPU seconds) of the slowest rank for each repetition and step, of shape (repeat, steps, 2).

    The speed of a machine changes from second to second: the steps take turns.
    """
    times = [[step() for step in steps] for _ in range(repeat + 2)]
    for step in steps:
        step.close()
    of_all = allgather(as_transport(comm), np.array(times[2:]).ravel())
    return of_all.max(axis=0).reshape(repeat, len(steps), 2)


def overlap(comm: Any, repeat: int) -> Iterator[Row]:
    """Yield a row for each kind of work and compressor: medians, of differences within a turn."""

    def nothing() -> None:
        """Take no time in back-propagation."""

    bare = in_turns(comm, repeat, Step(comm, nothing), Step(comm, nothing, "none"))[..., 0]
    part = float(np.median(bare[:, 1] - bare[:, 0])) / LAYERS
    count = round(part * products_per_second(comm))
    for kind, work in {"computes": lambda: products(count), "waits for a device": lambda: time.sleep(part)}.items():
        for name, compressor in COMPRESSORS.items():
            steps = [Step(comm, work), Step(comm, work, compressor, overlap=False), Step(comm, work, compressor)]
            found = in_turns(comm, repeat, *steps)
            alone, apart, with_overlap = np.median(found[..., 0], axis=0).tolist()
            communication, cpu = np.median(found[:, 1] - found[:, 0], axis=0).tolist()
            overlapped = float(np.median(found[:, 2, 1] - found[:, 0, 1]))
            hidden = float(np.median(found[:, 1, 0] - found[:, 2, 0]))
            least = min(alone, communication)
            row = {"back-propagation": kind, "compressor": name, "s alone": alone, "s without overlap": apart}
            row |= {"s with overlap": with_overlap, "CPU s": max(cpu, 0.0), "CPU s, overlapped": max(overlapped, 0.0)}
            row["hidden"] = hidden / least
            row["at most"] = min(1.0, (communication - cpu) / least) if kind == "computes" else None
            yield row


def wait_of(transport: Transport, seconds: float) -> tuple[float, float]:
    """Return (CPU share of a wait, seconds that the message was late) on rank 1, zeros elsewhere."""
    with CollectiveCall(transport, "wait", None):
        if transport.rank == 0:
            time.sleep(seconds)
            transport.isend(1, np.array([time.perf_counter()]).view(np.uint8))
            transport.waitall()
        if transport.rank != 1:
            return 0.0, 0.0
        begun, cpu = time.perf_counter(), time.thread_time()
        sent = float(transport.irecv(0).wait().view(np.float64)[0])
        cpu, now = time.thread_time() - cpu, time.perf_counter()
        return cpu / (now - begun), now - sent


def waits(comm: Any, groups: dict[str, Any]) -> Iterator[Row]:
    """Yield a row for each length of a wait; medians, after a few waits of the same length."""
    for seconds in WAITS:
        row: Row = {"ms": 1000 * seconds}
        for name, group in groups.items():
            found = []
            for _ in range(max(8, min(40, int(1 / seconds)))):
                comm.Barrier()
                found.append(wait_of(as_transport(group), seconds))
            core, late = np.median(allgather(as_transport(comm), np.array(found[4:]).ravel())[1].reshape(-1, 2), axis=0)
            row |= {f"{name}: core": f"{100 * core:.1f} %", f"{name}: late, us": round(1e6 * late)}
        yield row


def main() -> None:
    """Measure and print; rank 0 saves the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--interface", help="network interface for gloo")
    parser.add_argument("--json", type=Path, help="save the rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    comm = default_comm()
    gloo.start(comm, options.interface)
    found: dict[str, Any] = {"about": bench.about()}
    found["waits"] = list(waits(comm, {"MPI": comm, "sockets": dist.group.WORLD}))
    found["overlap"] = list(overlap(comm, options.repeat))
    if comm.rank == 0:
        sys.stdout.write(f"{markdown(found['waits'])}\n\n{markdown(found['overlap'])}\n")
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
