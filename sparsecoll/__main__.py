"""`sparsecoll COMMAND` or `python -m sparsecoll COMMAND`; under mpirun where a command uses a communicator."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from sparsecoll import bench
from sparsecoll._version import __version__
from sparsecoll.errors import CommunicationError
from sparsecoll.formats import FORMATS
from sparsecoll.model import Network
from sparsecoll.transport import default_comm, simulate
from sparsecoll.tune import FILE, tune

ALGOS = [bench.MPI_ALLREDUCE, "auto", "allgather", "sparcml:variant=dynamic", "densestream", "oktopk"]
NETWORKS = {
    "1gbit": Network(50e-6, 8e-9),
    "10gbit": Network(20e-6, 0.8e-9),
    "25gbit": Network(10e-6, 0.32e-9),
    "100gbit": Network(3e-6, 0.08e-9),
}
SHOWN = ("select", "encode", "decode", "merge", "dense", "wait", "other")
COLOURS = {"good": "green", "could be better": "yellow", "broken": "red"}


def _doctor(options: argparse.Namespace) -> None:
    """Look at this machine, its MPI and this installation, try a sum on two ranks, and say what could be better."""
    from sparsecoll import doctor

    findings = doctor.examine(default_comm())
    if not findings:
        return
    if options.json:
        _save(options.json, {"findings": [asdict(finding) for finding in findings]})
    table = Table("", "found", "state", "what to do", title="sparsecoll doctor", title_justify="left", box=None)
    for finding in findings:
        colour = COLOURS[finding.state]
        table.add_row(finding.subject, finding.found, f"[{colour}]{finding.state}[/]", finding.advice)
    Console().print(table)
    if any(finding.state == doctor.BAD for finding in findings):
        sys.exit(1)


def _tune(options: argparse.Namespace) -> None:
    """Measure the communicator of all ranks and save what `auto` decides by."""
    comm = default_comm()
    tuning = tune(comm)
    if comm.rank == 0:
        figures = asdict(tuning)
        if options.json:
            _save(options.json, {"about": bench.about(), "tuning": figures})
        calls = figures.pop("calls")
        for name, seconds in figures.items():
            sys.stdout.write(f"{name:<9} {seconds * 1e9:12.3f} ns\n")
        for name, rows in calls.items():
            measured = ", ".join(f"{took * 1e3:.3f} ms ({took / predicted:.2f})" for predicted, took in rows)
            sys.stdout.write(f"{name:<16} {measured}\n")
        if options.save:
            tuning.save(options.save)
            sys.stdout.write(f"saved; {FILE}={options.save} makes algo='auto' use it\n")


def _bench(options: argparse.Namespace) -> None:
    """Time allreduces on the communicator of all ranks, from a dense vector on each to the sparse sum on every one."""
    comm = default_comm()
    lengths = [None] if options.gradient else options.n
    calls = list(bench.calls(options.algo, options.density, options.format, options.value_dtype))

    def measured(n: int | None, vectors: Any, call: bench.Call) -> bench.Row:
        return bench.measure(comm, call, vectors, options.repeat)

    def vectors(n: int | None) -> Any:
        return bench.from_file(options.gradient, comm.rank) if n is None else bench.heavy_tailed(n, comm.rank)

    _rows(options, [(n, call) for n in lengths for call in calls], vectors, measured, comm.rank)


def _simulate(options: argparse.Namespace) -> None:
    """Run allreduces on virtual ranks with a modelled network: exact bytes and messages, modelled seconds.

    What computation costs is not modelled: seconds are those of the network.
    """
    network = NETWORKS[options.network]
    network = Network(
        network.alpha if options.alpha is None else options.alpha,
        network.beta if options.beta is None else options.beta,
    )
    calls = list(bench.calls(options.algo, options.density, options.format, options.value_dtype))
    todo = [((ranks, n), call) for ranks in options.ranks for n in options.n for call in calls]

    def measured(shape: tuple[int, int], _: Any, call: bench.Call) -> bench.Row:
        ranks, n = shape

        def program(comm: Any) -> bench.Row:
            return bench.measure(comm, call, bench.heavy_tailed(n, comm.rank), options.repeat, warm=1)

        rows: list[bench.Row] = simulate(ranks, program, network, ranks_per_node=options.ranks_per_node).results
        return rows[0]

    _rows(options, todo, lambda _: None, measured, 0)


def _rows(
    options: argparse.Namespace,
    todo: list[tuple[Any, bench.Call]],
    vectors: Callable[[Any], Any],
    measured: Callable[[Any, Any, bench.Call], bench.Row],
    rank: int,
) -> None:
    """Measure, show and save rows; rank 0 writes, with a progress bar where somebody looks on."""
    rows: list[bench.Row] = []
    heads = (
        f"{'algo':<28}{'P':>5}{'n':>12}{'density':>9}{'format':>12}{'values':>9}{'ms':>10}{'x dense':>9}{'MB in':>9}"
    )
    if rank == 0:
        sys.stdout.write(heads + "".join(f"{kind:>8}" for kind in SHOWN) + "\n")
    shape, given, dense = None, None, None
    console = Console(stderr=True, quiet=rank != 0)
    with Progress(console=console, transient=True, disable=rank != 0 or not console.is_terminal) as progress:
        bar = progress.add_task("measuring", total=len(todo))
        for wanted, call in todo:
            if wanted != shape:
                shape, given, dense = wanted, vectors(wanted), None
            row = measured(wanted, given, call)
            if call.algo in (bench.MPI_ALLREDUCE, "dense") and dense is None:
                dense = row["seconds"]
            rows.append(row)
            if rank == 0:
                sys.stdout.write(_line(row, dense) + "\n")
                sys.stdout.flush()
            progress.advance(bar)
    if rank == 0 and options.json:
        _save(options.json, {"about": bench.about(), "rows": rows})


def _save(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def _plot(options: argparse.Namespace) -> None:
    """Draw figures from the rows that `bench --json` saved: phases, time against density, time and volume against P."""
    from sparsecoll import plot

    for path in options.rows:
        for figure in plot.figures(plot.rows_of(path), options.out, path.stem):
            sys.stdout.write(f"{figure}\n")


def _line(row: dict[str, Any], dense: float | None) -> str:
    ratio = "" if dense is None else f"{dense / row['seconds']:.2f}"
    head = (
        f"{row['algo']:<28}{row['P']:>5}{row['n']:>12,}{row['density']:>9.4g}{row['format']:>12}{row['value_dtype']:>9}"
    )
    numbers = f"{row['seconds'] * 1e3:>10.2f}{ratio:>9}{row['bytes_received'] / 1e6:>9.2f}"
    return head + numbers + "".join(f"{row[kind] * 1e3:>8.1f}" for kind in SHOWN)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sparsecoll", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], None], more: str | None = "") -> argparse.ArgumentParser:
        text = (run.__doc__ or "").split("\n")[0]
        command = commands.add_parser(name, help=text, description=f"{run.__doc__} {more or ''}")
        command.set_defaults(run=run)
        return command

    def add_calls(command: argparse.ArgumentParser, algos: list[str], length: int, densities: list[float]) -> None:
        command.add_argument("--algo", nargs="+", default=algos, metavar="NAME[:OPTION=VALUE,...]")
        command.add_argument("--n", nargs="+", type=_count, default=[length], help="lengths of the vectors")
        command.add_argument("--density", nargs="+", type=float, default=densities, help="k / n")
        command.add_argument("--format", nargs="+", choices=FORMATS, default=["auto"])
        command.add_argument("--value-dtype", nargs="+", choices=("float16", "bfloat16", "float32"), default=[None])

    command = add("doctor", _doctor)
    command.add_argument("--json", type=Path, metavar="FILE", help="save the findings")

    command = add("tune", _tune)
    command.add_argument("--save", type=Path, metavar="FILE", help="write the measurement for SPARSECOLL_TUNING")
    command.add_argument("--json", type=Path, metavar="FILE", help="save it with what it was measured on")

    command = add("bench", _bench, bench.__doc__)
    add_calls(command, ALGOS, 4_000_000, [0.001, 0.01, 0.1])
    command.add_argument("--gradient", metavar="FILE", help="a .npy file in place of --n; {rank} stands for the rank")
    command.add_argument("--repeat", type=int, default=7, help="timed calls a row (default: 7)")
    command.add_argument("--json", type=Path, metavar="FILE", help="save the rows")

    command = add("simulate", _simulate)
    add_calls(command, ["dense", *ALGOS[2:]], 100_000, [0.01])
    command.add_argument("--ranks", nargs="+", type=int, default=[4, 16, 64], help="numbers of virtual ranks")
    command.add_argument("--ranks-per-node", type=int, default=1)
    command.add_argument("--network", choices=NETWORKS, default="1gbit")
    command.add_argument("--alpha", type=float, help="seconds a message, instead of the network's")
    command.add_argument("--beta", type=float, help="seconds a byte, instead of the network's")
    command.add_argument("--repeat", type=int, default=3, help="calls a row (default: 3)")
    command.add_argument("--json", type=Path, metavar="FILE", help="save the rows")

    command = add("plot", _plot)
    command.add_argument("rows", nargs="+", type=Path, metavar="FILE", help="JSON files of bench and simulate")
    command.add_argument(
        "--out", type=Path, default=Path("figures"), help="folder for the SVG files (default: figures)"
    )
    return parser


def _count(text: str) -> int:
    return int(float(text))


def main(arguments: list[str] | None = None) -> None:
    """Parse and run a command; errors end the program with one line that says what was expected."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (ValueError, TypeError, OSError, CommunicationError) as error:
        sys.exit(f"sparsecoll: {error}")


if __name__ == "__main__":
    main()
