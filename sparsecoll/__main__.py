"""`python -m sparsecoll COMMAND`. Under mpirun where a command measures a communicator."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from sparsecoll.transport import default_comm
from sparsecoll.tune import FILE, tune


def _tune(options: argparse.Namespace) -> None:
    """Measure the communicator of all ranks and save what `auto` decides by."""
    comm = default_comm()
    tuning = tune(comm)
    if comm.rank == 0:
        for name, seconds in asdict(tuning).items():
            sys.stdout.write(f"{name:<9} {seconds * 1e9:12.3f} ns\n")
        if options.save:
            tuning.save(options.save)
            sys.stdout.write(f"saved; {FILE}={options.save} makes algo='auto' use it\n")


def main(arguments: list[str] | None = None) -> None:
    """Parse and run a command."""
    parser = argparse.ArgumentParser(prog="python -m sparsecoll", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("tune", help=_tune.__doc__, description=_tune.__doc__)
    command.add_argument("--save", type=Path, metavar="FILE", help="write the measurement as JSON")
    command.set_defaults(run=_tune)
    options = parser.parse_args(arguments)
    options.run(options)


if __name__ == "__main__":
    main()
