"""Processes and jobs, started as users start them."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def run(*command, variables=None, **options):
    """A command that has ended, with what it printed; it has these environment variables, too."""
    options = {"capture_output": True, "text": True, "timeout": 600, "stdin": subprocess.DEVNULL, **options}
    return subprocess.run(list(map(str, command)), env=os.environ | (variables or {}), **options)


def python(*arguments, **options):
    """As `run`, of this Python."""
    return run(sys.executable, *arguments, **options)


MPIRUN = shutil.which("mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
if importlib.util.find_spec("mpi4py") is None:
    MPIRUN = None
OPEN_MPI = MPIRUN is not None and "Open MPI" in run(MPIRUN, "--version").stdout


def mpirun(size, *options):
    """How a command begins that starts Python on so many ranks."""
    if MPIRUN is None:
        pytest.skip("no mpirun")
    flags = ["--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])] if OPEN_MPI else []
    return [MPIRUN, *flags, *options, "-n", size, sys.executable]


def torchrun(size, *options):
    """Likewise, on process groups."""
    pytest.importorskip("torch")
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", size, *options]
