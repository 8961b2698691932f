"""Shared cases on the path; under mpirun one rank reports and any failure ends the whole run at once."""

import io
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def _world():
    from mpi4py import MPI

    return MPI.COMM_WORLD


def pytest_configure(config):
    if config.getoption("--with-mpi", default=False) and _world().rank > 0:
        config.pluginmanager.getplugin("terminalreporter")._tw._file = io.StringIO()


def pytest_runtest_logreport(report):
    """A rank that fails would leave the others waiting: show why, and abort."""
    if report.failed and any(name in os.environ for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK")):
        world = _world()
        if world.size > 1:
            print(f"rank {world.rank}: {report.nodeid}\n{report.longreprtext}", file=sys.stderr, flush=True)
            world.Abort(1)
