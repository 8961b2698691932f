"""Runs a command for each table and figure of the five papers; docs/papers.md compares the results.

make papers                            # those without rows in perf/results; hours, and root for slow links
make papers PAPER=oktopk FIGURE=7      # one; tables have Roman numerals, as in docs/papers.md
"""

import re
import subprocess
import sys
from functools import partial
from statistics import NormalDist

import harness
import numpy as np
import torch
from nets import TASKS, data
from torch.nn import functional, utils

from sparsecoll import DenseVector, OkTopk, allreduce, formats, select, simulate

EXPERIMENTS = """
gradients | oktopk 4 5 6, densestream 1 I | perf/papers.py --tasks resnet lstm
volume | oktopk I 7, acpsgd II | perf/volume.py
scaling | oktopk 8 10 12 | perf/volume.py --scaling --ranks 4 16 64 256 1024
convergence | oktopk 9 11 13, densestream 5, dragonn II 4 7, acpsgd 6 7, covap 6 VII | \
perf/convergence.py --update --jobs 2 --ranks 4 --seeds 0 --tasks resnet lstm text
allreduce | densestream II 4 | perf/testbed.py run MPI/allreduce.py --gloo --interface eth0
kernels | dragonn 1 5 | perf/kernels.py
gpu | dragonn 1 5 | perf/gpu.py
training | acpsgd 2 3 8 9 III, covap I II III V 5 7 8 9 10, dragonn 3 6 8 10 | perf/testbed.py run STEP --models vgg
training_2_hosts | acpsgd 12, covap 11 | perf/testbed.py run --hosts 2 STEP SOME
training_8_hosts | acpsgd 12, covap 11 | perf/testbed.py run --hosts 8 STEP SOME
training_10gbit | acpsgd 13 | perf/testbed.py run --rate 10gbit STEP SOME
training_batches | acpsgd 11 | perf/testbed.py run STEP SOME --batch 128
training_fused | acpsgd 10 | perf/testbed.py run STEP SOME --bucket-bytes 1e9
"""  # rows in perf/results | tables and figures | command; SOME lines of a STEP
WORDS = {"MPI": f"-- {sys.executable} perf", "STEP": f"-- {sys.executable} perf/training.py --interface eth0"}
WORDS["SOME"] = "--models vgg --lines none topk dgc dragonn powersgd acpsgd covap majority efsign"


def measured(comm, acc, gradient, k, **thresholds):
    """Return what the papers plot of one step; acc: residual + gradient of a rank; `thresholds` from earlier steps."""
    own, n, exact = DenseVector(acc), acc.size, DenseVector(acc).topk(k)
    thresholds["Gaussian-k"] = float(acc.mean() + NormalDist().inv_cdf(1 - k / n / 2) * acc.std())
    row = {f"threshold, {name}": t / exact.kth_magnitude(k) for name, t in thresholds.items()}
    row |= {f"selected, {name}": own.threshold(t).nnz / k for name, t in thresholds.items()}
    total, mean = (allreduce(comm, x, "dense", op="mean").to_dense() for x in (acc, gradient))
    sparse = allreduce(comm, exact, "allgather", op="mean")
    apart = DenseVector(total).topk(k).to_dense() - sparse.topk(k).to_dense()
    row |= {"xi": float(np.linalg.norm(apart) / np.linalg.norm(mean)), "density of the sum": sparse.nnz / n}
    row["fullest thousandth"] = float(np.bincount(exact.indices.astype(np.int64) * 1000 // n).max()) * 1000 / n
    stream, coo = (formats.FORMATS[name].size for name in ("densestream", "coo"))
    tops = {density: own.topk(round(density * n)) for density in (0.01, 0.05, 0.1)}
    return row | {f"DenseStream / COO, {density:.0%}": stream(top) / coo(top) for density, top in tops.items()}


def trained(comm, name, density, parts=8, every=5):
    """Train with Algorithm 2 of Ok-Topk; return a row for each part of the training, with means over its steps."""
    task, ((x, y), _) = TASKS[name], data(name)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, shuffle = task.net(x), torch.Generator().manual_seed(comm.rank)
    params, batch = [*model.parameters()], task.batch // comm.size
    steps, n = int(task.epochs * len(y) / task.batch), sum(p.numel() for p in params)
    algo, reused, fixed, residual = OkTopk(), select.ThresholdReuse(), 0.0, np.zeros(n, np.float32)
    k, found = round(density * n), [[] for _ in range(parts)]
    for step in range(steps):
        chosen = torch.randint(len(y) // comm.size, (batch,), generator=shuffle) * comm.size + comm.rank
        model.zero_grad()
        functional.cross_entropy(model(x[chosen]), y[chosen].long()).backward()
        utils.clip_grad_norm_(params, task.clip or np.inf)
        lr = 10 * task.lr * min((step + 1) / (0.1 * steps), (steps - step) / steps)  # ten times, without momentum
        gradient = lr * utils.parameters_to_vector([p.grad for p in params]).numpy()
        acc, before = residual + gradient, reused.value
        local, done = reused.select(DenseVector(acc), k).nnz, allreduce(comm, acc, algo, k=k, return_reduction=True)
        if step % every == 1:
            row = measured(comm, acc, gradient, k, reused=before, fixed=fixed)
            found[step * parts // steps].append(row | {"selected": local / k, "selected of sum": done.value.nnz / k})
        fixed = DenseVector(acc).topk(k).kth_magnitude(k) if step % 32 == 0 else fixed
        residual = acc - done.contributed.to_dense()
        weights = utils.parameters_to_vector(params).detach() - torch.from_numpy(done.value.to_dense() / comm.size)
        utils.vector_to_parameters(weights, params)
    means = [{head: float(np.mean([row[head] for row in rows])) for head in rows[0]} for rows in found]
    return [{"net": name, "density": density, "P": comm.size, "part": i} | row for i, row in enumerate(means, 1)]


def main():
    """Run the experiments without rows, of one paper and figure if they are given; or the trainings of some nets."""
    options = harness.options(__doc__, paper="", figure="", tasks=[], density=[0.01, 0.02], P=4)
    if options.tasks:
        programs = [partial(trained, name=name, density=d) for name in options.tasks for d in options.density]
        harness.record((row for run in programs for row in simulate(options.P, run).results[0]), options)
    for name, shown, command in (line.split(" | ") for line in EXPERIMENTS.strip().splitlines() if not options.tasks):
        path, figures = harness.RESULTS / f"{name}.json", [words.split() for words in shown.split(", ")]
        if not any(options.paper in ("", paper) and options.figure in ("", *some) for paper, *some in figures):
            continue
        if path.exists() and "--update" not in command:
            print(f"{path}: has rows; remove it to measure them again")
        else:
            words = re.sub("|".join(WORDS), lambda found: WORDS[found[0]], command).split()
            new = path if "--update" in words else path.with_suffix(".new")  # until all of its rows are there
            subprocess.run([sys.executable, *words, "--json", str(new)], check=True, cwd=harness.ROOT)
            new.rename(path)


if __name__ == "__main__":
    main()
