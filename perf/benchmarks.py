"""Makes docs/benchmarks.md and tables of docs/choosing.md and the README: measures, draws figures, writes the pages.

python perf/gradients.py --ranks 4 --late 60     # once: real gradients, in perf/data
python perf/benchmarks.py                        # as root (network namespaces), about 45 minutes on two cores
python perf/benchmarks.py --render               # only writes the pages from the rows in perf/results
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import plot
import readme_table
import testbed
from breakeven import judged
from report import Row, markdown
from rich.console import Console

from sparsecoll.cli import bench
from sparsecoll.cli.plot import rows_of

ROOT = Path(__file__).parent.parent
RESULTS, PAGES = ROOT / "perf" / "results", ROOT / "docs"
MPIRUN = str(Path(sys.executable).parent / "mpirun")
NETWORKS = {"memory": None, "10gbit": "10gbit", "1gbit": "1gbit"}  # of the break-even map: name and rate
BREAKEVEN = {"memory": (2, 4, 8), "10gbit": (4,), "1gbit": (4,)}  # numbers of ranks of the break-even map
HOSTS = {"1gbit": "4 hosts, 1 Gb/s", "10gbit": "4 hosts, 10 Gb/s", "memory": "2 ranks, shared memory"}  # as columns
RATIOS = (0.001, 0.01, 0.1, 0.3)  # densities of the table of docs/choosing.md
MEMORY = ("dense", "allgather", "sparcml:variant=dynamic", "densestream", "gtopk", "spardl", "oktopk", "auto")
KERNELS = ("avx512", "avx2")
PAPER = {  # DenseStream, Table II: seconds of dense, and of DSA at 1, 5 and 10 %
    "resnet50, late": (1.34, (0.11, 0.26, 0.43)),
    "vgg16, late": (7.61, (0.34, 1.01, 1.54)),
}


def _python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def measure(console: Console) -> None:
    """Measure all rows; the real gradients must be in perf/data/ranks4."""
    allreduce = _python("perf/allreduce.py", "--gloo", "--interface", "eth0", "--repeat", "5", "--warm", "2")
    with testbed.Testbed(4):
        console.print("[bold]Table II[/bold]")
        testbed.run([*allreduce, "--json", str(RESULTS / "allreduce.json")]).check_returncode()
        console.print("[bold]AVX-512 and AVX2[/bold]")
        for kernels in KERNELS:
            short = ("--n", "24e6", "--gradients", "--json", str(RESULTS / f"allreduce_{kernels}.json"))
            testbed.run(["env", f"SPARSECOLL_KERNELS={kernels}", *allreduce, *short]).check_returncode()
        console.print("[bold]sockets[/bold]")
        command = _python("perf/sockets.py", "--interface", "eth0", "--json", str(RESULTS / "sockets.json"))
        testbed.run(command).check_returncode()
    for name, rate in NETWORKS.items():
        console.print(f"[bold]break-even map, {name}[/bold]")
        command = _python("perf/breakeven.py", "--json", str(RESULTS / f"breakeven_{name}.json"))
        for ranks in BREAKEVEN[name]:
            if rate is None:
                subprocess.run([MPIRUN, "-n", str(ranks), *command], check=True, cwd=ROOT)
            else:
                with testbed.Testbed(ranks, rate):
                    testbed.run(command).check_returncode()
    console.print("[bold]memory[/bold]")
    (RESULTS / "memory.json").write_text(json.dumps({"about": bench.about(), "rows": list(_memory())}, indent=1) + "\n")
    console.print("[bold]scaling[/bold]")
    subprocess.run(_python("perf/scaling.py", "--json", str(RESULTS / "scaling.json")), check=True, cwd=ROOT)
    many = ("--levels", "--ranks", "64", "256", "1024", "4096", "--json", str(RESULTS / "levels.json"))
    subprocess.run(_python("perf/scaling.py", *many), check=True, cwd=ROOT)


def _memory() -> Iterator[Row]:
    """Yield the peak memory of each algorithm, measured in separate runs."""
    for algo in MEMORY:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = _python("-m", "sparsecoll", "bench", "--algo", algo, "--n", "24e6", "--json", file.name)
            command += ["--density", "0.01", "--repeat", "3"]
            subprocess.run([MPIRUN, "-n", "4", *command], check=True, cwd=ROOT, capture_output=True)
            yield rows_of(file.name)[0]


def rows(name: str) -> list[Row]:
    """Return the rows of a file in perf/results."""
    found: list[Row] = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return found


def about(name: str) -> Row:
    """Return machine, versions and commit of a file in perf/results."""
    found: Row = json.loads((RESULTS / f"{name}.json").read_text())["about"]
    return found


def table2() -> Iterator[str]:
    """Yield the text about DenseStream's Table II."""
    found = rows("allreduce")
    for data in dict.fromkeys(r["data"] for r in found):
        for n in dict.fromkeys(r["n"] for r in found if r["data"] == data):
            some = [r for r in found if r["data"] == data and r["n"] == n]
            densities = sorted({r["density"] for r in some if r["density"] < 1})
            yield f"### {data}, n = {n:,}"
            yield markdown([_line(name, some, densities) for name in dict.fromkeys(r["name"] for r in some)])
            if data in PAPER:
                dense, published = PAPER[data]
                cells = ", ".join(f"{s} s ({dense / s:.1f} x)" for s in published)
                yield f"The paper's own, on four nodes: dense {dense} s, DSA {cells}."


def _line(name: str, some: list[Row], densities: list[float]) -> Row:
    row: Row = {"": name}
    for density in densities:
        found = [r for r in some if r["name"] == name and r["density"] in (density, 1.0)]
        row[f"{density:.0%}"] = f"{found[0]['seconds']:.3f} s, {found[0]['x dense']:.1f} x" if found else ""
        counted = found and found[0]["bytes_received"]
        row[f"MB in, {density:.0%}"] = f"{found[0]['bytes_received'] / 1e6:.1f}" if counted else ""
    return row


def kernel_sets() -> Iterator[str]:
    """Yield the text about the same calls with the kernels of AVX-512 and of AVX2."""
    lines = []
    for kernels in KERNELS:
        some = rows(f"allreduce_{kernels}")
        densities = sorted({r["density"] for r in some if r["density"] < 1})
        for name in dict.fromkeys(r["name"] for r in some):
            line = _line(name, some, densities)
            lines.append({"": name, "kernels": kernels} | {f"{d:.0%}": line[f"{d:.0%}"] for d in densities})
    order = list(dict.fromkeys(line[""] for line in lines))
    yield markdown(sorted(lines, key=lambda line: order.index(line[""])))
    commits = dict.fromkeys(about(f"allreduce_{kernels}")["commit"] for kernels in KERNELS)
    yield f"Commit {', '.join(commits)}."


def sockets() -> Iterator[str]:
    """Yield the text about the same calls over MPI and over sockets."""
    found = rows("sockets")
    dense = {r["name"]: f"{r['seconds'] * 1e3:,.0f}" for r in found if r["k"] is None}
    lines = []
    for n, k in dict.fromkeys((r["n"], r["k"]) for r in found if r["k"] is not None):
        ms = {r["name"]: f"{r['seconds'] * 1e3:.3g}" for r in found if (r["n"], r["k"]) == (n, k)}
        line: Row = {"n": f"{n:,}", "entries per rank": f"{k:,}"}
        for name in ("MPI_Allreduce", "gloo, dense"):
            line[f"{name}, ms"] = ms.get(name, dense[name])
        names = ("gloo, sparse", "exact sum, MPI", "exact sum, sockets", "top k of sum, MPI", "top k of sum, sockets")
        lines.append(line | {f"{name}, ms": f"{float(ms[name]):,.4g}" if name in ms else None for name in names})
    yield markdown(lines)
    yield f"Commit {about('sockets')['commit']}."


def scaling() -> Iterator[str]:
    """Yield the text about weak scaling."""
    found = rows("scaling")
    for key in dict.fromkeys((r["model"], r["network"]) for r in found):
        some = [r for r in found if (r["model"], r["network"]) == key]
        yield f"### {key[0]} (n = {some[0]['n']:,}, density {some[0]['density']:.0%}), {key[1]}"
        lines = []
        for algo in dict.fromkeys(r["algo"] for r in some):
            line: Row = {"": algo}
            for P in sorted({r["P"] for r in some}):
                at = {r["algo"]: r["seconds"] for r in some if r["P"] == P}
                if algo in at and "top k of sum" in at:
                    line[f"P = {P}"] = f"{at[algo] * 1e3:,.0f} ms, {at[algo] / at['top k of sum']:.2f} x"
            lines.append(line)
        yield markdown(lines)


def levels() -> Iterator[str]:
    """Yield the text about Ok-Topk in one level and in two."""
    yield "### Ok-Topk in one level and in two"
    yield (
        "`perf/scaling.py --levels`: 4,000 entries a rank of 400,000 coordinates, 10 Gb/s, without the search for"
        " thresholds and boundaries. Simulated: the library's code on virtual ranks. Model: messages of the schedule,"
        " and the seconds by which `levels=None` decides; the processor time is that of a message at the most ranks"
        " that were simulated, times the messages. Processor times are those of Python on this machine (commit"
        f" {about('levels')['commit']})."
    )
    columns = {"split": "split and reduce, ms", "messages": "messages a rank", "processor": "processor a rank, ms"}
    lines = []
    for row in sorted(rows("levels"), key=lambda row: (row["P"], row["levels"])):
        line: Row = {"P": row["P"], "levels": row["levels"], "how": row["how"]}
        line |= {text: row[name] if name == "messages" else f"{row[name] * 1e3:.3g}" for name, text in columns.items()}
        lines.append(line | {"words, in k": "" if row["words"] is None else f"{row['words'] / 4000:.2f}"})
    yield markdown(lines)


def breakeven() -> Iterator[str]:
    """Yield the text about the fastest algorithm for each length and density."""
    for name in NETWORKS:
        measured, every = about(f"breakeven_{name}"), rows(f"breakeven_{name}")
        for P in dict.fromkeys(r["P"] for r in every):
            found = [r for r in every if r["P"] == P]
            yield f"### {P} ranks, {name}"
            yield f"{judged(found)} {measured['machine']}, commit {measured['commit']}."
            columns = ("n", "density", "fastest", "ms", "quartiles", "auto ms", "auto / fastest", "MPI_Allreduce ms")
            yield markdown([{column: r[column] for column in (*columns, "auto / MPI_Allreduce")} for r in found])


def ratios() -> Iterator[str]:
    """Yield the times of `auto` divided by those of MPI_Allreduce."""
    found = {
        name: {(r["n"], r["density"]): r for r in rows(f"breakeven_{name}") if r["P"] == BREAKEVEN[name][0]}
        for name in HOSTS
    }
    lines = []
    for n, density in next(iter(found.values())):
        if density in RATIOS:
            ratio = {text: found[name][n, density]["auto / MPI_Allreduce"] for name, text in HOSTS.items()}
            line: Row = {"n": f"{n:,}", "density": f"{density * 100:g} %"}
            lines.append(line | {text: f"{value:.2g}" for text, value in ratio.items()})
    yield markdown(lines)
    commits = dict.fromkeys(about(f"breakeven_{name}")["commit"] for name in HOSTS)
    machines = dict.fromkeys(about(f"breakeven_{name}")["machine"] for name in HOSTS)
    yield f"`perf/breakeven.py` on {', '.join(machines)}; commit {', '.join(commits)}."


def float16() -> Iterator[str]:
    """Yield how much shorter sums with float16 on the wire take, as a sentence."""
    found = rows("allreduce")
    times = {(r["data"], r["n"], r["density"], r["name"]): r["seconds"] for r in found}
    gains: dict[str, list[float]] = {}
    for (data, n, density, name), seconds in times.items():
        halved = times.get((data, n, density, f"{name}, float16"))
        if halved:
            gains.setdefault("many" if density > 0.01 else "long" if n > 10**8 else "few", []).append(seconds / halved)
    of = {name: f"{min(some):.1f} to {max(some):.1f}" for name, some in gains.items()}
    yield (
        f"On four hosts with 1 Gb/s, it made sums {of['many']} times as fast at a density of 5 or 10 %. At 1 %, it made"
        f" them {of['few']} times as fast for vectors of 24 million values, and {of['long']} times for 134 million"
        " ([Benchmarks](benchmarks.md))."
    )


def memory() -> Iterator[str]:
    """Yield the table of memory per rank."""
    yield markdown([{"algorithm": r["algo"], "MB": round(r["memory"] / 1e6)} for r in rows("memory")])
    yield f"Commit {about('memory')['commit']}."


def render() -> None:
    """Write the pages of perf/benchmarks.in.md and perf/choosing.in.md, and the table of the README."""
    first = about("allreduce")
    versions = " ".join(", ".join(f"{name} {version}" for name, version in first["versions"].items()).split())
    parts = {"table2": table2, "kernel_sets": kernel_sets, "sockets": sockets, "scaling": scaling, "levels": levels}
    parts |= {"breakeven": breakeven, "memory": memory, "ratios": ratios, "float16": float16}
    for page in ("benchmarks", "choosing"):
        text = (ROOT / "perf" / f"{page}.in.md").read_text()
        text = text.replace("{about}", f"{first['machine']}; {versions}; commit {first['commit']}")
        for name, part in parts.items():
            text = text.replace("{" + name + "}", "\n\n".join(part()))
        (PAGES / f"{page}.md").write_text(text)
    found, whole = [f"allreduce_{kernels}" for kernels in KERNELS], ROOT / "README.md"
    commits = [about(name)["commit"] for name in found]
    whole.write_text(readme_table.written(whole.read_text(), *map(rows, found), commits))
    plot.draw()


def main() -> None:
    """Parse the command line, measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="do not measure")
    if not parser.parse_args().render:
        measure(Console())
    render()


if __name__ == "__main__":
    main()
