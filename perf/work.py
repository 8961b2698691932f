"""CPU time of the library's own work in a training step, by kind, beside what memory bandwidth allows.

    python perf/testbed.py run -- python perf/work.py --interface eth0 --json perf/results/work.json
    python perf/training.py --render                      # docs/training.md has the table

The lines are those of perf/training.py. "bound" is the bytes that the work must read and write at least, divided by
the bandwidth of a rank that adds one array to another while all others do so. "other" is what the progress thread does
outside of all kinds: messages, agreements, plans, Python; its bound, which counts "wait", too, is the CPU time in which
plain sockets carry the bytes that a step receives.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plain_sockets import PlainSockets
from report import Row, markdown
from training import MODELS, lines

from sparsecoll.cli import bench
from sparsecoll.telemetry import trace
from sparsecoll.torch import Timeline
from sparsecoll.transport import as_transport, default_comm
from sparsecoll.transport.collectives import allgather

LINES = (
    "free",
    "topk 1 %",
    "topk 1 %, whole model",
    "oktopk 1 %",
    "dgc 1 %",
    "nesterovtopk 1 %",
    "SparseSGD, oktopk 1 %",
)

BYTES = {  # read and written for each unit of the amount of a span, with values of 4 bytes
    "copy": 8,  # a gradient into its bucket
    "select": 12,  # residual and gradient, and what stays behind
    "encode": 8 + 5,  # index and value, and their bytes on the wire
    "decode": 5 + 8,
    "merge": 8 + 8,
    "dense": 4,  # the mean
}
MOMENTUM, VELOCITIES = ("dgc", "nesterovtopk"), 8  # lines whose selection also reads and writes a velocity


class _Timed:
    """A span of Work: a class, since a generator would take a good part of what is to be measured."""

    __slots__ = ("_inner", "_kind", "_seconds", "_start")

    def __init__(self, seconds: dict[str, float], kind: str, inner: list[float]) -> None:
        self._seconds, self._kind, self._inner = seconds, kind, inner

    def __enter__(self) -> None:
        self._inner.append(0.0)
        self._start = time.thread_time()

    def __exit__(self, *error: object) -> None:
        whole = time.thread_time() - self._start
        self._seconds[self._kind] += whole - self._inner.pop()
        self._inner[-1] += whole


class Work(Timeline):
    """Adds up CPU seconds and amounts by kind of work instead of recording spans; time in nested spans counts once.

    What the training thread does is "copy"; "other" is what the progress thread does outside of all kinds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trainer = threading.get_ident()
        self.reset()

    def reset(self) -> None:
        """Begin again at zero."""
        self.seconds = dict.fromkeys(("copy", *trace.KINDS, "other"), 0.0)
        self.amounts = dict.fromkeys(self.seconds, 0)
        self._inner: dict[int, list[float]] = {}

    def span(self, name: str, /, *, amount: int = 0, **_: Any) -> _Timed:
        """Time a span of this thread."""
        thread = threading.get_ident()
        kind = "copy" if thread == self.trainer else name if name in trace.KINDS else "other"
        self.amounts[kind] += amount
        return _Timed(self.seconds, kind, self._inner.setdefault(thread, [0.0]))

    def add(self, *_: Any, **__: Any) -> None:
        """Spans that are over have no CPU seconds."""


def bandwidth(repeat: int = 5, size: int = 1 << 24) -> float:
    """Return the bytes per CPU second that this rank reads and writes when it adds one array to another."""
    a, b = np.ones(size, np.float32), np.ones(size, np.float32)
    times = []
    for _ in range(repeat):
        start = time.thread_time()
        np.add(a, b, out=a)
        times.append(time.thread_time() - start)
    return 12 * size / float(np.median(times))


def rows(comm: Any, options: argparse.Namespace, rate: float, carried: float) -> Iterator[Row]:
    """Yield a row for each line and kind of work: medians over the ranks, per step.

    Args:
        comm: communicator of all ranks.
        options: those of the command line.
        rate: bytes per second of `bandwidth`.
        carried: CPU seconds for each byte of a message.
    """
    work, transport = options.timeline, as_transport(comm)
    for model_name in options.models:
        for line, make in lines(model_name, options, comm):
            if line not in LINES:
                continue
            step = make()
            for _ in range(3):
                step()
            work.reset()
            before = transport.traffic.copy()
            with trace.record(work):
                for _ in range(options.repeat):
                    step()
            kinds = [*work.seconds]
            work.amounts["other"] = transport.traffic.since(before).total.bytes_received
            mine = [[work.seconds[kind], work.amounts[kind]] for kind in kinds]
            table = np.median(allgather(transport, np.array(mine).ravel()), axis=0).reshape(-1, 2)
            for kind, (seconds, amount) in zip(kinds, (table / options.repeat).tolist(), strict=True):
                velocities = VELOCITIES * (kind == "select" and line.startswith(MOMENTUM))
                size = amount * (1 if kind == "other" else BYTES.get(kind, 0) + velocities)
                bound = size * carried if kind == "other" else size / rate
                row = {"model": model_name, "line": line, "kind": kind, "CPU ms": 1e3 * seconds}
                yield row | {"MB": size / 1e6 or None, "bound, ms": 1e3 * bound or None}
            if hasattr(step.optimizer, "close"):
                step.optimizer.close()


def main() -> None:
    """Measure and print; rank 0 saves the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["vgg"])
    parser.add_argument("--batch", type=int, default=32, help="samples per rank and step")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--interface", help="network interface for plain sockets")
    parser.add_argument("--json", type=Path, help="save the rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    comm = default_comm()
    options.gloo, options.device, options.timeline = False, "cpu", Work()
    comm.Barrier()
    own = np.array([bandwidth(), PlainSockets(comm, options.interface).cpu_seconds_per_byte()])
    rate, carried = np.median(allgather(as_transport(comm), own), axis=0).tolist()
    costs = {"GB/s": rate / 1e9, "ms per MB": carried * 1e9}
    found = {"about": bench.about() | costs, "rows": list(rows(comm, options, rate, carried))}
    if comm.rank == 0:
        sys.stdout.write(f"{costs}\n{markdown(found['rows'])}\n")
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
