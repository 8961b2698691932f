"""An exception at any line of what reduces a sharded model's gradients on one rank is raised on all, under torchrun.

SPARSECOLL_FUZZ=1 injects one at every line; otherwise at some of them, spread evenly.
"""

import contextlib
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from lines import Lines, spread, traced_in_background  # noqa: E402
from sharded_models import (  # noqa: E402
    MIDDLE,
    TORCHRUN,
    Chain as Model,
    W,
    attached,
    batch,
    whole,
)

import sparsecoll.torch  # noqa: E402
from sparsecoll.torch.compressors import TopKCompressor  # noqa: E402

pytestmark = [pytest.mark.mpi, TORCHRUN, pytest.mark.usefixtures("process_group")]
HOME = Path(sparsecoll.torch.__file__).parent
TRIED = None if os.environ.get("SPARSECOLL_FUZZ") else 8  # lines of a case
STEP = 2
REPORTING = ("calls.py", "failures.py")  # the code that reports exceptions
BINDING = ("ShardedReductions.state_dict", "ShardedReductions.load_state_dict")  # before a call begins
REPEATED = "ShardedReductions._accept_or_drop"  # if it raises, since all ranks have succeeded before
TORCHS = ("ReduceScatter.", "at_end_of_backward.<", "ShardedReductions._ask_for_end.<")  # called by torch itself
TORCHS += ("Group.lay_out_all.<locals>.<lambda>",)


def wanted(code):
    path = Path(code.co_filename)
    rest = code.co_qualname in BINDING or code.co_qualname.startswith(TORCHS)
    return HOME in path.parents and path.name not in REPORTING and not rest


def training(comm, nodes, target, work):
    """Train; return (lines seen on the last rank, what was raised in which step, the parameters at the end)."""
    model, reductions = attached(nodes, TopKCompressor(0.1), Model())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    lines, raised, step = Lines(wanted, target), None, 0
    while step < STEP + 2:
        tracing = step == STEP and comm.rank == W - 1 and raised is None
        try:
            with contextlib.ExitStack() as stack:
                if tracing:
                    stack.enter_context(traced_in_background(reductions._transport, lines))
                    stack.enter_context(lines)
                work(model, reductions, comm.rank, step)
        except Exception as error:
            assert raised is None, (target, raised, error)
            raised = str(error), step
            optimizer.zero_grad()
            model.reset_iter_state()
            reductions.discard()
            continue
        if work is not backward:
            model(batch(comm.rank, step)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    return list(lines.seen), raised, whole(model.parameters())


def backward(model, reductions, rank, step):
    model(batch(rank, step)[0]).backward()


def save_and_load(model, reductions, rank, step):
    if step == STEP:
        reductions.load_state_dict(reductions.state_dict())


def checked(comm, nodes, work):
    seen, nothing, expected = training(comm, nodes, None, work)
    lines = comm.allgather(seen)[-1]
    assert nothing is None and len(lines) > 20
    repeated = next((i for i, (name, _) in enumerate(lines) if name == REPEATED), len(lines))
    for target in spread(lines, TRIED):  # all ranks have succeeded before what is repeated if it raises
        _, raised, values = training(comm, nodes, target, work)
        told = comm.allgather(raised)
        everywhere = all(one is not None and "Injected: here" in one[0] and one[1] == STEP for one in told)
        nowhere = lines.index(target) >= repeated and told == [None] * W
        assert everywhere or nowhere, (target, told)
        assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True)), target


@pytest.mark.parametrize("nodes", [None, MIDDLE])
def test_an_exception_at_any_line_of_a_reduction_is_raised_on_all_ranks(comm, nodes):
    checked(comm, nodes, backward)


@pytest.mark.parametrize("nodes", [None, MIDDLE])
def test_an_exception_at_any_line_while_state_is_saved_and_loaded_is_raised_on_all_ranks(comm, nodes):
    checked(comm, nodes, save_and_load)
