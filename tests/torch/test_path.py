"""The files of the adapter that a training step enters, once the first steps have been taken."""

import gc
import sys
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from nets import batch, loss_of, net  # noqa: E402

import sparsecoll.torch  # noqa: E402
from sparsecoll import simulate  # noqa: E402
from sparsecoll.torch import DistributedOptimizer, SparseSGD  # noqa: E402

ADAPTER = Path(sparsecoll.torch.__file__).parent
MAKE = {
    "DistributedOptimizer": lambda comm, model: DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model, comm, "topk", dense_below=0
    ),
    "SparseSGD": lambda comm, model: SparseSGD(model.parameters(), 0.1, 0.9, comm=comm),
}


@pytest.mark.parametrize(("name", "most"), [("DistributedOptimizer", 15), ("SparseSGD", 16)])
def test_a_step_enters_few_files(name, most):
    entered, recording, before = set(), threading.Event(), sys.gettrace()

    def trace(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if recording.is_set() and path.is_relative_to(ADAPTER):
            entered.add(str(path.relative_to(ADAPTER)))

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

    gc.collect()
    gc.disable()  # finalizers of what other tests have left behind are not on the path
    threading.settrace(trace)
    try:
        simulate(2, program)
    finally:
        threading.settrace(None)
        sys.settrace(before)
        gc.enable()
    assert "reduction/buckets.py" in entered and len(entered) <= most, sorted(entered)
