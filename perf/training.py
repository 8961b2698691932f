"""Seconds per training step with every compressor, SparseSGD, DistributedDataParallel over gloo, and sharded models.

    python perf/testbed.py run -- python perf/training.py --interface eth0 --json perf/results/training.json

docs/training.md and docs/fsdp.md have the other commands. A step is forward, backward, reduction, and the optimizer's,
on random inputs; its time is that of the slowest rank. "plain" is torch.optim.SGD on each rank alone, or torch's FSDP
inside each node. A step of it comes before each step of every other line, and "x plain" is the median of their ratios.
"""

import time
from functools import partial
from itertools import pairwise

import harness
import numpy as np
import torch
from harness import load, markdown, source
from nets import Transformer
from published import MajorityVote
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sparsecoll.torch.fsdp
from sparsecoll.torch import DistributedOptimizer, SparseSGD
from sparsecoll.torch.compressors import COVAP, QSGD, TopKCompressor, dgc, nesterovtopk, oktopk
from sparsecoll.transport import as_transport, default_comm
from sparsecoll.transport.all_ranks import allgather

LR, MOMENTUM = 0.01, 0.9
COMPRESSORS = {
    "free": "free",  # no communication
    "none": "none",
    "fp16": "fp16",
    "topk 1 %": TopKCompressor(0.01),
    "allgather 1 %": TopKCompressor(0.01, algo="allgather"),
    "oktopk 1 %": oktopk(0.01),
    "dgc 1 %": dgc(0.01),
    "dgc 0.1 %": dgc(0.001),
    "nesterovtopk 1 %": nesterovtopk(0.01),
    **{f"{name} 1 %": name for name in ("sgdtopk", "densestream", "gaussiank", "randomk", "dragonn")},
    **{name: name for name in ("chunktopk", "efsignsgd")},
    "majority vote": MajorityVote(),
    "qsgd 8 bits": QSGD(8),
    "qsgd 2 bits": QSGD(2),
    "powersgd rank 4": "powersgd",
    "acpsgd rank 4": "acpsgd",
}
NO_OVERLAP = ("none", "fp16", "topk 1 %", "powersgd rank 4", "acpsgd rank 4")
COMPRESSED = {name: (compressor, {}) for name, compressor in COMPRESSORS.items()}  # and options
COMPRESSED |= {f"{name}, no overlap": (COMPRESSORS[name], {"overlap": False}) for name in NO_OVERLAP}
COMPRESSED |= {f"{name}, no fusion": (COMPRESSORS[name], {"bucket_bytes": 1}) for name in NO_OVERLAP[3:]}
COMPRESSED["topk 1 %, whole model"] = (TopKCompressor(0.01), {"bucket_bytes": None})
COMPRESSED |= {f"covap, I = {interval}": (COVAP(interval), {}) for interval in (1, 2, 4, 8, 16, 32)}


def vgg():
    """Return a net of 20.3 M parameters for 28 x 28 images."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(64 * 49, 4096), nn.ReLU(), nn.Linear(4096, 1800), nn.ReLU(), nn.Linear(1800, 10)),
    )


def mlp(*sizes):
    """Return linear layers of these sizes."""
    return nn.Sequential(*[layer for size in pairwise(sizes) for layer in (nn.Linear(*size), nn.ReLU())][:-1])


def device():
    """Return the layers of "layers" with a back-propagation that waits as for a device; for a batch of 1."""
    model = MODELS["layers"]()
    for layer in model[2:-1:2]:
        layer.register_full_backward_hook(lambda *_: time.sleep(0.035))
    return model


MODELS = {
    "vgg": vgg,  # 20 M parameters
    "mlp": lambda: mlp(784, 8192, 8192, 4096, 10),  # 107 M
    "layers": lambda: mlp(784, *[1024] * 17, 10),  # 16 layers of 2^20 values
    "device": device,
    "transformer": lambda: Transformer(64, 384, 6),  # 10.8 M
}


def our_hook(model, comm, compressor):
    """Register the library's hook."""
    state = sparsecoll.torch.HookState(comm, compressor, model.module.named_parameters())
    model.register_comm_hook(state, sparsecoll.torch.comm_hook)


DDP = {  # name: function that registers a hook
    "DDP, gloo": lambda model, _: None,
    "DDP, gloo, fp16 hook": lambda model, _: model.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "DDP, gloo, PowerSGD hook, one bucket": lambda model, _: harness.power_hook(model, start=2),
    "DDP, our hook, topk 1 %": partial(our_hook, compressor="topk"),
    "DDP, our hook, acpsgd rank 4": partial(our_hook, compressor="acpsgd"),
}
HYBRID = {"none": "none", "topk 1 %": TopKCompressor(0.01), "oktopk 1 %": oktopk(0.01), "powersgd": "powersgd"}
SCATTERED = {"none": "none", "topk 1 %": TopKCompressor(0.01)}


class Step:
    """One line of the table: a model, its optimizer, and their step."""

    def __init__(self, model, optimizer, x, y):
        self.model, self.optimizer, self.x, self.y = model, optimizer, x, y

    def __call__(self):
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(self.x), self.y).backward()
        self.optimizer.step()
        if self.x.is_cuda:
            torch.cuda.synchronize()


def lines(name, options, comm):
    """Yield the name of each line of a model and a function that creates its Step; models are freed line by line."""

    def made(optimizer_of, wrap=None):
        torch.manual_seed(0)
        model = MODELS[name]().to(options.device)
        optimizer, generator = optimizer_of(model), torch.Generator().manual_seed(comm.rank)
        x = torch.randn(options.batch, 784, generator=generator).to(options.device)
        y = torch.randint(0, 10, (options.batch,), generator=generator).to(options.device)
        return Step(wrap(model) if wrap else model, optimizer, x, y)

    def sgd(model, momentum=MOMENTUM):
        return torch.optim.SGD(model.parameters(), LR, momentum=momentum)

    def compressed(model, compressor, settings):
        inner = sgd(model, 0.0 if getattr(compressor, "momentum", 0.0) else MOMENTUM)
        settings = {"bucket_bytes": options.bucket_bytes, **settings}
        return DistributedOptimizer(inner, model.named_parameters(), comm, compressor, **settings)

    def sparse(model, algo):
        settings = {"comm": comm, "algo": algo, "density": 0.01}
        return SparseSGD(model.parameters(), LR, MOMENTUM, **settings)

    def ddp(model, line):
        wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=10_000 if "one bucket" in line else 25)
        DDP[line](wrapped, comm)
        return wrapped

    yield "plain", lambda: made(sgd)
    for line, (compressor, settings) in COMPRESSED.items():
        yield line, lambda c=compressor, s=settings: made(lambda model: compressed(model, c, s))
    yield "SparseSGD, dense", lambda: made(lambda model: sparse(model, "dense"))
    yield "SparseSGD, oktopk 1 %", lambda: made(lambda model: sparse(model, "oktopk"))
    for line in DDP if not options.no_gloo else ():
        yield line, lambda line=line: made(sgd, lambda model: ddp(model, line))


def sharded_lines(options, comm):
    """Yield the lines of `transformer`: with AdamW, sharded over the ranks of a node or over all."""
    nodes = options.nodes
    mesh = init_device_mesh("cpu", (nodes, comm.size // nodes), mesh_dim_names=("replicate", "shard"))
    flat = init_device_mesh("cpu", (comm.size,), mesh_dim_names=("shard",))

    def made(where, replicas=None, compressor=None):
        torch.manual_seed(0)
        model = MODELS["transformer"]()
        for block in model.blocks if where else ():
            fully_shard(block, mesh=where)
        model = fully_shard(model, mesh=where) if where else nn.parallel.DistributedDataParallel(model)
        if compressor is not None:
            sparsecoll.torch.fsdp.attach(model, replicas, compressor)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        return Step(model, optimizer, *torch.randint(0, 256, (2, options.batch, 64)))

    yield "plain", lambda: made(mesh["shard"])
    yield "HSDP, torch", lambda: made(mesh)
    for name, compressor in HYBRID.items():
        yield f"HSDP, {name}", lambda c=compressor: made(mesh["shard"], mesh["replicate"], c)
    yield "FSDP, torch", lambda: made(flat["shard"])
    for name, compressor in SCATTERED.items():
        yield f"FSDP, {name}", lambda c=compressor: made(flat["shard"], None, c)
    yield "DDP, torch", lambda: made(None)


def timed(step, comm):
    """Return the seconds of one step, which all ranks begin together."""
    comm.Barrier()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def measure(step, plain, options, comm):
    """Return the median seconds of a step on the slowest rank, their parts, and the ratio to steps of `plain`."""
    transport, repeat = as_transport(comm), options.repeat
    for _ in range(options.warm):
        step()
    seconds = getattr(step.optimizer, "seconds", {})
    before, counted, host = dict(seconds), transport.traffic.copy(), harness.link_bytes(options.interface)[1]
    times = [timed(one, comm) for _ in range(repeat) for one in ([] if plain is None else [plain]) + [step]]
    parts = {kind: (value - before[kind]) / repeat for kind, value in seconds.items()}
    comm.Barrier()
    host = harness.link_bytes(options.interface)[1] - host
    moved = transport.traffic.since(counted).total.bytes_received
    table = allgather(transport, np.array([host, *times, *parts.values()]))
    *beside, slowest = table[:, 1 : 1 + len(times)].max(axis=0).reshape(repeat, -1).T
    row = {"seconds": float(np.median(slowest)), "least": float(slowest.min()), "most": float(slowest.max())}
    row |= {"MB received": moved / repeat / 1e6, "MB into a node": float(table[:, 0].max()) / repeat / 1e6}
    row |= dict(zip(parts, table[:, 1 + len(times) :].mean(axis=0).tolist(), strict=True))
    return row | {"x plain": float(np.median(slowest / beside[0])) if beside else 1.0}


def rows(options, comm):
    """Measure every line, yield its row, the same on every rank."""
    for model in options.models:
        plain = None
        for name, make in sharded_lines(options, comm) if model == "transformer" else lines(model, options, comm):
            if options.lines and name != "plain" and not name.startswith(tuple(options.lines)):
                continue
            step = make()
            row = {"model": model, "parameters": sum(p.numel() for p in step.model.parameters())}
            row |= {"batch": options.batch, "P": comm.size, "line": name}
            yield row | measure(step, plain, options, comm)
            if isinstance(step.optimizer, DistributedOptimizer):
                step.optimizer.close()
            plain = step if name == "plain" else plain
            del step


def table(rows):
    """Return the table of a net."""
    shown = []
    for name, row in rows.items():
        line = {"line": name, "s / step": row["seconds"], "x plain": row["x plain"]}
        counted = next(column for column in ("MB received", "MB into a node") if column in row)
        shown.append(line | {counted: row[counted] if row[counted] > 0.001 else None})
    return markdown(shown)


def overlap(rows):
    """Return the table of steps with and without overlap, where back-propagation computes and where it waits; "hidden"
    is the share of the smaller of computation and communication that a line saves over itself without overlap.
    """
    shown = {}
    for model, where in {"layers": "computes", "device": "waits"}.items():
        of = {row["line"]: row["x plain"] for row in rows if row["model"] == model}
        for name in ("none", "fp16", "topk 1 %"):
            both, apart, line = of[name], of[f"{name}, no overlap"], shown.setdefault(name, {"line": name})
            line |= {f"{where}: x plain": both, f"{where}: without overlap": apart}
            line[f"{where}: hidden"] = f"{(apart - both) / min(1.0, apart - 1.0):.0%}"
    return markdown(shown.values())


UNSHOWN = (", no ", "whole model", "SparseSGD, dense", "gaussiank", "dragonn", "stream", "0.1", "hook, a", "randomk")
UNSHOWN += ("allgather", "efsignsgd", "qsgd 2", "qsgd 4", "covap")
BESIDE = ("free", "none", "fp16", "sgdtopk", "chunktopk", "majority", "DDP, our")
NETS = {("vgg", 32): "20 M", ("mlp", 32): "107 M"}


def side_by_side(rows):
    """Return one table of several nets: seconds a step, in units of a plain step, and megabytes received."""
    lines = {}
    for row in (row for row in rows if row["batch"] == 32):
        line = lines.setdefault(row["line"], {"line": row["line"]})
        name = NETS[row["model"], row["batch"]]
        if row["model"] == "vgg":
            line[f"{name}: s / step"] = row["seconds"]
        line[f"{name}: x plain"] = row["x plain"]
        line[f"{name}: MB"] = row["MB received"] if row["MB received"] > 0.001 else None
    shown = list(lines.values())
    return markdown([{head: row.get(head) for head in max(shown, key=len)} for row in shown])


def tables():
    """Return the tables of docs/training.md and docs/fsdp.md by name."""
    made = {}
    ethernet, own = (  # the other lines are on file
        [row for row in load(name)["rows"] if not any(part in row["line"] for part in UNSHOWN)]
        for name in ("training", "training_2_hosts")
    )
    for name in ("hsdp", "fsdp"):
        made[name] = f"{table({row['line']: row for row in load(name)['rows']})}\n\n{source(name)}"
    made["ethernet"] = side_by_side(ethernet)
    made["overlap"] = overlap(load("overlap")["rows"])
    own = [row for row in own if not row["line"].startswith(BESIDE)]
    made["own_cores"] = f"{table({row['line']: row for row in own})}\n\n{source('training_2_hosts')}"
    return {f"training.{name}": text for name, text in made.items()}


def main():
    """Measure and print; rank 0 saves the rows."""
    size = {"batch": 32, "bucket_bytes": 25 << 20, "nodes": 4}  # samples per rank; hosts, for `transformer`
    run = {"device": "cpu", "repeat": 6, "warm": 3, "no_gloo": False, "interface": ""}
    options = harness.options(__doc__, models=["vgg", "mlp"], lines=[], **size, **run)
    comm = default_comm()
    torch.set_num_threads(1)
    if not options.no_gloo:
        harness.start_gloo(comm, options.interface)
    harness.record(rows(options, comm), options, comm.rank, key=("model", "batch", "P", "line"))


if __name__ == "__main__":
    main()
