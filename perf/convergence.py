"""Compares the quality of sparse and dense training: nets on real data, P virtual ranks, several seeds.

    python perf/convergence.py --jobs 2 --json perf/results/convergence.json --update      # missing rows; some hours
    python perf/convergence.py --validate --tasks vgg        # on a part of the training data, for choosing options
    python perf/testbed.py run -- python perf/convergence.py --interface eth0 --update \\
        --json perf/results/time_to_quality.json             # seconds until it is as good, over 1 Gb/s

Every rank trains on its own share of the data, and the global batch is the same for every P. The lines of a table
differ only in the compressor, and those at 1 % in momentum correction. A run on virtual ranks is deterministic.
"""

import multiprocessing
import re
import time
from functools import partial

import harness
import numpy as np
import torch
from harness import FIGURES, cell, load, markdown
from nets import TASKS, data, quality
from published import DeMo, SparseLoCo
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from sparsecoll import simulate
from sparsecoll.bench.timing import about
from sparsecoll.cli import style
from sparsecoll.torch import DiLoCo, DistributedOptimizer, LocalOptimizer, OneBitAdam, SparseSGD
from sparsecoll.torch.compressors import ACPSGD, COMPRESSORS, COVAP, QSGD, PowerSGD, TopKCompressor
from sparsecoll.torch.compressors.schedule import WarmUp
from sparsecoll.torch.optimizers.together import Together
from sparsecoll.transport import default_comm

MOMENTUM, DENSITY = 0.9, 0.01
KEY = ("task", "line", "P", "seed")  # of a row
BEST, TWICE = "allgather 1 %, 4 bits, Nesterov", "allgather 2 %, 4 bits, Nesterov"
# Momentum of lines that have another one, and as much more learning rate: what waits acts like momentum
SHORTER, ALONE = {BEST: 0.7, TWICE: 0.7, "oktopk 1 %, momentum 0.5": 0.5}, ", no momentum"
SHORTER |= {f"{name}{ALONE}": 0.0 for name in ("dense", "SparseSGD, oktopk 1 %", "SparseSGD, oktopk 2 %")}


def corrected(name, momentum=MOMENTUM, warm_up=0.0, density=DENSITY, nesterov=False, **options):
    """Return a line with momentum in the compressor, for tasks of SGD, and local clipping; `warm_up` of all steps."""
    sgd = {"momentum": momentum, "nesterov": nesterov}

    def made(task, steps):
        own = {} if task.adam else {"clip": task.clip, **sgd}
        schedule = WarmUp(density, max(1, round(warm_up * steps))) if warm_up else density
        return COMPRESSORS[name](schedule, **own, **options)

    return made


NESTEROV = {"momentum": 0.7, "warm_up": 0.02, "nesterov": True}
CORRECTED = {  # (task, number of steps) -> compressor
    BEST: corrected("nesterovtopk", **NESTEROV),
    TWICE: corrected("nesterovtopk", **NESTEROV, density=2 * DENSITY),
    "oktopk 1 %, momentum 0.5": corrected("oktopk", momentum=0.5),
    "oktopk 1 %": corrected("oktopk"),
    "allgather 1 %": corrected("topk", algo="allgather"),
    "densestream 1 %": corrected("densestream"),
    "dgc 1 %": lambda task, _: COMPRESSORS["dgc"](DENSITY, momentum=0.0 if task.adam else MOMENTUM, clip=task.clip),
}
PAPERS = {  # more of the papers' baselines
    "dragonn 1 %": corrected("dragonn", selective=False),
    "gaussiank 1 %": corrected("gaussiank"),
    "gtopk 1 %": corrected("topk", algo="gtopk"),
    "sparcml 1 %": corrected("topk", algo="sparcml"),
    "densestream 5 %": corrected("densestream", density=0.05),
}
DROP_IN, ONE_BIT, LOCAL = "SparseSGD", "OneBitAdam", "10 local steps, 10 %, 4 bits"
DILOCO = {f"DiLoCo, {preset}": {"preset": preset} for preset in ("diloco", "sparseloco")} | {
    "DiLoCo, sparseloco, outer rate 1": {"preset": "sparseloco", "outer_lr": 1.0},
    "DiLoCo, muloco, Muon 0.9": {"preset": "muloco"},
    "SparseLoCo as published": {"preset": "sparseloco", "compressor": SparseLoCo()},
}
DEMO = "DeMo as published"
RATE = re.compile(r"(.*?)(?:, (twice|\d+(?:\.\d)? times) the rate)?")  # of any line
MEANS = re.compile(r"Muon(?: 0\.\d+)?, every (\d+), (\d) bits(, outer momentum)?")
SAVED = "Muon 0.9, every 4, 2 bits, outer momentum, 8 times the rate"
TUNED = [
    *(f"{ONE_BIT}, {rate} the rate" for rate in ("twice", "2.5 times", "3 times")),
    "qsgd 4 bits, twice the rate",
    "dense, twice the rate",
    "dense, 2.5 times the rate",
    "dense, 3 times the rate",
    "dense, 4 times the rate",
]
MUON = ("dense, Muon", "dense, Muon 0.9")
TUNED += [f"{line}, 8 times the rate" for line in (*MUON, "Muon, every 8, 4 bits", "Muon, every 5, 2 bits")] + [SAVED]
SPARSE = {f"SparseSGD, oktopk {d} %{ALONE}": {"algo": "oktopk", "density": d / 100} for d in (1, 2)} | {DROP_IN: {}}
OTHERS = {
    "dense": lambda *_: "none",
    DROP_IN: lambda *_: None,
    "oktopk 1 %, momentum outside": lambda *_: "oktopk",
    "powersgd rank 4": lambda *_: PowerSGD(4),
    "acpsgd rank 4": lambda *_: ACPSGD(4),
    "covap I = 4": lambda *_: COVAP(4),
    **{f"qsgd {bits} bits": lambda *_, bits=bits: QSGD(bits) for bits in (8, 4, 2)},
    LOCAL: lambda *_: TopKCompressor(0.1, algo="allgather", format="packed_codes"),
    DEMO: lambda *_: DeMo(),
    **dict.fromkeys(MUON, lambda *_: "none"),
    **dict.fromkeys((ONE_BIT, *DILOCO, *TUNED), lambda *_: None),
}
CORRECTED |= PAPERS
PAPERS |= {line: lambda *_: "none" for line in (f"dense{ALONE}", *SPARSE) if line != DROP_IN} | {
    "acpsgd rank 4, no feedback": lambda *_: ACPSGD(4, feedback=False),
    "acpsgd rank 4, no reuse": lambda *_: ACPSGD(4, reuse=False),
    "randomk 1 %": lambda *_: "randomk",
    "efsignsgd": lambda *_: "efsignsgd",
}
LINES = {"dense": OTHERS["dense"], DROP_IN: OTHERS[DROP_IN], **CORRECTED, **OTHERS, **PAPERS}
DDP = {  # in seconds: functions that register a hook
    "DDP, gloo": lambda model, _: None,
    "DDP, fp16 hook": lambda model, _: model.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "DDP, PowerSGD hook, rank 4": lambda model, steps: harness.power_hook(model, steps // 10),
}
TIMED = {"wide": (*DDP, BEST, DROP_IN), **dict.fromkeys(("vgg", "resnet"), (*DDP, DROP_IN))}
TIMED["text"] = ("DDP, gloo, twice the rate", f"{ONE_BIT}, 2.5 times the rate", SAVED)
TIMED["text"] += (*(f"{line}, twice the rate" for line in [*DDP][1:]), "DDP, gloo, Muon 0.9, 8 times the rate")
GOALS = {"%": -0.2, "bits per byte": 0.02}  # how far below the final quality of dense training is as good


def made_for(task, line):
    """Whether a line differs from others with the optimizer of a task."""
    if task.adam:
        return line not in (*SHORTER, DROP_IN) and "Nesterov" not in line
    return line not in (LOCAL, ONE_BIT, DEMO, *DILOCO, *TUNED) and "Muon" not in line


def of_diloco(line):
    """Return the arguments of DiLoCo for a line, None if it has another optimizer."""
    if found := MEANS.fullmatch(line):
        every, bits = int(found[1]), int(found[2])
        outer = {"outer_lr": 0.9, "outer_momentum": 0.3, "dense_below": 0} if found[3] else {"outer_lr": 1.0}
        compressor = QSGD(bits, 2048 if found[3] else 512, feedback=True)
        return {"every": every, "compressor": compressor, "outer_momentum": 0.0, **outer}
    return DILOCO.get(line)


def optimizers(task, line, model, comm, steps):
    """Return the optimizer of a line, without and with its wrapper."""
    line, rate = RATE.fullmatch(line).groups()
    rate = task.lr * (1 if rate is None else 2 if rate == "twice" else float(rate.split()[0]))
    momentum = SHORTER.get(line, MOMENTUM)
    lr = task.lr * (1 - momentum) / (1 - MOMENTUM)
    if line in SPARSE:
        optimizer = SparseSGD(model.parameters(), lr, momentum, comm=comm, **SPARSE[line])
        return optimizer, optimizer
    adam = {"betas": (0.9, 0.95), "weight_decay": 0.1}
    if line == ONE_BIT:
        optimizer = OneBitAdam(model.parameters(), rate, **adam, warm_up=round(0.15 * steps), comm=comm)
        return optimizer, optimizer
    if "Muon" in line:
        found = re.search(r"Muon (0\.\d+)", line)
        inner = muon_and_adamw(model, rate, float(found[1]) if found else 0.95, **adam)
    elif line == DEMO:
        inner = torch.optim.SGD(model.parameters(), rate, weight_decay=0.1)
    elif task.adam:
        inner = torch.optim.AdamW(model.parameters(), rate, **adam)
    else:
        inner = torch.optim.SGD(model.parameters(), lr, momentum=0.0 if line in CORRECTED else momentum)
    if line.startswith("DDP"):
        return inner, inner
    if diloco := of_diloco(line):
        return inner, DiLoCo(inner, model, comm, **diloco)
    compressor = LINES[line](task, steps)
    common = {"bucket_bytes": 1 << 18 if line.startswith("covap") else 25 << 20}  # it filters buckets
    common["dense_below"] = 0 if ", 4 bits" in line or line == DEMO else 1024
    if line == LOCAL:
        return inner, LocalOptimizer(inner, model, comm, compressor, **common, every=10, outer_lr=2.0)
    overlap = task.clip is None
    return inner, DistributedOptimizer(inner, model.named_parameters(), comm, compressor, overlap=overlap, **common)


def orthogonalized(gradient, coefficients, steps, eps):
    """Muon's iteration as in torch, but in float32: without instructions for bfloat16, that takes 17 times as long."""
    (a, b, c), wide = coefficients, gradient.size(0) <= gradient.size(1)
    x = gradient if wide else gradient.T
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.T


def muon_and_adamw(model, lr, momentum, **adam):
    """Return Muon for the matrices of a transformer's layers, with AdamW's rate, and AdamW for the rest."""
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    torch.optim._muon._zeropower_via_newtonschulz = orthogonalized
    muon = torch.optim.Muon(matrices, lr, adam["weight_decay"], momentum, adjust_lr_fn="match_rms_adamw")
    return Together([muon, torch.optim.AdamW(others, lr, **adam)])


def train(comm, name, line, seed, validate=False, points=8, timed=False):
    """Train on one rank; `curve` has (step, MB received, or seconds if `timed`, quality) of rank 0's model."""
    task = TASKS[name]
    hook = next((hook for start, hook in DDP.items() if line.startswith(start)), None)
    (x, y), test = data(name, validate)
    torch.manual_seed(seed)
    model = called = task.net(x)
    own = torch.arange(comm.rank, len(y) - len(y) % comm.size, comm.size)
    batch = task.batch // comm.size
    steps = int(task.epochs * (len(own) // batch))
    if hook is not None:
        called = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1000 if "PowerSGD" in line else 25)
        hook(called, steps)
    inner, optimizer = optimizers(task, line, model, comm, steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda s: min((s + 1) / (0.1 * steps), (steps - s) / steps))
    clip = None if line in CORRECTED else task.clip  # of each rank's own gradients
    shuffle = torch.Generator().manual_seed(1000 * seed + comm.rank)
    order = iter(())
    curve, seconds, before = [], 0.0, 0 if hook is not None else optimizer.traffic.total.bytes_received
    for step in range(1, steps + 1):
        chosen = next(order, None)
        if chosen is None or len(chosen) < batch:
            order = iter(own[torch.randperm(len(own), generator=shuffle)].split(batch))
            chosen = next(order)
        if timed:
            comm.Barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(called(x[chosen]), y[chosen].long()).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if timed:
            comm.Barrier()
        seconds += time.perf_counter() - start
        schedule.step()
        if step * points // steps > (step - 1) * points // steps:
            if step == steps and isinstance(optimizer, LocalOptimizer | OneBitAdam):
                optimizer.synchronize()  # before, rank 0's own parameters are enough
            if comm.rank == 0:
                spent = seconds if timed else (optimizer.traffic.total.bytes_received - before) / 1e6
                part = test if step == steps or (timed and not task.adam) else (test[0][::5], test[1][::5])
                curve.append([step, spent, quality(model, part, task.unit)])
    if hook is None and line not in SPARSE:
        optimizer.close()
    return {"steps": steps, "parameters": sum(p.numel() for p in model.parameters()), "curve": curve}


def run(key, validate=False):
    """Train on virtual ranks and return the row."""
    torch.set_num_threads(1)
    name, line, P, seed = key
    row = simulate(P, lambda comm: train(comm, name, line, seed, validate)).results[0]
    return dict(zip(KEY, key, strict=True)) | {name: about()[name] for name in ("machine", "commit")} | row


def known(options):
    """Return the keys of the rows in the file."""
    return {tuple(row[name] for name in KEY) for row in harness.kept_rows(options)}


def timed_rows(options, comm):
    """Yield the rows in seconds that are not in the file, of `comm`'s ranks."""
    nets = [(name, line) for name in options.tasks if name in TIMED for line in TIMED[name]]
    keys, have = [(*net, comm.size, seed) for net in nets for seed in options.seeds], known(options)
    for key in [key for key in keys if key not in have]:
        row = train(comm, *key[:2], key[3], points=35, timed=True)
        yield dict(zip(KEY, key, strict=True)) | {name: about()[name] for name in ("machine", "commit")} | row


def rows(options):
    """Yield the rows that are not in the file."""
    have = known(options)
    tasks = [name for name in options.tasks if name != "wide"]
    nets = [(name, line) for name in tasks for line in options.lines if made_for(TASKS[name], line)]
    keys = [(*net, P, seed) for P in options.ranks for seed in options.seeds for net in nets]
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        yield from pool.imap(partial(run, validate=options.validate), [key for key in keys if key not in have])


def results(rows, name, line, P):
    """Return quality, difference to dense runs of the same seeds, MB, and times fewer; None without rows."""
    base = "dense" + ALONE * line.endswith(ALONE)
    dense, own = (
        {row["seed"]: row["curve"][-1] for row in rows if (row["task"], row["line"], row["P"]) == (name, one, P)}
        for one in (base, line)
    )
    pairs = np.array([(own[seed], dense[seed]) for seed in own if seed in dense])
    if not len(pairs):
        return None
    last, gaps = np.array(list(own.values())), pairs[:, 0, 2] - pairs[:, 1, 2]
    gap = "" if line == base else plus_minus(gaps, "+", len(gaps) ** 0.5)
    return plus_minus(last[:, 2]), gap, last[:, 1].mean(), (pairs[:, 1, 1] / pairs[:, 0, 1]).mean()


def plus_minus(values, sign="", divisor=1.0):
    """Return the mean and, of several values, the standard deviation, divided; two digits after the point."""
    return f"{np.mean(values):{sign}.2f}" + (f"±{np.std(values, ddof=1) / divisor:.2f}" if len(values) > 1 else "")


UNSHOWN = ["allgather 1 %", "dgc 1 %", *MUON]  # in text: as oktopk, to within 0.06; at a low rate; with 0.95
UNSHOWN += [f"{line}, 8 times the rate" for line in ("Muon, every 8, 4 bits", "Muon, every 5, 2 bits")]
# rates that held-out data did not choose; what fails as others do
UNSHOWN += [f"{ONE_BIT}, 3 times the rate", "dense, 3 times the rate", "dense, 4 times the rate"]
UNSHOWN += ["acpsgd rank 4", "covap I = 4", "qsgd 8 bits"]  # in text: 3.36, 3.38 and 2.29 bits per byte
ASIDE = [TWICE, "densestream 1 %", *PAPERS]


def table(rows, name, P=4):
    """Return the table of a net over the seeds: final quality, difference to dense, bytes."""
    shown = []
    for line in (line for line in LINES if line not in UNSHOWN):
        if found := results(rows, name, line, P):
            quality, gap, received, fewer = found
            row = {"": line, f"quality, {TASKS[name].unit}": quality.split("±")[0], "against dense": gap}
            shown.append(row | {"MB received": received, "times fewer": fewer})
    return markdown(shown)


def side_by_side(rows, nets, lines, P=4):
    """Return a table of several nets: the quality of dense, the differences to it, and how many times fewer bytes."""
    shown = []
    for line in lines:
        found = {name: one for name in nets if (one := results(rows, name, line, P))}
        if found:
            shown.append(
                {"": line} | {n: f"{one[1]}, {cell(one[3])}x" if one[1] else one[0] for n, one in found.items()}
            )
    return markdown(shown)


def defaults(rows, nets):
    """Return the table of the default with SGD: by net, for 4 and 8 ranks."""
    shown = []
    for name in nets:
        row = {"": name, "dense": results(rows, name, "dense", 4)[0]}
        for P in (4, 8):
            _, gap, _, fewer = results(rows, name, DROP_IN, P)
            row |= {f"P = {P}": gap, f"times fewer, P = {P}": fewer}
        shown.append(row)
    return markdown(shown)


def curves(rows, task, line):
    """Return the curves of a line, (seeds, points, 3)."""
    return np.array([row["curve"] for row in rows if (row["task"], row["line"]) == (task, line)])


def goal_of(rows, task):
    """Return the quality that is as good as dense training's at the end, on average over the seeds."""
    return curves(rows, task, TIMED[task][0])[:, -1, 2].mean() + GOALS[TASKS[task].unit]


def seconds_table():
    """Return the table of seconds until a line, on average over the seeds, is as good as dense training at the end."""
    shown, rows = [], load("time_to_quality")["rows"]
    for task, line in ((task, line) for task, lines in TIMED.items() for line in lines):
        if len(found := curves(rows, task, line)):
            goal, unit = goal_of(rows, task), TASKS[task].unit
            mean, sign = found.mean(0), 1 if unit == "%" else -1
            reached = next((seconds for _, seconds, quality in mean if sign * (quality - goal) >= 0), "not reached")
            head = {"net": task, "line": line, "s until as good": reached}
            shown.append(head | {"s in total": mean[-1, 1], "at the end": plus_minus(found[:, -1, 2])})
    return markdown(shown)


def tables():
    """Return the tables of docs/convergence*.md by name: the default, nets side by side, single nets, and seconds."""
    rows, nets = load("convergence")["rows"], ("vgg", "resnet", "lstm", "mlp")
    made = {"defaults": defaults(rows, nets), "seconds": seconds_table()}
    made["nets"] = side_by_side(rows, nets, [line for line in LINES if line not in ASIDE])
    made["papers"] = side_by_side(rows, ("resnet", "lstm"), PAPERS)
    made |= {name: table(rows, name) for name in ("text", "long")}
    return {f"convergence.{name}": text for name, text in made.items()}


def draw():
    """Draw accuracy against seconds, means over the seeds."""
    figure, axes = style.axes_of(4)
    rows, own = load("time_to_quality")["rows"], {line: "" if line in DDP else "sparsecoll, " for line in TIMED["wide"]}
    found = {own[line] + line: curves(rows, "wide", line) for line in own}
    lines = {line: several.mean(0)[:, 1:].tolist() for line, several in found.items() if len(several)}
    style.draw(axes, lines)
    goal = goal_of(rows, "wide")
    axes.text(46, goal + 0.05, f"dense, less {-GOALS['%']}", color="grey", fontsize=9)
    axes.axhline(goal, color="grey", linewidth=0.8, linestyle="--")
    axes.set(xlabel="seconds of training, 4 hosts with 1 Gb/s", ylabel="test accuracy, %", ylim=(goal - 6, goal + 1.5))
    style.save(figure, FIGURES / "time_to_quality.svg")


def main():
    """Run the missing rows."""
    virtual = {"ranks": [4, 8], "seeds": [0, 1, 2], "jobs": 1}  # jobs: runs at a time
    options = harness.options(__doc__, tasks=list(TASKS), lines=list(LINES), **virtual, validate=False, interface="")
    if options.interface:
        comm = default_comm()  # over MPI
        harness.start_gloo(comm, options.interface)
        harness.record(timed_rows(options, comm), options, comm.rank, key=KEY, hide=("curve",))
    else:
        harness.record(rows(options), options, key=KEY, hide=("curve",))


if __name__ == "__main__":
    main()
