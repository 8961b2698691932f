"""An exception at any line of HookState's reduction on one rank is raised on all; see tests/torch for others."""

import os
import sys

import pytest

torch = pytest.importorskip("torch")

from runs import HOOK, Run, alike, net, plain_sgd, train  # noqa: E402

from sparsecoll.torch import ddp  # noqa: E402
from sparsecoll.torch.compressors import TopK  # noqa: E402
from sparsecoll.transport import as_transport  # noqa: E402
from sparsecoll.transport.progress import in_background  # noqa: E402

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("process_group")]
TRIED = None if os.environ.get("SPARSECOLL_FUZZ") else 10  # lines
STEP = 2
HOOKS = "HookState."
REPORTS = ("HookState.reduce",)  # which reports exceptions


class Injected(Exception):
    """Raised on purpose."""


def tracer(seen, target):
    """A trace function that notes lines of HookState, and raises at one of them."""

    def line(frame, event, argument):
        here = frame.f_code.co_qualname, frame.f_lineno
        if event == "line" and here not in seen:
            seen[here] = None
            if here == target:
                sys.settrace(None)
                raise Injected("here")
        return line

    def call(frame, event, argument):
        name = frame.f_code.co_qualname
        ours = frame.f_code.co_filename == ddp.__file__ and name.startswith(HOOKS) and name not in REPORTS
        return line if ours else None

    return call


def training(comm, target):
    """Return (lines seen on the last rank, what was raised in which step, the parameters at the end, or None)."""
    run, transport = Run(HOOK, comm, net, plain_sgd, TopK(0.1, algo="allgather")), as_transport(comm)
    seen, raised, step = {}, None, 0
    while step < STEP + 2:
        tracing = step == STEP and comm.rank == run.last and not raised
        if tracing:
            in_background(transport, lambda: sys.settrace(tracer(seen, target))).result()
        try:
            train(run, [step])
        except RuntimeError as error:
            assert raised is None, error
            raised = str(error), step
            if max(comm.allgather(step)) > STEP:  # the others have taken the step that the last rank has not
                return list(seen), raised, None
            run.state.discard()
            continue
        finally:
            if tracing:
                in_background(transport, lambda: sys.settrace(None)).result()
        step += 1
    assert alike(comm, run.values())
    return list(seen), raised, run.values()


def test_an_exception_at_any_line_of_the_hook_is_raised_on_all_ranks(comm):
    seen, nothing, whole = training(comm, None)
    lines = comm.allgather(seen)[-1]
    assert nothing is None and len(lines) > 20
    for target in lines if TRIED is None else lines[:: -(-len(lines) // TRIED)]:
        _, raised, values = training(comm, target)
        texts = comm.allgather(None if raised is None else raised[0])
        assert set(texts) == {f"rank {comm.size - 1} failed: Injected: here"}, (target, texts)
        assert values is None or all(torch.equal(t, whole[name]) for name, t in values.items()), target
