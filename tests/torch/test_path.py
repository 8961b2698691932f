"""The files of the adapter that a training step enters, once the first steps have been taken."""

import ast
import sys
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from launching import python  # noqa: E402
from nets import batch, loss_of, net  # noqa: E402

import sparsecoll.torch  # noqa: E402
from sparsecoll import simulate  # noqa: E402
from sparsecoll.torch import DistributedOptimizer, SparseSGD  # noqa: E402

ADAPTER = Path(sparsecoll.torch.__file__).parent


def wrapped(comm, model, compressor=None):
    return DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1, 0.9), model, comm, compressor, dense_below=0)


MAKE = {
    "DistributedOptimizer": wrapped,
    "topk": lambda comm, model: wrapped(comm, model, "topk"),
    "SparseSGD": lambda comm, model: SparseSGD(model.parameters(), 0.1, 0.9, comm=comm),
}


@pytest.fixture(scope="module")
def entered_files():
    """Of each way, found in another process: a DDP hook, once made, has hooks in the steps of all optimizers."""
    path = [str(ADAPTER.parents[1]), *sys.path]
    code = f"import sys; sys.path[:0] = {path}; from test_path import MAKE, entered; print([*map(entered, MAKE)])"
    done = python("-c", code, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    return dict(zip(MAKE, ast.literal_eval(done.stdout), strict=True))


@pytest.mark.parametrize(("name", "most"), [("topk", 15), ("SparseSGD", 15), ("DistributedOptimizer", 17)])
def test_a_step_enters_few_files(name, most, entered_files):
    """The default of DistributedOptimizer has two more than "topk": a density that changes, and the options of SGD."""
    files = entered_files[name]
    assert "reduction/buckets.py" in files and len(files) <= most, "\n".join(files)


def entered(name):
    """The files that the fourth step enters, on two virtual ranks."""
    files, recording = set(), threading.Event()

    def trace(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if recording.is_set() and path.is_relative_to(ADAPTER):
            files.add(str(path.relative_to(ADAPTER)))

    def program(comm):
        sys.settrace(trace)
        model = net()
        optimizer = MAKE[name](comm, model)
        for step in range(4):
            sparsecoll.allreduce(comm, {0: 1.0})
            if step == 3:
                recording.set()
            optimizer.zero_grad()
            loss_of(model, batch(comm.rank, step)).backward()
            optimizer.step()
        sparsecoll.allreduce(comm, {0: 1.0})
        recording.clear()

    threading.settrace(trace)
    simulate(2, program)
    return sorted(files)
