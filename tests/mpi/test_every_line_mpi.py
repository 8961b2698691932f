"""An exception at any line of HookState's reduction on one rank is raised on all; see tests/torch for others."""

import contextlib
import os

import pytest

torch = pytest.importorskip("torch")

from lines import Lines, spread, traced_in_background  # noqa: E402
from runs import HOOK, Run, alike, net, plain_sgd, train  # noqa: E402

from sparsecoll.torch import ddp  # noqa: E402
from sparsecoll.torch.compressors import TopKCompressor  # noqa: E402
from sparsecoll.transport import as_transport  # noqa: E402

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("process_group")]
TRIED = None if os.environ.get("SPARSECOLL_FUZZ") else 10  # lines
STEP = 2
HOOKS = "HookState."
REPORTS = ("HookState.reduce",)  # which reports exceptions


def wanted(code):
    name = code.co_qualname
    return code.co_filename == ddp.__file__ and name.startswith(HOOKS) and name not in REPORTS


def training(comm, target):
    """Return (lines seen on the last rank, what was raised in which step, the parameters at the end, or None)."""
    run, transport = Run(HOOK, comm, net, plain_sgd, TopKCompressor(0.1, algo="allgather")), as_transport(comm)
    lines, raised, step = Lines(wanted, target), None, 0
    while step < STEP + 2:
        tracing = step == STEP and comm.rank == run.last and not raised
        try:
            with traced_in_background(transport, lines) if tracing else contextlib.nullcontext():
                train(run, [step])
        except RuntimeError as error:
            assert raised is None, error
            raised = str(error), step
            if max(comm.allgather(step)) > STEP:  # the others have taken the step that the last rank has not
                return list(lines.seen), raised, None
            run.state.discard()
            continue
        step += 1
    assert alike(comm, run.values())
    return list(lines.seen), raised, run.values()


def test_an_exception_at_any_line_of_the_hook_is_raised_on_all_ranks(comm):
    seen, nothing, whole = training(comm, None)
    lines = comm.allgather(seen)[-1]
    assert nothing is None and len(lines) > 20
    for target in spread(lines, TRIED):
        _, raised, values = training(comm, target)
        texts = comm.allgather(None if raised is None else raised[0])
        assert set(texts) == {f"rank {comm.size - 1} failed: Injected: here"}, (target, texts)
        assert values is None or all(torch.equal(t, whole[name]) for name, t in values.items()), target
