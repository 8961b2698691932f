"""Shared cases on the path; under mpirun one rank reports and any failure ends the whole run at once."""

import importlib.util
import io
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent / "perf"))  # for the papers' formulas
torch = importlib.util.find_spec("torch")
if torch is None or torch.origin is None:  # then `import torch` would find the folder of its tests
    sys.modules["torch"] = None

collect_ignore = [
    "fault_programs.py",
    "corrupt_messages.py",
    "gpu/run.py",
]  # programs, not tests


def _world():
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.hookimpl(trylast=True)  # after the terminal reporter has registered itself
def pytest_configure(config):
    if config.getoption("--with-mpi", default=False) and _world().rank > 0:
        config.pluginmanager.getplugin("terminalreporter")._tw._file = io.StringIO()


def pytest_collection_modifyitems(config, items):
    """With --with-mpi only the MPI tests run: the others would run the same on every rank."""
    if config.getoption("--with-mpi", default=False):
        others = [item for item in items if item.get_closest_marker("mpi") is None]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item.get_closest_marker("mpi") is not None]


def pytest_runtest_logreport(report):
    """A rank that fails would leave the others waiting: show why, and abort."""
    if report.failed and any(name in os.environ for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK")):
        world = _world()
        if world.size > 1:
            print(f"rank {world.rank}: {report.nodeid}\n{report.longreprtext}", file=sys.stderr, flush=True)
            world.Abort(1)
