"""Measures the rows of README's table, docs/benchmarks.md and docs/choosing.md; writes the tables of all pages.

python perf/benchmarks.py                # as root (network namespaces), about 45 minutes on two cores
python perf/benchmarks.py --render       # only tables and figures, from the rows in perf/results
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import allreduce
import convergence
import gpu
import harness
import kernels
import rows
import testbed
import training
import volume
from breakeven import judged
from harness import FIGURES, RESULTS, ROOT, load, markdown, source

from sparsecoll.cli import bench, plot

MPIRUN = str(Path(sys.executable).parent / "mpirun")
NETWORKS = {"memory": "2 ranks, shared memory", "10gbit": "4 hosts, 10 Gb/s", "1gbit": "4 hosts, 1 Gb/s"}
RATIOS = (0.001, 0.01, 0.1, 0.3)  # densities of the table of docs/choosing.md
ALGORITHMS = ("dense", "allgather", "sparcml:variant=dynamic", "densestream", "gtopk", "spardl", "oktopk", "auto")


def measure():
    """Measure all rows, except those of scripts that say how to run them."""
    python, table2 = (
        [sys.executable],
        [sys.executable, "perf/allreduce.py", "--gloo", "--interface", "eth0", "--repeat", "5"],
    )
    with testbed.Testbed(4):
        testbed.run([*table2, "--json", str(RESULTS / "allreduce.json")]).check_returncode()
        for kernel_set in allreduce.SETS:
            short = ["--n", "24e6", "--json", str(RESULTS / f"allreduce_{kernel_set}.json")]
            testbed.run(["env", f"SPARSECOLL_KERNELS={kernel_set}", *table2, *short]).check_returncode()
    for name in NETWORKS:
        command = [*python, "perf/breakeven.py", "--json", str(RESULTS / f"breakeven_{name}.json")]
        if name == "memory":
            subprocess.run([MPIRUN, "-n", "2", *command], check=True, cwd=ROOT)
        else:
            with testbed.Testbed(4, name):
                testbed.run(command).check_returncode()
    found = []
    for algorithm in ALGORITHMS:  # each in a run of its own, for its peak memory
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = [MPIRUN, "-n", "4", *python, "-m", "sparsecoll", "bench", "--algo", algorithm, "--n", "24e6"]
            command += ["--density", "0.01", "--repeat", "3", "--json", file.name]
            subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
            found += plot.rows_of(file.name)
    harness.save(RESULTS / "memory.json", {"about": bench.about(), "rows": found})
    subprocess.run(
        [*python, "perf/volume.py", "--scaling", "--json", str(RESULTS / "scaling.json")], check=True, cwd=ROOT
    )


def breakeven(name):
    """Return the heading and the table of the fastest algorithm for each length and density on a network."""
    found = load(f"breakeven_{name}")["rows"]
    columns = ("n", "density", "fastest", "ms", "quartiles", "auto ms", "auto / fastest", "MPI_Allreduce ms")
    columns += ("auto / MPI_Allreduce", "model / measured")
    table = markdown([{column: row.get(column) for column in columns} for row in found])
    return f"### {found[0]['P']} ranks, {name}\n\n{judged(found)} {source(f'breakeven_{name}')}\n\n{table}"


def ratios():
    """Return the table of the times of `auto` divided by those of MPI_Allreduce, and its source."""
    files = [f"breakeven_{name}" for name in reversed(NETWORKS)]
    found = [{(row["n"], row["density"]): row["auto / MPI_Allreduce"] for row in load(name)["rows"]} for name in files]
    lines = []
    for n, density in [point for point in found[0] if point[1] in RATIOS]:
        cells = {text: f"{of[n, density]:.2g}" for text, of in zip(reversed(NETWORKS.values()), found, strict=True)}
        lines.append({"n": f"{n:,}", "density": f"{density * 100:g} %"} | cells)
    return f"{markdown(lines)}\n\n{source(*files)}"


def tables():
    """Return the tables of all pages by name."""
    found = {"benchmarks.breakeven": "\n\n".join(map(breakeven, NETWORKS)), "benchmarks.ratios": ratios()}
    memory = markdown([{"algorithm": row["algo"], "MB": round(row["memory"] / 1e6)} for row in load("memory")["rows"]])
    found["benchmarks.memory"] = f"{memory}\n\n{source('memory')}"
    for script in (allreduce, convergence, gpu, kernels, rows, training, volume):
        found |= script.tables()
    return found


def draw():
    """Draw all figures."""
    some = [row for row in plot.rows_of(RESULTS / "allreduce.json") if row["n"] == 24_000_000]
    library = [row for row in some if row["density"] == 0.1 and not row["name"].startswith("gloo")]
    title = "4 hosts, 1 Gb/s; from dense gradient to sum"
    plot.stacked(library, FIGURES / "phases.svg", f"n = 24 M, density 10 %, {title}")
    plot.lines(some, "density", "seconds", FIGURES / "density.svg", f"n = 24 M, {title}", 1e3)
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
