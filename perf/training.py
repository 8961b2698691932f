"""Seconds per training step with every compressor, SparseSGD, and DistributedDataParallel over gloo, in one run.

    python perf/testbed.py run -- python perf/training.py --interface eth0 --json perf/results/training.json
    python perf/training.py --render                      # docs/training.md from those rows
    mpirun -n 8 python perf/training.py                   # any cluster

Models: "vgg" (20 M parameters, two convolutional blocks and three linear layers, on 28 x 28 images) and "mlp" (107 M
parameters), with random inputs. A step is forward, backward, reduction, and SGD with momentum; its time is that of the
slowest rank, the median of --repeat steps. "plain" is torch.optim.SGD on each rank alone, which is computation only; a
step of it comes before each step of every other line, and "x plain" is the median of their ratios, so that neither the
order of the lines nor what else the machine does favours one. "free" is DistributedOptimizer without communication.
"exposed" is the time that a rank waits in `step`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import gloo
import numpy as np
import torch
from report import Row, markdown
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import sparsecoll.torch
from sparsecoll.cli import bench
from sparsecoll.torch import DistributedOptimizer, SparseSGD
from sparsecoll.torch.compressors import COVAP, DGC, QSGD, Compressor, NesterovTopK, OkTopk, TopK
from sparsecoll.transport import as_transport, default_comm
from sparsecoll.transport.collectives import allgather

ROOT = Path(__file__).parent.parent
RESULTS, PAGE, TEXT = ROOT / "perf/results", ROOT / "docs/training.md", ROOT / "perf/training.in.md"
ROWS = RESULTS / "training.json"
LR, MOMENTUM = 0.01, 0.9
COMPRESSED: dict[str, tuple[str | Compressor, dict[str, Any]]] = {  # name: (compressor, options)
    "free": ("free", {}),
    "none": ("none", {}),
    "none, no overlap": ("none", {"overlap": False}),
    "fp16": ("fp16", {}),
    "topk 1 %": (TopK(0.01), {}),
    "topk 1 %, no overlap": (TopK(0.01), {"overlap": False}),
    "topk 1 %, whole model": (TopK(0.01), {"bucket_bytes": None}),
    "allgather 1 %": (TopK(0.01, algo="allgather"), {}),
    "oktopk 1 %": (OkTopk(0.01), {}),
    "densestream 1 %": ("densestream", {}),
    "dgc 1 %": (DGC(0.01), {}),
    "dgc 0.1 %": (DGC(0.001), {}),
    "nesterovtopk 1 %": (NesterovTopK(0.01), {}),
    "gaussiank 1 %": ("gaussiank", {}),
    "mstopk 1 %": ("mstopk", {}),
    "randomk 1 %": ("randomk", {}),
    "dragonn 1 %": ("dragonn", {}),
    "efsignsgd": ("efsignsgd", {}),
    "qsgd 8 bits": (QSGD(8), {}),
    "qsgd 2 bits": (QSGD(2), {}),
    "powersgd rank 4": ("powersgd", {}),
    "powersgd rank 4, no overlap": ("powersgd", {"overlap": False}),
    "powersgd rank 4, no fusion": ("powersgd", {"bucket_bytes": 1}),
    "acpsgd rank 4": ("acpsgd", {}),
    "acpsgd rank 4, no overlap": ("acpsgd", {"overlap": False}),
    "acpsgd rank 4, no fusion": ("acpsgd", {"bucket_bytes": 1}),
    "covap": ("covap", {}),
}
COVAPS = {f"covap, I = {interval}": (COVAP(interval), {}) for interval in (1, 2, 4, 8, 16, 32)}


def vgg() -> nn.Module:
    """Return a net of 20.3 M parameters for 28 x 28 images."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(64 * 49, 4096), nn.ReLU(), nn.Linear(4096, 1800), nn.ReLU(), nn.Linear(1800, 10)),
    )


def mlp() -> nn.Module:
    """Return a net of 107 M parameters for 784 values."""
    sizes = [784, 8192, 8192, 4096, 10]
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


MODELS = {"vgg": vgg, "mlp": mlp}
BATCH = 32  # samples per rank and step


def ddp_lines() -> dict[str, Callable[[Any, Any], None]]:
    """Return a dict from name to the function that registers the hook."""

    def power(model: Any, _: Any) -> None:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def ours(compressor: str) -> Callable[[Any, Any], None]:
        def register(model: Any, comm: Any) -> None:
            state = sparsecoll.torch.HookState(comm, compressor, model.module.named_parameters())
            model.register_comm_hook(state, sparsecoll.torch.comm_hook)

        return register

    return {
        "DDP, gloo": lambda model, _: None,
        "DDP, gloo, fp16 hook": lambda model, _: model.register_comm_hook(None, default_hooks.fp16_compress_hook),
        "DDP, gloo, PowerSGD hook, one bucket": power,
        "DDP, our hook, topk 1 %": ours("topk"),
        "DDP, our hook, acpsgd rank 4": ours("acpsgd"),
    }


class Step:
    """One line of the table: a model, its optimizer, and their step."""

    def __init__(self, model: nn.Module, forward: nn.Module, optimizer: Any, batch: int, rank: int) -> None:
        self.model, self.forward, self.optimizer = model, forward, optimizer
        generator, device = torch.Generator().manual_seed(rank), next(model.parameters()).device
        self.x = torch.randn(batch, 784, generator=generator).to(device)
        self.y = torch.randint(0, 10, (batch,), generator=generator).to(device)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.forward(self.x), self.y).backward()
        self.optimizer.step()
        if self.x.is_cuda:
            torch.cuda.synchronize()


def lines(model_name: str, options: argparse.Namespace, comm: Any) -> Iterator[tuple[str, Callable[[], Step]]]:
    """Yield the name of each line and a function that creates its Step; models are freed line by line."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return MODELS[model_name]().to(options.device)

    def sgd(model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), LR, momentum=MOMENTUM)

    def compressed(compressor: str | Compressor, settings: dict[str, Any]) -> Step:
        model = made()
        momentum = 0.0 if getattr(compressor, "momentum", 0.0) else MOMENTUM
        inner = torch.optim.SGD(model.parameters(), LR, momentum=momentum)
        settings = {"timeline": options.timeline, **settings}
        optimizer = DistributedOptimizer(inner, model.named_parameters(), comm, compressor, **settings)
        return Step(model, model, optimizer, options.batch, comm.rank)

    def sparse(algo: str) -> Step:
        model = made()
        settings: dict[str, Any] = {"comm": comm, "algo": algo, "density": 0.01, "timeline": options.timeline}
        optimizer = SparseSGD(model.parameters(), LR, MOMENTUM, **settings)
        return Step(model, model, optimizer, options.batch, comm.rank)

    def ddp(register: Callable[[Any, Any], None], **settings: Any) -> Step:
        model = nn.parallel.DistributedDataParallel(made(), **settings)
        register(model, comm)
        return Step(model, model, sgd(model), options.batch, comm.rank)

    def plain() -> Step:
        model = made()
        return Step(model, model, sgd(model), options.batch, comm.rank)

    yield "plain", plain
    for name, (compressor, settings) in (COMPRESSED | COVAPS).items():
        yield name, lambda c=compressor, s=settings: compressed(c, s)
    yield "SparseSGD, dense", lambda: sparse("dense")
    yield "SparseSGD, oktopk 1 %", lambda: sparse("oktopk")
    if options.gloo:
        for name, register in ddp_lines().items():
            one = {"bucket_cap_mb": 10_000} if "one bucket" in name else {}
            yield name, lambda r=register, one=one: ddp(r, **one)


def measure(step: Step, comm: Any, warm: int, repeat: int, plain: Step | None = None) -> Row:
    """Return the median seconds of a step on the slowest rank, their parts, and the ratio to steps of `plain`."""
    transport = as_transport(comm)
    for _ in range(warm):
        step()
    seconds = getattr(step.optimizer, "seconds", {})
    before, counted = dict(seconds), transport.traffic.copy()
    times = [timed(one, comm) for _ in range(repeat) for one in ([] if plain is None else [plain]) + [step]]
    parts = {kind: (value - before[kind]) / repeat for kind, value in seconds.items()}
    table = allgather(transport, np.array([*times, *parts.values()]))
    moved = transport.traffic.since(counted)
    *beside, slowest = table[:, : len(times)].max(axis=0).reshape(repeat, -1).T
    row: Row = {"seconds": float(np.median(slowest)), "least": float(slowest.min()), "most": float(slowest.max())}
    row |= {"MB received": moved.total.bytes_received / repeat / 1e6}
    row |= dict(zip(parts, table[:, len(times) :].mean(axis=0).tolist(), strict=True))
    return row | {"x plain": float(np.median(slowest / beside[0])) if beside else None}


def timed(step: Step, comm: Any) -> float:
    """Return the seconds of one step, which all ranks begin together."""
    comm.Barrier()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def rows(options: argparse.Namespace, comm: Any) -> Iterator[Row]:
    """Measure and yield the rows, the same on every rank."""
    for model_name in options.models:
        plain: Step | None = None
        for name, make in lines(model_name, options, comm):
            if options.lines and name != "plain" and not any(text in name for text in options.lines):
                continue
            step = make()
            measured = name == "covap"
            found = measure(step, comm, options.warm + (7 if measured else 0), options.repeat, plain)
            parameters = sum(p.numel() for p in step.model.parameters())
            row = {"model": model_name, "parameters": parameters, "batch": options.batch, "P": comm.size, "line": name}
            row |= found
            if measured:
                row["ccr"] = step.optimizer.state_dict()["sparsecoll"]["ccr"]
            if isinstance(step.optimizer, DistributedOptimizer):
                step.optimizer.close()
            if name == "plain":
                plain, row["x plain"] = step, 1.0
            del step
            yield row


def hidden(rows: dict[str, Row], name: str) -> float | None:
    """Return the share of min(computation, communication) that a line saves over itself without overlap."""
    alone, apart = rows.get("plain"), rows.get(f"{name}, no overlap")
    if alone is None or apart is None:
        return None
    return (apart["x plain"] - rows[name]["x plain"]) / min(1.0, apart["x plain"] - 1.0)


def tables(found: list[Row]) -> dict[str, str]:
    """Return the tables of the page by name: that of the net, and of the batch where it is another one."""
    made = {}
    for model, batch in dict.fromkeys((row["model"], row["batch"]) for row in found):
        rows = {row["line"]: row for row in found if (row["model"], row["batch"]) == (model, batch)}
        model_name = model if batch == BATCH else f"{model}_{batch}"
        best = min((row["x plain"] for name, row in rows.items() if name.startswith("DDP, gloo")), default=None)
        shown = []
        for name, row in rows.items():
            if name in COVAPS:
                continue
            line = {"line": name, "s / step": row["seconds"], "x plain": row["x plain"]}
            line |= {"best DDP / this": best / row["x plain"] if best else None}
            line |= {"MB received": row["MB received"] if row["MB received"] > 0.001 else None}
            line |= {kind: row.get(kind) for kind in ("select", "wait", "exposed")}
            shown.append(line | {"hidden": hidden(rows, name)})
        made[model_name] = markdown(shown)
        covap = [{"I": int(name.rpartition(" ")[2]), **rows[name]} for name in COVAPS if name in rows]
        made[f"{model_name}_covap"] = markdown(
            [{"I": r["I"], "s / step": r["seconds"], "x plain": r["x plain"], "exposed": r["exposed"]} for r in covap]
        )
        measured = rows.get("covap", {}).get("ccr")
        made[f"{model_name}_ccr"] = f"{measured:.1f}" if measured else "not measured"
    return made


def other_tables() -> dict[str, str]:
    """Return the tables of perf/work.py and perf/overlap.py, and their commits."""
    work, overlap = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("work", "overlap"))
    kinds = [
        {name: value for name, value in row.items() if name != "model"} for row in work["rows"] if row["CPU ms"] > 0.1
    ]
    found = {
        "work": markdown(kinds),
        "bandwidth": f"{work['about']['GB/s']:.0f}",
        "carried": f"{work['about']['ms per MB']:.1f}",
        "work_commit": work["about"]["commit"],
    }
    found |= {name: markdown(overlap[name]) for name in ("overlap", "waits")}
    return found | {"overlap_commit": overlap["about"]["commit"], **more_cores()}


def more_cores() -> dict[str, str]:
    """Return the tables of the machine with 16 cores and a GPU: every run of a line."""
    saved = json.loads((RESULTS / "training_16_cores.json").read_text())
    found = {"cores_machine": saved["about"]["machine"], "cores_commits": saved["about"]["commit"]}
    for device in ("cpu", "cuda"):
        shown: dict[tuple[str, str], Row] = {}
        for row in saved["rows"]:
            if row["device"] == device:
                new = {
                    "million": round(row["parameters"] / 1e6),
                    "line": row["line"],
                    "s / step": f"{row['seconds']:.3g}",
                }
                new |= {
                    "x plain": f"{row['x plain']:.3g}",
                    "MB received": row["MB received"] if row["MB received"] > 0.001 else None,
                }
                new |= {kind: row.get(kind) or None for kind in ("select", "encode", "decode", "wait", "exposed")}
                before = shown.setdefault((row["model"], row["line"]), new)
                if before is not new:
                    before |= {name: f"{before[name]}, {new[name]}" for name in ("s / step", "x plain")}
        found[f"cores_{device}"] = markdown(sorted(shown.values(), key=lambda row: row["million"]))
    return found


def key(row: Row) -> tuple[Any, ...]:
    """Return what a row is of."""
    return row["model"], row["batch"], row["P"], row["line"]


def kept(file: Path) -> dict[tuple[Any, ...], Row]:
    """Return the rows that are in a file by their keys; raise ValueError unless they are of this commit."""
    saved, now = json.loads(file.read_text()), bench.about()["commit"]
    if saved["about"]["commit"] != now:
        raise ValueError(f"--update: expected rows of {now} in {file}, got those of {saved['about']['commit']}")
    return {key(row): row for row in saved["rows"]}


def main() -> None:
    """Measure and print; rank 0 saves the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--lines", nargs="+", help="only plain and lines whose name contains one of these")
    parser.add_argument("--batch", type=int, default=BATCH, help="samples per rank and step")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; ranks on one host share its GPU")
    parser.add_argument("--repeat", type=int, default=6)
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--no-gloo", dest="gloo", action="store_false", help="without DistributedDataParallel")
    parser.add_argument("--interface", help="network interface for gloo")
    parser.add_argument("--json", type=Path, help="save the rows")
    parser.add_argument("--update", action="store_true", help="keep the other rows of that file, of the same commit")
    parser.add_argument("--render", action="store_true", help="only write the page")
    parser.set_defaults(timeline=None)  # perf/work.py has one
    options = parser.parse_args()
    if options.update and not options.json:
        parser.error("--update: expected --json FILE with it")
    if options.render:
        saved = json.loads(ROWS.read_text())
        about = {"commit": saved["about"]["commit"], "machine": saved["about"]["machine"]}
        PAGE.write_text(TEXT.read_text().format(**about, **tables(saved["rows"]), **other_tables()))
        return
    torch.set_num_threads(1)
    comm = default_comm()
    if options.gloo:
        gloo.start(comm, options.interface)
    found = kept(options.json) if options.update else {}
    for row in rows(options, comm):
        found[key(row)] = row
        if comm.rank == 0:
            parts = " ".join(f"{kind} {row[kind]:.3f}" for kind in ("select", "wait", "exposed") if kind in row)
            sys.stdout.write(
                f"{row['model']:<5}{row['line']:<38}{row['seconds']:>8.3f} s {row['x plain'] or 0:>6.2f} x plain"
                f" {row['MB received']:>8.2f} MB  {parts}\n"
            )
            sys.stdout.flush()
            if options.json:
                saved = {"about": bench.about(), "rows": [*found.values()]}
                options.json.write_text(json.dumps(saved, indent=1) + "\n")


if __name__ == "__main__":
    main()
