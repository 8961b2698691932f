"""Seconds of training until a net is as good as dense training makes it, on slow links.

    python perf/testbed.py run -- python perf/time_to_quality.py --interface eth0   # 4 hosts with 1 Gb/s
    python perf/time_to_quality.py --render                                        # the figure from the saved rows

A net of 5.8 M parameters (784, 2048, 2048, 10, with batch norm) learns Fashion-MNIST with a global batch of 128. All
lines start from the same parameters, take the same steps on the same samples, and differ in what is sent:
DistributedDataParallel over gloo as it is, with its hooks for float16 and PowerSGD, and what docs/convergence.md says
to do. The clock runs during the steps alone; accuracy is measured on the test images in between.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gloo
import real_data
import torch
from nets import quality
from report import Row, markdown
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from sparsecoll.cli import bench
from sparsecoll.torch import DistributedOptimizer, WarmUp
from sparsecoll.torch.compressors import NesterovTopK
from sparsecoll.transport import default_comm

ROOT = Path(__file__).parent.parent
ROWS, FIGURE = ROOT / "perf/results/time_to_quality.json", ROOT / "docs/figures/time_to_quality.png"
BATCH, LR, MOMENTUM, SHORTER, MARGIN = 128, 0.05, 0.9, 0.7, 0.2

Made = tuple[Any, torch.optim.Optimizer, float]  # what is called, what steps, learning rate


def net() -> nn.Module:
    """Return the net."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs in (784, 2048):
        layers += [nn.Linear(inputs, 2048, bias=False), nn.BatchNorm1d(2048), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(2048, 10))


def lines(comm: Any, steps: int) -> dict[str, Callable[[nn.Module], Made]]:
    """Return what makes each line's model and optimizer."""

    def ddp(hook: Callable[[Any], None] | None = None, **options: Any) -> Callable[[nn.Module], Made]:
        def made(model: nn.Module) -> Made:
            wrapped = nn.parallel.DistributedDataParallel(model, **options)
            if hook is not None:
                hook(wrapped)
            return wrapped, torch.optim.SGD(model.parameters(), LR, momentum=MOMENTUM), LR

        return made

    def power(model: Any) -> None:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=10)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def ours(model: nn.Module) -> Made:
        lr = LR * (1 - SHORTER) / (1 - MOMENTUM)
        compressor = NesterovTopK(WarmUp(0.01, max(1, steps // 50)), momentum=SHORTER)
        inner = torch.optim.SGD(model.parameters(), lr)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), comm, compressor, dense_below=0)
        return model, optimizer, lr

    return {
        "DDP, gloo": ddp(),
        "DDP, fp16 hook": ddp(lambda model: model.register_comm_hook(None, default_hooks.fp16_compress_hook)),
        "DDP, PowerSGD hook, rank 4": ddp(power, bucket_cap_mb=1000),
        "sparsecoll, top k, 4 bits": ours,
    }


def train(comm: Any, make: Callable[[nn.Module], Made], steps: int, points: int) -> list[list[float]]:
    """Train; return (step, seconds, accuracy) of rank 0."""
    (x, y), test = real_data.fashion_mnist()
    torch.manual_seed(0)
    called, optimizer, lr = make(net())
    model = getattr(called, "module", called)
    own = torch.arange(comm.rank, len(y) - len(y) % comm.size, comm.size)
    shuffle, batch = torch.Generator().manual_seed(comm.rank), BATCH // comm.size
    curve, seconds, order = [], 0.0, torch.empty(0, dtype=torch.int64)
    for step in range(1, steps + 1):
        if len(order) < batch:
            order = own[torch.randperm(len(own), generator=shuffle)]
        chosen, order = order[:batch], order[batch:]
        for group in optimizer.param_groups:
            group["lr"] = lr * min(step / (0.1 * steps), (steps - step + 1) / steps)
        comm.Barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(called(x[chosen]), y[chosen]).backward()
        optimizer.step()
        comm.Barrier()
        seconds += time.perf_counter() - start
        if step * points // steps > (step - 1) * points // steps:
            if comm.rank == 0:
                curve.append([step, seconds, quality(model, test)])
            comm.Barrier()
    if isinstance(optimizer, DistributedOptimizer):
        optimizer.close()
    return curve


def table(rows: list[Row]) -> str:
    """Return the table: seconds until a line first reaches dense's final accuracy less MARGIN, and in all."""
    goal = rows[0]["curve"][-1][2] - MARGIN
    shown = []
    for row in rows:
        reached = next((i for i, (*_, accuracy) in enumerate(row["curve"]) if accuracy >= goal), None)
        until = None if reached is None else row["curve"][reached][1]
        last = row["curve"][-1]
        shown.append(
            {"line": row["line"], f"s to {goal:.1f} %": until, "s in all": last[1], "accuracy": f"{last[2]:.2f}"}
        )
    return markdown(shown)


def draw(rows: list[Row]) -> None:
    """Draw accuracy against seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for row in rows:
        _, seconds, accuracy = zip(*row["curve"], strict=True)
        axis.plot(seconds, accuracy, label=row["line"])
    goal = rows[0]["curve"][-1][2] - MARGIN
    axis.axhline(goal, color="grey", linewidth=0.8, linestyle="--")
    axis.set(xlabel="seconds of training, 4 hosts with 1 Gb/s", ylabel="test accuracy, %", ylim=(goal - 6, goal + 1.5))
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(FIGURE, dpi=130)


def main() -> None:
    """Train every line, save rows and figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--points", type=int, default=35, help="measurements of accuracy")
    parser.add_argument("--lines", nargs="+", help="only lines whose name contains one of these")
    parser.add_argument("--interface", help="network interface for gloo")
    parser.add_argument("--render", action="store_true", help="only draw the figure and print the table")
    options = parser.parse_args()
    if options.render:
        rows = json.loads(ROWS.read_text())["rows"]
        draw(rows)
        sys.stdout.write(table(rows) + "\n")
        return
    torch.set_num_threads(1)
    comm = default_comm()
    gloo.start(comm, options.interface)
    rows: list[Row] = []
    for name, make in lines(comm, options.steps).items():
        if options.lines and not any(text in name for text in options.lines):
            continue
        curve = train(comm, make, options.steps, options.points)
        if comm.rank == 0:
            rows.append({"line": name, "P": comm.size, "curve": curve})
            sys.stdout.write(f"{name:<30}{curve[-1][1]:8.1f} s  {curve[-1][2]:.2f} %\n")
            sys.stdout.flush()
    if comm.rank == 0 and not options.lines:
        ROWS.write_text(json.dumps({"about": bench.about(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
