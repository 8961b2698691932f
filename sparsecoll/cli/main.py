"""The command line, `sparsecoll COMMAND` or `python -m sparsecoll COMMAND`; several ranks by mpirun or torchrun."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from sparsecoll._version import __version__
from sparsecoll.bench import timing
from sparsecoll.bench.timing import MPI_ALLREDUCE
from sparsecoll.cli.arguments import Parser, checked, cost, count, density, fail
from sparsecoll.cli.job import check_mpi4py, joined
from sparsecoll.cli.network import measured_network
from sparsecoll.cli.report import Report, check_writable, save
from sparsecoll.errors import CommunicationError
from sparsecoll.formats import FORMATS
from sparsecoll.transport import Transport, as_transport, launcher
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.network import ONE_NODE, Network

T = TypeVar("T")
ALGOS = [MPI_ALLREDUCE, "auto", "allgather", "sparcml:variant=dynamic", "densestream", "oktopk"]
NETWORKS = {
    "100mbit": Network(100e-6, 80e-9),
    "1gbit": Network(50e-6, 8e-9),
    "10gbit": Network(20e-6, 0.8e-9),
    "25gbit": Network(10e-6, 0.32e-9),
    "100gbit": Network(3e-6, 0.08e-9),
    "memory": ONE_NODE,
}
COLOURS = {"good": 32, "could be better": 33, "broken": 31}  # of ECMA-48: green, yellow, red


def _doctor(options: argparse.Namespace) -> None:
    """Check this machine, its MPI and this installation, try a sum on two ranks, and suggest improvements."""
    from sparsecoll.cli import doctor

    found = []
    with doctor.joined_or_alone() as (comm, trouble):
        if options.json:
            _check_writable(comm, options.json)
        shown = _writes(comm)
        for finding in doctor.examine(comm, trouble):
            found.append(finding)
            if shown and options.json:
                save(options.json, {"findings": [asdict(finding) for finding in found]})
            if shown:
                state = f"{finding.state:<17}"
                state = f"\x1b[{COLOURS[finding.state]}m{state}\x1b[0m" if sys.stdout.isatty() else state
                advice = f"{'':<17}-> {finding.advice}\n" if finding.advice else ""
                sys.stdout.write(f"{state}{finding.subject}: {finding.found}\n{advice}")
                sys.stdout.flush()
    if shown and any(finding.state == doctor.BAD for finding in found):
        sys.exit(1)


def _warmup(options: argparse.Namespace) -> None:
    """Compile the kernels of this machine into the cache, so that no later process has to; some minutes."""
    from sparsecoll.cli import warmup

    start = time.perf_counter()
    for kind, seconds, compiled in warmup.warm_up():
        sys.stdout.write(f"{seconds:>8.1f} s  {compiled:>4} compiled  {kind}\n")
        sys.stdout.flush()
    place = warmup.cache() or "no folder: set NUMBA_CACHE_DIR to one that can be written to, and install numba"
    sys.stdout.write(f"{time.perf_counter() - start:>8.1f} s in all; the kernels are in {place}\n")


def _gain(options: argparse.Namespace) -> None:
    """Predict the times of dense and sparse sums of float32 gradients, and say whether sparse ones are faster."""
    from sparsecoll.cli import gain

    network = _network(options)
    found = gain.predict(options.n, options.density, options.ranks, network, options.network == "memory")
    sys.stdout.write(f"{gain.table(found)}\n{gain.advice(found)}\n")
    sys.stdout.write(f"{network}\nselecting: {gain.SOURCE}\n")


def _bench(options: argparse.Namespace) -> None:
    """Time allreduces on all ranks, from a dense vector on each rank to the sparse sum on every rank."""
    check_mpi4py()
    with joined() as comm:
        _warn_of_one_rank(comm)
        _check_writable(comm, options.json)
        transport, given, dtype = as_transport(comm), None, np.dtype(np.float32)
        with _checking_arguments():
            if options.gradient:
                read = partial(timing.from_file, options.gradient, transport.rank)
                given = _everywhere(comm, read, lambda given: {"length": given.n, "dtype": given.base.dtype.name})
                dtype = given.base.dtype
            if MPI_ALLREDUCE in options.algo and (not hasattr(comm, "Allreduce") or dtype == np.float16):
                why = "MPI has no float16" if dtype == np.float16 else "the ranks are not MPI's"
                _note(f"{MPI_ALLREDUCE} is left out, because {why}")
                rest = [algo for algo in options.algo if algo != MPI_ALLREDUCE]
                options.algo = rest if transport.size == 1 or "dense" in rest else ["dense", *rest]
            calls = _everywhere(comm, partial(_calls, options, dtype))

        report = Report([str(call) for call in calls], options.json) if _writes(comm) else None
        for n in [0] if given else options.n:
            vectors = given or _everywhere(comm, partial(timing.heavy_tailed, n, transport.rank))
            for call in calls:
                row = timing.measure(comm, call, vectors, options.repeat)
                _everywhere(comm, partial(report.add, row) if report else lambda: None)
        if network := measured_network(comm) if transport.size > 1 else None:
            _everywhere(comm, partial(report.end, network, transport.size - 1) if report else lambda: None)


def _simulate(options: argparse.Namespace) -> None:
    """Run allreduces on virtual ranks with a modelled network: exact bytes and messages, modelled seconds.

    The cost of computation is not modelled: seconds are those of the network.
    """
    with _checking_arguments():
        check_writable(options.json)
        if MPI_ALLREDUCE in options.algo:
            raise ValueError(f"--algo: {MPI_ALLREDUCE} is MPI's own and cannot be simulated; use dense")
        calls = _calls(options, np.float32)
    more = options.repeat, _network(options), options.ranks_per_node
    report = Report([str(call) for call in calls], options.json)
    for one in itertools.product(options.ranks, options.n, calls):
        report.add(timing.simulated(*one, *more))


def _plot(options: argparse.Namespace) -> None:
    """Draw figures from the rows that `bench` and `simulate` saved: phases, time against density or ranks, volume."""
    from sparsecoll.cli import plot

    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("plot needs matplotlib, which is not installed: pip install matplotlib")
    with _checking_arguments():
        rows = [(path, plot.rows_of(path)) for path in options.rows]
        stems = [path.stem for path in options.rows]
        if len(set(stems)) < len(stems):
            raise ValueError(f"FILE: expected files of different names, after which figures are called, got {stems}")
        for path, some in rows:
            for figure in plot.figures(plot.chosen(some, options.algo), options.out, path.stem):
                sys.stdout.write(f"{figure}\n")


def _calls(options: argparse.Namespace, dtype: Any) -> list[timing.Call]:
    choices = options.density, options.format, options.value_dtype, options.selector, options.compressor
    return list(timing.calls(options.algo, *choices, dtype))


def _network(options: argparse.Namespace) -> Network:
    given = {name: getattr(options, name) for name in ("alpha", "beta") if getattr(options, name) is not None}
    return replace(NETWORKS[options.network], **given)


def _everywhere(comm: Any, work: Callable[[], T], same: Callable[[T], dict[str, Any]] | None = None) -> T:
    """Call work() on every rank; an exception on one rank is raised on all, so that no rank waits for another.

    Args:
        work: what this rank does.
        same: function of the result whose values must be the same on all ranks.
    """
    transport: Transport = as_transport(comm)
    if transport.size == 1:
        return work()
    with CollectiveCall(transport, "command") as call:
        result = work()
        if same:
            call.signature |= same(result)
        call.agree(entries=0)
    return result


def _check_writable(comm: Any, *paths: Path | None) -> None:
    """Check before measuring that the files can be written; collective."""
    with _checking_arguments():
        _everywhere(comm, partial(check_writable, *paths if _writes(comm) else ()))


@contextlib.contextmanager
def _checking_arguments() -> Iterator[None]:
    """Context manager: an exception inside is due to an argument, so that the exit status is 2."""
    try:
        yield
    except (ValueError, TypeError, CommunicationError) as error:
        error.of_argument = True  # type: ignore[union-attr]
        raise


def _writes(comm: Any) -> bool:
    """Return whether this process prints and writes files: rank 0 of the processes that were launched together."""
    transport = as_transport(comm)
    return transport.rank == 0 and (transport.size > 1 or launcher.rank() == 0)


def _warn_of_one_rank(comm: Any) -> None:
    if as_transport(comm).size > 1:
        return
    variable, processes = launcher.processes()
    if processes > 1:
        why = "the launcher is not that of the MPI that mpi4py loads, or not used at all; see `sparsecoll doctor`"
        _note(f"this job has 1 rank, but {variable}={processes}: {why}")
    else:
        _note("there is only 1 rank, so nothing is communicated; start it with mpirun -n P or torchrun")


def _note(text: str) -> None:
    if launcher.rank() == 0:
        sys.stderr.write(f"sparsecoll: note: {text}\n")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="sparsecoll", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], None], more: str | None = "") -> argparse.ArgumentParser:
        text = (run.__doc__ or "").split("\n")[0]
        command = commands.add_parser(name, help=text, description=f"{run.__doc__} {more or ''}")
        command.set_defaults(run=run)
        return command

    def add_calls(command: argparse.ArgumentParser, algos: list[str], length: int, densities: list[float]) -> None:
        usual, share, text = ", ".join(algos), " ".join(map(str, densities)), "NAME[:OPTION=VALUE,...]"
        command.add_argument("--algo", nargs="+", type=checked("algo"), default=algos, metavar=text,
                             help=f"algorithms, with options (default: {usual}); NAME may be MODULE:CLASS")  # fmt: skip
        command.add_argument("--selector", nargs="+", type=checked("selector"), default=[None], metavar=text,
                             help="selectors, with each sparse algorithm (default: its own)")  # fmt: skip
        command.add_argument("--compressor", nargs="+", type=checked("compressor"), default=[], metavar=text,
                             help="compressors of sparsecoll.torch, beside the algorithms (default: none)")  # fmt: skip
        command.add_argument("--n", "--length", nargs="+", type=count, default=[length],
                             help=f"lengths of the vectors, such as 24e6 (default: {length:,})")  # fmt: skip
        command.add_argument("--density", nargs="+", type=density, default=densities,
                             help=f"k / n (default: {share})")  # fmt: skip
        command.add_argument("--format", nargs="+", choices=FORMATS, default=["auto"], help="formats (default: auto)")
        command.add_argument("--value-dtype", nargs="+", choices=("float16", "bfloat16", "float32"), default=[None],
                             help="dtypes of values on the wire (default: that of the vector)")  # fmt: skip
        command.add_argument("--json", type=Path, metavar="FILE", help="save each row as soon as it is measured")

    def add_network(command: argparse.ArgumentParser) -> None:
        command.add_argument("--network", choices=NETWORKS, default="1gbit", help="modelled network (default: 1gbit)")
        command.add_argument("--alpha", type=cost, help="seconds per message, instead of the network's")
        command.add_argument("--beta", type=cost, help="seconds per byte, instead of the network's")

    command = add("doctor", _doctor)
    command.add_argument("--json", type=Path, metavar="FILE", help="save the findings")

    command = add("bench", _bench, (timing.__doc__ or "").partition("\n\n")[2])
    add_calls(command, ALGOS, 4_000_000, [0.001, 0.01, 0.1])
    command.add_argument("--gradient", metavar="FILE", help="a .npy file instead of --n; {rank} stands for the rank")
    command.add_argument("--repeat", type=count, default=7, help="timed calls per row (default: 7)")

    command = add("simulate", _simulate)
    add_calls(command, ["dense", *ALGOS[2:]], 100_000, [0.01])
    command.add_argument("--ranks", nargs="+", type=count, default=[4, 16, 64],
                         help="numbers of virtual ranks (default: 4 16 64)")  # fmt: skip
    command.add_argument("--ranks-per-node", type=count, default=1, help="virtual ranks per node (default: 1)")
    add_network(command)
    command.add_argument("--repeat", type=count, default=3, help="calls per row (default: 3)")

    command = add("gain", _gain)
    command.add_argument("--n", type=count, default=24_000_000, help="length of the vectors (default: 24,000,000)")
    command.add_argument("--density", type=density, default=0.01, help="k / n (default: 0.01)")
    command.add_argument("--ranks", type=count, default=8, help="number of ranks (default: 8)")
    add_network(command)

    command = add("plot", _plot)
    command.add_argument("--algo", nargs="+", default=[], metavar="NAME", help="draw these lines and the dense ones")
    command.add_argument("rows", nargs="+", type=Path, metavar="FILE", help="JSON files of bench and simulate")
    command.add_argument("--out", type=Path, default=Path("figures"), help="folder of the SVG files (default: figures)")
    add("warmup", _warmup)
    return parser


def _announce_compilation() -> None:
    """Show the line that the kernels log when they are compiled for the first time, on a terminal."""
    logger = logging.getLogger("sparsecoll.kernels.cpu.intrinsics.cache")
    if launcher.rank() == 0 and sys.stderr.isatty() and not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("sparsecoll: note: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def main(arguments: list[str] | None = None) -> None:
    """Parse the arguments and run the command; an error ends the program with one line that says what was expected."""
    try:
        if arguments is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not with nohup or &
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it in calls of MPI and compiled code, too
        options = _parser().parse_args(arguments)
        _announce_compilation()
        if launcher.rank() == 0 or options.run in (_doctor, _bench):  # the others need one process
            options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # as of `| head`: nothing that is still to be printed can be, when the process ends either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (ValueError, TypeError, OSError, OverflowError, MemoryError, ImportError, RuntimeError) as error:
        fail(str(error), 2 if getattr(error, "of_argument", False) else 1, getattr(error, "on_all_ranks", False))
