"""`python -m sparsecoll COMMAND`. Under mpirun where a command uses a communicator."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparsecoll import bench
from sparsecoll.formats import FORMATS
from sparsecoll.transport import default_comm
from sparsecoll.tune import FILE, tune

ALGOS = [bench.MPI_ALLREDUCE, "auto", "allgather", "sparcml:variant=dynamic", "densestream", "oktopk"]


def _tune(options: argparse.Namespace) -> None:
    """Measure the communicator of all ranks and save what `auto` decides by."""
    comm = default_comm()
    tuning = tune(comm)
    if comm.rank == 0:
        figures = asdict(tuning)
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
    rows = []
    heads = f"{'algo':<28}{'n':>12}{'density':>9}{'format':>12}{'values':>9}{'ms':>10}{'x dense':>9}{'MB in':>9}"
    if comm.rank == 0:
        sys.stdout.write(heads + "".join(f"{kind:>8}" for kind in SHOWN) + "\n")
    for n in [None] if options.gradient else options.n:
        rank = comm.rank
        vectors = bench.from_file(options.gradient, rank) if n is None else bench.heavy_tailed(n, rank)
        dense = None
        for call in bench.calls(options.algo, options.density, options.format, options.value_dtype):
            row = bench.measure(comm, call, vectors, options.repeat)
            dense = row["seconds"] if call.algo == bench.MPI_ALLREDUCE else dense
            rows.append(row)
            if comm.rank == 0:
                sys.stdout.write(_line(row, dense) + "\n")
                sys.stdout.flush()
    if comm.rank == 0 and options.json:
        options.json.write_text(json.dumps({"about": bench.about(), "rows": rows}, indent=1) + "\n")


def _plot(options: argparse.Namespace) -> None:
    """Draw figures from the rows that `bench --json` saved: phases, time against density, time and volume against P."""
    from sparsecoll import plot

    for path in options.rows:
        for figure in plot.figures(plot.rows_of(path), options.out, path.stem):
            sys.stdout.write(f"{figure}\n")


SHOWN = ("select", "encode", "decode", "merge", "dense", "wait", "other")


def _line(row: dict[str, Any], dense: float | None) -> str:
    ratio = "" if dense is None else f"{dense / row['seconds']:.2f}"
    head = f"{row['algo']:<28}{row['n']:>12,}{row['density']:>9.4g}{row['format']:>12}{row['value_dtype']:>9}"
    numbers = f"{row['seconds'] * 1e3:>10.2f}{ratio:>9}{row['bytes_received'] / 1e6:>9.2f}"
    return head + numbers + "".join(f"{row[kind] * 1e3:>8.1f}" for kind in SHOWN)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sparsecoll", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("tune", help=_tune.__doc__, description=_tune.__doc__)
    command.add_argument("--save", type=Path, metavar="FILE", help="write the measurement as JSON")
    command.set_defaults(run=_tune)

    command = commands.add_parser("bench", help=_bench.__doc__, description=f"{_bench.__doc__} {bench.__doc__}")
    command.add_argument("--algo", nargs="+", default=ALGOS, metavar="NAME[:OPTION=VALUE,...]")
    command.add_argument("--n", nargs="+", type=lambda text: int(float(text)), default=[4_000_000], help="lengths")
    command.add_argument("--density", nargs="+", type=float, default=[0.001, 0.01, 0.1], help="k / n")
    command.add_argument("--format", nargs="+", choices=FORMATS, default=["auto"])
    command.add_argument("--value-dtype", nargs="+", choices=("float16", "bfloat16", "float32"), default=[None])
    command.add_argument("--gradient", metavar="FILE", help="a .npy file in place of --n; {rank} stands for the rank")
    command.add_argument("--repeat", type=int, default=7, help="timed calls a row (default: 7)")
    command.add_argument("--json", type=Path, metavar="FILE", help="save the rows")
    command.set_defaults(run=_bench)

    command = commands.add_parser("plot", help=_plot.__doc__, description=_plot.__doc__)
    command.add_argument("rows", nargs="+", type=Path, metavar="FILE", help="JSON files of bench")
    command.add_argument(
        "--out", type=Path, default=Path("figures"), help="folder for the SVG files (default: figures)"
    )
    command.set_defaults(run=_plot)
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Parse and run a command."""
    options = _parser().parse_args(arguments)
    options.run(options)


if __name__ == "__main__":
    main()
