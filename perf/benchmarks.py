"""Measures the rows of README's table, docs/benchmarks.md and docs/choosing.md; writes the tables of all pages.

python perf/benchmarks.py                # as root (network namespaces), hours on two cores
python perf/benchmarks.py --render       # only tables and figures, from the rows in perf/results
"""

import subprocess
import sys
from pathlib import Path

import allreduce
import backend
import cold
import convergence
import gpu
import harness
import kernels
import objects
import rows
import testbed
import training
import volume
from breakeven import judged
from harness import FIGURES, RESULTS, ROOT, cell, load, markdown, source

from sparsecoll.bench.timing import about
from sparsecoll.cli import plot

RANKS = {"memory": (2, 4, 8), "10gbit": (4,), "1gbit": (4,)}  # of the break-even map
RATIOS = (0.001, 0.01, 0.1)  # densities of the tables of docs/benchmarks.md and docs/choosing.md
DRAWN = ("MPI_Allreduce", "dense, 4 bits", "gloo, sparse", "TopkA", "Ok-Topk", "exact sum", "top k of sum")
DRAWN += ("top k of sum, float16",)  # lines of time against density
ALGORITHMS = ("dense", "allgather", "sparcml:variant=dynamic", "densestream", "gtopk", "spardl", "oktopk", "auto")


def run(command, name, ranks=4, rate="1gbit"):
    """Run a script on the test bed, or in memory; it saves its rows under a name."""
    words = [*command.split(), "--json", str(RESULTS / f"{name}.json")]
    if rate == "memory":
        mpirun = str(Path(sys.executable).parent / "mpirun")
        subprocess.run([mpirun, "-n", str(ranks), *words], check=True, cwd=ROOT)
    else:
        with testbed.Testbed(ranks, rate):
            testbed.run(words).check_returncode()


def measure():
    """Measure all rows, except those of scripts that say how to run them."""
    run(f"{sys.executable} perf/allreduce.py --gloo --interface eth0 --repeat 5", "allreduce")
    for rate in RANKS:
        for ranks in RANKS[rate]:
            updates = " --update" * (ranks != RANKS[rate][0])
            run(f"{sys.executable} perf/breakeven.py{updates}", f"breakeven_{rate}", ranks, rate)
    found = []
    for algorithm in ALGORITHMS:  # each in a run of its own, for its peak memory
        bench_of = f"{sys.executable} -m sparsecoll bench --algo {algorithm} --n 24e6 --density 0.01 --repeat 3"
        run(bench_of, "memory", 4, "memory")
        found += load("memory")["rows"]
    harness.save(RESULTS / "memory.json", {"about": about(), "rows": found})
    scaling = f"perf/volume.py --scaling --ranks 4 16 64 256 1024 --json {RESULTS / 'scaling.json'}"
    subprocess.run([sys.executable, *scaling.split()], check=True)


def breakeven():
    """Return the fastest algorithm for each length and density on each network, and how near to it `auto` is."""
    notes, lines = [], {}
    for rate in RANKS:
        rows = load(f"breakeven_{rate}")["rows"]
        for P in RANKS[rate]:
            found = [row for row in rows if row["P"] == P]
            notes.append(judged(found))
            for row in (row for row in found if row["density"] in RATIOS[1:] and row["n"] > 100_000):
                line = lines.setdefault((row["n"], row["density"]), _point(row))
                line[f"{P} ranks, {rate}"] = f"{row['fastest']} {cell(row['ms'])}"
    about = source(*(f"breakeven_{rate}" for rate in RANKS))
    means, most = zip(*notes, strict=True)
    note = f"{min(means):.2f} to {max(means):.2f} times as long as the fastest choice, {max(most):.2f} at most"
    return f"{markdown(lines.values())}\n\n{about} `auto` takes {note}."


def ratios():
    """Return the table of the times of `auto` divided by those of MPI_Allreduce, and its source."""
    lines = {}
    for rate in RANKS:
        for row in load(f"breakeven_{rate}")["rows"]:
            if row["density"] in RATIOS:
                line = lines.setdefault((row["n"], row["density"]), _point(row))
                line[f"{row['P']} ranks, {rate}"] = f"{row['auto / MPI_Allreduce']:.2g}"
    return f"{markdown(lines.values())}\n\n{source(*(f'breakeven_{rate}' for rate in RANKS))}"


def _point(row):
    return {"n": f"{row['n']:,}", "density": f"{row['density'] * 100:g}%"}


def tables():
    """Return the tables of all pages by name."""
    found = {"benchmarks.breakeven": breakeven(), "benchmarks.ratios": ratios()}
    for script in (allreduce, backend, cold, convergence, gpu, kernels, objects, rows, training, volume):
        found |= script.tables()
    return found


def draw():
    """Draw all figures."""
    some = [row for row in plot.rows_of(RESULTS / "allreduce.json") if row["n"] == 24_000_000]
    library = [row for row in some if row["density"] == 0.1 and not row["name"].startswith("gloo")]
    title = "4 hosts, 1 Gb/s; from dense gradient to sum"
    plot.stacked(library, FIGURES / "phases.svg", f"n = 24 M, density 10 %, {title}")
    shown = [row for row in some if row["name"] in DRAWN]
    plot.lines(shown, "density", "seconds", FIGURES / "density.svg", f"n = 24 M, {title}", 1e3)
    bert = [r for r in plot.rows_of(RESULTS / "scaling.json") if r["model"] == "BERT" and r["network"] == "1 Gb/s"]
    title = "BERT's gradient, density 1 %"
    plot.lines(bert, "P", "seconds", FIGURES / "scaling_time.svg", f"{title}, 1 Gb/s (modelled)", 1e3)
    plot.lines(bert, "P", "bytes_received", FIGURES / "scaling_volume.svg", f"{title} (counted)", 1e-6)
    convergence.draw()


def main():
    """Measure, write the tables, and draw the figures."""
    if not harness.options(__doc__, render=False).render:
        measure()
    for page, text in harness.rendered(tables()).items():
        page.write_text(text)
    draw()


if __name__ == "__main__":
    main()
