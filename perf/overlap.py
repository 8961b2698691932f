"""How much communication back-propagation hides where every rank has a core, and what a rank that waits costs.

    python perf/testbed.py run --hosts 2 -- python perf/overlap.py --interface eth0 --json perf/results/overlap.json
    python perf/training.py --render                      # docs/training.md has the tables

Overlap: LAYERS layers of equal size, each in a bucket of its own, whose back-propagation takes as long in all as dense
communication. It either computes (so many products of small matrices, which release the GIL) or waits for a device
(sleep). "hidden" is (time without overlap - time with it) / min(back-propagation, communication). "CPU s" is the
processor time that communication takes, selection and encoding included, and "at most" the share that is left to hide
behind a back-propagation that needs the core itself.

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


def seconds_of_step(
    comm: Any, work: Callable[[], None], repeat: int, compressor: Any = None, **options: Any
) -> tuple[float, float]:
    """Return the median seconds and CPU seconds of a step on the slowest rank; without compressor, of it alone."""
    generator = torch.Generator().manual_seed(comm.rank)
    weights = [torch.nn.Parameter(torch.randn(VALUES, generator=generator)) for _ in range(LAYERS)]
    optimizer: Any = torch.optim.SGD(weights, 1e-6)
    if compressor is not None:
        named = [(str(i), w) for i, w in enumerate(weights)]
        optimizer = DistributedOptimizer(optimizer, named, comm, compressor, bucket_bytes=4 * VALUES, **options)
    times = []
    for _ in range(repeat + 2):
        optimizer.zero_grad()
        comm.Barrier()
        start, cpu = time.perf_counter(), time.process_time()
        x = torch.zeros((), requires_grad=True)
        for weight in weights:
            x = Layer.apply(x, weight, work, 1.0 + comm.rank)  # type: ignore[no-untyped-call]
        x.backward()
        optimizer.step()
        times.append((time.perf_counter() - start, time.process_time() - cpu))
    if compressor is not None:
        optimizer.close()
    of_all = allgather(as_transport(comm), np.array(times[2:]).ravel())
    seconds, cpu = np.median(of_all.max(axis=0).reshape(-1, 2), axis=0).tolist()
    return seconds, cpu


def overlap(comm: Any, repeat: int) -> Iterator[Row]:
    """Yield a row for each kind of work and compressor."""
    dense = seconds_of_step(comm, lambda: None, repeat, "none")[0] - seconds_of_step(comm, lambda: None, repeat)[0]
    part = dense / LAYERS
    count = round(part * products_per_second(comm))
    for kind, work in {"computes": lambda: products(count), "waits for a device": lambda: time.sleep(part)}.items():
        alone, own_cpu = seconds_of_step(comm, work, repeat)
        for name, compressor in COMPRESSORS.items():
            apart, cpu = seconds_of_step(comm, work, repeat, compressor, overlap=False)
            with_overlap, _ = seconds_of_step(comm, work, repeat, compressor)
            least, cpu = min(alone, apart - alone), max(0.0, cpu - own_cpu)
            row = {"back-propagation": kind, "compressor": name, "s alone": alone, "s without overlap": apart}
            row |= {"s with overlap": with_overlap, "CPU s": cpu, "hidden": (apart - with_overlap) / least}
            row["at most"] = min(1.0, (apart - alone - cpu) / least) if kind == "computes" else None
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
