"""Shared cases on the path; under mpirun and torchrun one rank reports and any failure ends the whole run at once."""

import importlib.util
import io
import os
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent / "perf"))  # for the papers' formulas
torch = importlib.util.find_spec("torch")
if torch is None or torch.origin is None:  # then `import torch` would find the folder of its tests
    torch = sys.modules["torch"] = None

collect_ignore = [
    "fault_programs.py",
    "exit_programs.py",
    "replaced_ranks.py",
    "corrupt_messages.py",
    "soak.py",
    "gpu/run.py",
    "typed/right.py",
    "typed/wrong.py",
]  # programs, not tests


TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ


def _world():
    from mpi4py import MPI

    return MPI.COMM_WORLD


def _in_parallel(config):
    return TORCHRUN or config.getoption("--with-mpi", default=False)


@pytest.hookimpl(trylast=True)  # after the terminal reporter and pytest-mpi have registered themselves
def pytest_configure(config):
    plugins = config.pluginmanager
    if TORCHRUN:  # pytest-mpi would skip what is marked "mpi"
        for plugin in [plugin for plugin in plugins.get_plugins() if type(plugin).__name__ == "MPIPlugin"]:
            plugins.unregister(plugin)
    if (file := config.getoption("--passed", default=None)) and "PYTEST_XDIST_WORKER" not in os.environ:
        plugins.register(_Passed(file))
    if _in_parallel(config) and (int(os.environ["RANK"]) if TORCHRUN else _world().rank) > 0:
        plugins.getplugin("terminalreporter")._tw._file = io.StringIO()


def pytest_collection_modifyitems(config, items):
    """With --with-mpi and under torchrun only the MPI tests run: the others would run the same on every rank."""
    file = config.getoption("--passed", default=None)
    passed = {*file.read_text().splitlines()} if file and file.exists() else ()
    if _in_parallel(config) or passed:
        parallel = _in_parallel(config)
        runs = [item.nodeid not in passed and (not parallel or bool(item.get_closest_marker("mpi"))) for item in items]
        config.hook.pytest_deselected(items=[item for item, wanted in zip(items, runs, strict=True) if not wanted])
        items[:] = [item for item, wanted in zip(items, runs, strict=True) if wanted]


def pytest_ignore_collect(collection_path):
    """What imports torch at its top, or helpers that do, cannot be collected where there is none."""
    if torch is None and collection_path.suffix == ".py":
        needs = re.search(r"^(import|from) (torch|sparsecoll\.torch|runs|play)\b", collection_path.read_text(), re.M)
        return True if needs else None
    return None


def pytest_make_parametrize_id(config, val, argname):
    """A failure names its case, also a tuple, a dict, an object or a lambda, by what it prints or uses."""
    if getattr(val, "__name__", "") == "<lambda>":
        code = val.__code__
        return " ".join(str(one) for one in (*code.co_names, *code.co_consts) if isinstance(one, (str, int, float)))[
            :60
        ]
    if hasattr(val, "__name__") or isinstance(val, (str, bytes, int, float, complex, set, frozenset, type(None))):
        return None  # pytest's own
    text = f"{val.dtype}{val.shape}" if hasattr(val, "shape") else re.sub(r"\s+", " ", repr(val))
    return None if " at 0x" in text else text[:60]


class _Passed:
    """Writes down the names of the tests that pass, with `--passed`."""

    def __init__(self, file):
        self.file = file

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            with self.file.open("a") as file:
                file.write(f"{report.nodeid}\n")


def pytest_runtest_logreport(report):
    """A rank that fails would leave the others waiting: show why, and abort."""
    if report.failed and TORCHRUN:
        print(f"rank {os.environ['RANK']}: {report.nodeid}\n{report.longreprtext}", file=sys.stderr, flush=True)
        os._exit(1)  # torchrun ends the others
    if report.failed and any(name in os.environ for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK")):
        world = _world()
        if world.size > 1:
            print(f"rank {world.rank}: {report.nodeid}\n{report.longreprtext}", file=sys.stderr, flush=True)
            world.Abort(1)
