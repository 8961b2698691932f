"""Sharded models: seconds per step and bytes between nodes, and loss curves, against torch's own HSDP, FSDP and DDP.

    python perf/testbed.py run --per-host 2 -- python perf/fsdp.py --interface eth0 --json perf/results/fsdp.json
    python perf/fsdp.py --render                                      # the tables of docs/fsdp.md from those rows
    torchrun --nproc-per-node 4 perf/fsdp.py --nodes 2 --curve 300    # losses on this machine

The model is a small transformer that predicts the next character of this repository's pages. A step is forward,
backward, reductions and AdamW; its time is that of the slowest rank, the median of --repeat steps, for which the lines
take turns. "one node" is FSDP of torch inside each node without any communication between nodes: the lower bound for
HSDP. "MB" is what one node receives from the others in a step, as the kernel counts it at --interface, with headers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gloo
import torch
import torch.distributed as dist
from report import Row, markdown
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import sparsecoll.torch.fsdp
from sparsecoll.cli import bench
from sparsecoll.torch.compressors import OkTopk, TopK
from sparsecoll.transport import launcher

ROOT = Path(__file__).parent.parent
PAGES, ROWS = ROOT / "docs", (ROOT / "perf/results/hsdp.json", ROOT / "perf/results/fsdp.json")
BEGIN, END = "<!-- rows: begin (perf/fsdp.py) -->", "<!-- rows: end -->"
CONTEXT = 64
HYBRID: dict[str, Any] = {"none": "none", "topk 1 %": TopK(0.01), "oktopk 1 %": OkTopk(0.01), "powersgd": "powersgd"}
SCATTERED: dict[str, Any] = {"none": "none", "topk 1 %": TopK(0.01)}


class Transformer(nn.Module):
    """A decoder for characters.

    Args:
        width: of its layers.
        depth: number of layers.
    """

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(128, width), nn.Parameter(torch.zeros(CONTEXT, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(depth)
        )
        self.out = nn.Linear(width, 128)
        self.mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Return the logits of each next character."""
        x = self.embed(characters) + self.place
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return self.out(x).clone()  # type: ignore[no-any-return]


class Step:
    """A model, its optimizer, and their step."""

    def __init__(self, model: nn.Module, options: argparse.Namespace) -> None:
        self.model, self.batch = model, options.batch
        self.optimizer = torch.optim.AdamW(model.parameters(), options.lr)
        text = "".join(path.read_text() for path in sorted(PAGES.glob("*.md"))).encode("ascii", "replace")
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.generator = torch.Generator().manual_seed(dist.get_rank())

    def __call__(self) -> torch.Tensor:
        starts = torch.randint(len(self.text) - CONTEXT - 1, (self.batch,), generator=self.generator).tolist()
        x = torch.stack([self.text[start : start + CONTEXT + 1] for start in starts])
        loss = nn.functional.cross_entropy(self.model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def lines(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Yield the name of each line and a function that makes its model."""
    shape = (options.nodes, dist.get_world_size() // options.nodes)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    flat = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))

    def made() -> Transformer:
        torch.manual_seed(0)
        return Transformer(options.width, options.depth)

    def sharded(where: DeviceMesh) -> nn.Module:
        model = made()
        for block in model.blocks:
            fully_shard(block, mesh=where)
        return fully_shard(model, mesh=where)

    def attached(where: DeviceMesh, replicas: DeviceMesh | None, compressor: Any) -> nn.Module:
        model = sharded(where)
        sparsecoll.torch.fsdp.attach(model, replicas, compressor)
        return model

    yield "one node", lambda: sharded(mesh["shard"])
    yield "HSDP, torch", lambda: sharded(mesh)
    for name, compressor in HYBRID.items():
        yield f"HSDP, {name}", lambda c=compressor: attached(mesh["shard"], mesh["replicate"], c)
    yield "FSDP, torch", lambda: sharded(flat["shard"])
    for name, compressor in SCATTERED.items():
        yield f"FSDP, {name}", lambda c=compressor: attached(flat["shard"], None, c)
    yield "DDP, torch", lambda: nn.parallel.DistributedDataParallel(made())


def received(interface: str | None) -> int:
    """Return the bytes that this host has received at an interface."""
    return int(Path(f"/sys/class/net/{interface}/statistics/rx_bytes").read_text()) if interface else 0


def measure(steps: list[Step], options: argparse.Namespace) -> list[Row]:
    """Return the median seconds of a step of each line on the slowest rank, and the bytes that a node receives.

    The lines take turns in random order, so that what else the machine does is spread over all of them.
    """
    times, counts = torch.empty(options.repeat, len(steps)), torch.empty(options.repeat, len(steps))
    for turn in range(-options.warm, options.repeat):
        for number in torch.randperm(len(steps), generator=torch.Generator().manual_seed(turn + 100)).tolist():
            dist.barrier()
            before, start = received(options.interface), time.perf_counter()
            steps[number]()
            seconds = time.perf_counter() - start
            dist.barrier()
            if turn >= 0:
                times[turn, number], counts[turn, number] = seconds, (received(options.interface) - before) / 1e6
    dist.all_reduce(times, dist.ReduceOp.MAX)
    dist.all_reduce(counts, dist.ReduceOp.MAX)
    columns = {"seconds": times.median(0)[0], "least": times.amin(0), "most": times.amax(0), "MB": counts.median(0)[0]}
    return [{name: float(values[number]) for name, values in columns.items()} for number in range(len(steps))]


def curve(step: Step, steps: int) -> list[float]:
    """Return the mean loss of all ranks over each tenth of the steps."""
    losses = torch.stack([step() for _ in range(steps)])
    dist.all_reduce(losses)
    return [float(part.mean()) / dist.get_world_size() for part in losses.chunk(10)]


def page(text: str) -> str:
    """Return the page with a table for each file of rows."""
    before, rest = text.split(BEGIN)
    tables = []
    for path in ROWS:
        saved = json.loads(path.read_text())
        rows, found = {row["line"]: row for row in saved["rows"]}, []
        for name, row in rows.items():
            native = rows.get(f"{name.partition(',')[0]}, torch") if name != "DDP, torch" else None
            line = {"": name, "s / step": row["seconds"], "x one node": row["x one node"]}
            line["torch / this"] = native["seconds"] / row["seconds"] if native else None
            found.append(line | {"MB into a node": row["MB"]})
        tables.append(f"{markdown(found)}\n\nMachine: {saved['about']['machine']}; commit {saved['about']['commit']}.")
    return "\n\n".join([f"{before}{BEGIN}", *tables, f"{END}{rest.split(END)[1]}"])


def start(interface: str | None) -> None:
    """Make the process group: torchrun's, or under mpirun one that meets at a file, since hosts may have no names."""
    if launcher.processes()[0] == "WORLD_SIZE":
        if interface:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
        dist.init_process_group("gloo")
        return
    from mpi4py import MPI

    gloo.start(MPI.COMM_WORLD, interface)


def say(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def save(names: list[str], steps: list[Step], options: argparse.Namespace) -> None:
    """Measure and print; rank 0 saves the rows."""
    found = measure(steps, options)
    alone = dict(zip(names, found, strict=True)).get("one node", {"seconds": float("nan")})["seconds"]
    about = {"P": dist.get_world_size(), "nodes": options.nodes}
    for number, (name, step) in enumerate(zip(names, steps, strict=True)):
        parameters = sum(p.numel() for p in step.model.parameters())
        row = found[number] | {"x one node": found[number]["seconds"] / alone}
        say(f"{name:<20}{row['seconds']:>8.3f} s {row['x one node']:>6.2f} x one node {row['MB']:>8.2f} MB")
        found[number] = {"line": name, "parameters": parameters, **about, **row}
    if options.json and dist.get_rank() == 0:
        options.json.write_text(json.dumps({"about": bench.about(), "rows": found}, indent=1) + "\n")


def main() -> None:
    """Measure the chosen lines, or print losses, or write the tables of the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4, help="hosts, among which ranks are divided in order")
    parser.add_argument("--lines", nargs="+", help="only lines whose name contains one of these")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--batch", type=int, default=1, help="samples per rank and step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--curve", type=int, metavar="STEPS", help="print losses instead of times")
    parser.add_argument("--interface", help="network interface between the hosts")
    parser.add_argument("--json", type=Path, help="save the rows")
    parser.add_argument("--render", action="store_true", help="only write the tables")
    options = parser.parse_args()
    if options.render:
        where = PAGES / "fsdp.md"
        where.write_text(page(where.read_text()))
        return
    torch.set_num_threads(1)
    start(options.interface)
    chosen = {
        name: make for name, make in lines(options) if not options.lines or any(text in name for text in options.lines)
    }
    if options.curve:
        for name, make in chosen.items():
            say(f"{name:<20}" + " ".join(f"{loss:.3f}" for loss in curve(Step(make(), options), options.curve)))
    else:
        save(list(chosen), [Step(make(), options) for make in chosen.values()], options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
