"""Compares the quality of sparse and dense training: nets on real data, P ranks, several seeds.

    python perf/convergence.py --jobs 2                      # rows to perf/results/convergence.json, some hours
    python perf/convergence.py --render                      # docs/convergence.md and its figures from those rows
    python perf/convergence.py --validate --tasks vgg        # on a part of the training data; for choices, no rows
    mpirun -n 4 python perf/convergence.py --tasks vgg       # over MPI instead of virtual ranks

perf/nets.py has the nets and their data. Every rank trains on its own share of the data, and the global batch is the
same for every P. Rows that exist are not run again. The lines of a table differ only in the compressor; learning rates
were chosen for "dense". Momentum is that of SGD, except that the lines at 1 % use momentum correction
(sparsecoll.torch.compressors.TopK); "momentum outside" shows the effect of leaving it out. With AdamW all compressors
reduce the gradient itself. A run on virtual ranks is deterministic.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from convergence_page import ROWS, key_of, load, render
from nets import TASKS, Task, data, quality
from report import Row
from torch import nn

from sparsecoll import simulate
from sparsecoll.cli import bench
from sparsecoll.torch import DistributedOptimizer, LocalOptimizer
from sparsecoll.torch.compressors import (
    ACPSGD,
    COVAP,
    DGC,
    QSGD,
    Compressor,
    DenseStream,
    NesterovTopK,
    OkTopk,
    PowerSGD,
    TopK,
)
from sparsecoll.torch.schedule import WarmUp
from sparsecoll.transport import default_comm

POINTS = 8  # of a curve
MOMENTUM = 0.9
DENSITY = 0.01


BEST = "allgather 1 %, 4 bits, Nesterov"
TWICE = "allgather 2 %, 4 bits, Nesterov"
# Momentum of lines that have another one, and as much more learning rate: what waits acts like momentum
SHORTER = {
    BEST: 0.7,
    TWICE: 0.7,
    "allgather 1 %, 4 bits, Nesterov, rate": 0.7,
    "allgather 2 %, 4 bits, Nesterov, rate": 0.7,
    "allgather 1 %, 4 bits": 0.7,
    "oktopk 1 %, momentum 0.5": 0.5,
    "cltk 1 %, momentum 0.5": 0.5,
}


def corrected(
    make: Callable[..., Compressor],
    momentum: float = MOMENTUM,
    nesterov: bool = False,
    follow_lr: bool = False,
    warm_up: float = 0.0,
    density: float = DENSITY,
    **options: Any,
) -> Callable[[Task, int], Compressor]:
    """A line with momentum in the compressor, for tasks that have one, and local clipping; `warm_up` of all steps."""
    sgd = {"momentum": momentum, "nesterov": nesterov, "follow_lr": follow_lr}

    def made(task: Task, steps: int) -> Compressor:
        own = {} if task.adam else {"clip": task.clip, **sgd}
        schedule = WarmUp(density, max(1, round(warm_up * steps))) if warm_up else density
        return make(schedule, **own, **options)

    return made


# (task, number of steps) -> compressor
FOUR_BITS: dict[str, Any] = {"momentum": 0.7, "warm_up": 0.02, "algo": "allgather", "format": "packed_codes"}
CORRECTED: dict[str, Callable[[Task, int], Compressor]] = {
    BEST: corrected(NesterovTopK, momentum=0.7, nesterov=True, warm_up=0.02),
    TWICE: corrected(NesterovTopK, momentum=0.7, nesterov=True, warm_up=0.02, density=2 * DENSITY),
    "allgather 1 %, 4 bits, Nesterov, rate": corrected(TopK, nesterov=True, follow_lr=True, **FOUR_BITS),
    "allgather 2 %, 4 bits, Nesterov, rate": corrected(
        TopK, nesterov=True, follow_lr=True, density=2 * DENSITY, **FOUR_BITS
    ),
    "allgather 1 %, 4 bits": corrected(TopK, **FOUR_BITS),
    "oktopk 1 %, momentum 0.5": corrected(OkTopk, momentum=0.5),
    "oktopk 1 %": corrected(OkTopk),
    "oktopk 1 %, warm-up": corrected(OkTopk, warm_up=0.1),
    "allgather 1 %": corrected(TopK, algo="allgather"),
    "allgather 1 %, warm-up": corrected(TopK, algo="allgather", warm_up=0.1),
    "densestream 1 %": corrected(DenseStream),
    "cltk 1 %": corrected(TopK, algo="cltk"),
    "cltk 1 %, momentum 0.5": corrected(TopK, momentum=0.5, algo="cltk"),
    "exdyna 1 %": corrected(TopK, algo="exdyna"),
    "arctopk 1 %": corrected(TopK, algo="arctopk"),
    "dgc 1 %": lambda task, _: DGC(DENSITY, momentum=0.0 if task.adam else MOMENTUM, clip=task.clip),
}
OTHERS: dict[str, Callable[[Task, int], str | Compressor]] = {
    "dense": lambda *_: "none",
    "dense, Nesterov": lambda *_: "none",
    "oktopk 1 %, momentum outside": lambda *_: OkTopk(DENSITY),
    "powersgd rank 4": lambda *_: PowerSGD(4),
    "acpsgd rank 4": lambda *_: ACPSGD(4),
    "covap I = 4": lambda *_: COVAP(4),
    "covap I = 9": lambda *_: COVAP(9),  # what is measured for docs/training.md, over 1 Gb/s
    "qsgd 8 bits": lambda *_: QSGD(8),
    "qsgd 4 bits": lambda *_: QSGD(4),
    "qsgd 2 bits": lambda *_: QSGD(2),
}
LOCAL = {"10 local steps, 10 %, 4 bits": {"every": 10, "outer_lr": 2.0}}  # options of LocalOptimizer, for AdamW
LOCALS: dict[str, Callable[[Task, int], str | Compressor]] = {
    line: lambda *_: TopK(0.1, algo="allgather", format="packed_codes") for line in LOCAL
}
LINES = {"dense": OTHERS["dense"], **CORRECTED, **OTHERS, **LOCALS}


def made_for(task: Task, line: str) -> bool:
    """Whether a line differs from others with the optimizer of a task."""
    return line not in SHORTER and "Nesterov" not in line if task.adam else line not in LOCAL


def optimizers(
    task: Task, line: str, model: nn.Module, comm: Any, steps: int
) -> tuple[torch.optim.Optimizer, DistributedOptimizer | LocalOptimizer]:
    """Return the optimizer of a line, without and with its wrapper."""
    lr = task.lr * (1 - SHORTER.get(line, MOMENTUM)) / (1 - MOMENTUM)
    inner: torch.optim.Optimizer
    if task.adam:
        inner = torch.optim.AdamW(model.parameters(), task.lr, betas=(0.9, 0.95), weight_decay=0.1)
    else:
        momentum = 0.0 if line in CORRECTED else MOMENTUM
        inner = torch.optim.SGD(model.parameters(), lr, momentum=momentum, nesterov=line == "dense, Nesterov")
    size = 1 << 18 if line.startswith("covap") else 25 << 20  # COVAP filters buckets, so it needs some
    compressor = LINES[line](task, steps)
    small = 0 if ", 4 bits" in line else 1024
    common = {"bucket_bytes": size, "dense_below": small}
    if line in LOCAL:
        return inner, LocalOptimizer(inner, model, comm, compressor, **common, **LOCAL[line])
    overlap = task.clip is None
    return inner, DistributedOptimizer(inner, model.named_parameters(), comm, compressor, overlap=overlap, **common)


def train(comm: Any, name: str, line: str, seed: int, validate: bool = False) -> Row:
    """Train on one rank; `curve` has (step, MB received by this rank, quality) of rank 0's model."""
    task = TASKS[name]
    (x, y), test = data(name, validate)
    torch.manual_seed(seed)
    model = task.net(x)
    own = torch.arange(comm.rank, len(y) - len(y) % comm.size, comm.size)
    batch = task.batch // comm.size
    steps = int(task.epochs * (len(own) // batch))
    inner, optimizer = optimizers(task, line, model, comm, steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda s: min((s + 1) / (0.1 * steps), (steps - s) / steps))
    clip = None if line in CORRECTED else task.clip  # of each rank's own gradients
    shuffle = torch.Generator().manual_seed(1000 * seed + comm.rank)
    order: Iterator[torch.Tensor] = iter(())
    curve = []
    before = optimizer.traffic.total.bytes_received
    for step in range(1, steps + 1):
        chosen = next(order, None)
        if chosen is None or len(chosen) < batch:
            order = iter(own[torch.randperm(len(own), generator=shuffle)].split(batch))
            chosen = next(order)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[chosen]), y[chosen].long()).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
        point = step * POINTS // steps > (step - 1) * POINTS // steps
        if point and isinstance(optimizer, LocalOptimizer):
            optimizer.synchronize()
        if point and comm.rank == 0:
            received = (optimizer.traffic.total.bytes_received - before) / 1e6
            part = test if step == steps else (test[0][::5], test[1][::5])
            curve.append([step, received, quality(model, part, task.unit)])
    optimizer.close()
    parameters = sum(p.numel() for p in model.parameters())
    return {"steps": steps, "parameters": parameters, "curve": curve}


def run(key: tuple[str, str, int, int], validate: bool = False) -> Row:
    """Train on virtual ranks and return the row."""
    torch.set_num_threads(1)
    name, line, P, seed = key
    row = simulate(P, lambda comm: train(comm, name, line, seed, validate)).results[0]
    return {"task": name, "line": line, "P": P, "seed": seed, "commit": bench.about()["commit"], **row}


def save(row: Row) -> None:
    """Add a row to the file."""
    rows = [*load(), row]
    rows.sort(key=lambda r: (list(TASKS).index(r["task"]), r["P"], list(LINES).index(r["line"]), r["seed"]))
    texts = ",\n".join("  " + json.dumps(r) for r in rows)
    ROWS.write_text(f'{{\n "about": {json.dumps(bench.about())},\n "rows": [\n{texts}\n ]\n}}\n')


def main() -> None:
    """Run the missing rows, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--lines", nargs="+", choices=LINES, default=list(LINES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[4, 8], help="virtual ranks; not under mpirun")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--validate", action="store_true", help="print the quality on a part of the training data")
    parser.add_argument("--render", action="store_true", help="only write the page")
    options = parser.parse_args()
    if options.render:
        rate = [f"{line}, rate" for line in (TWICE, BEST)]
        render(list(LINES), {"best": [BEST, TWICE], "rate": rate, "before": ["allgather 1 %, 4 bits"]})
        return
    comm = default_comm()
    if comm.size > 1:
        options.ranks = [comm.size]
    keys = [
        (name, line, P, seed)
        for P in options.ranks
        for seed in options.seeds
        for name in options.tasks
        for line in options.lines
        if made_for(TASKS[name], line)
    ]
    have = set() if options.validate else {key_of(row) for row in load()}
    missing = [key for key in keys if key not in have]

    def done(row: Row) -> None:
        if not options.validate:
            save(row)
        _, received, reached = row["curve"][-1]
        shown = f"{reached:.2f} {TASKS[row['task']].unit}  {received:.1f} MB"
        sys.stdout.write(f"{row['task']:<8}{row['line']:<30}P {row['P']} seed {row['seed']} {shown}\n")
        sys.stdout.flush()

    if comm.size > 1:
        torch.set_num_threads(1)
        for name, line, P, seed in missing:
            row = train(comm, name, line, seed, options.validate)
            if comm.rank == 0:
                done({"task": name, "line": line, "P": P, "seed": seed, "commit": bench.about()["commit"], **row})
        return
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for row in pool.imap(partial(run, validate=options.validate), missing):
            done(row)


if __name__ == "__main__":
    main()
