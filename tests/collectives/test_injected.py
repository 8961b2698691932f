"""An exception at any line of a collective call on one rank is raised on all ranks, but for the binding of arguments.

SPARSECOLL_FUZZ=1 injects one at every line (`make fuzz`); otherwise at some of them, spread evenly.
"""

import contextlib
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from lines import Injected, Lines, spread

import sparsecoll
from sparsecoll import CommunicationError, SparseVector, simulate

P, CULPRIT = 3, 1
TRIED = None if os.environ.get("SPARSECOLL_FUZZ") else 25  # lines of a call
HOME = Path(sparsecoll.__file__).parent
ROOMS = ("collectives", "algorithms", "select", "formats", "vector")
BINDING = {  # what comes before the call begins, with the public functions themselves
    "blocking", "blocking.<locals>.make", "nonblocking.<locals>.start",
    "nonblocking.<locals>.start.<locals>.<lambda>", "Plan.__call__",
    "Plan.__call__.<locals>.<lambda>", "Plan._result", "CallOptions.moving",
}  # fmt: skip


def wanted(code):
    path = Path(code.co_filename)
    return HOME in path.parents and path.relative_to(HOME).parts[0] in ROOMS


def vector(comm, length=40):
    return SparseVector([comm.rank, comm.rank + 3, 20], np.array([1.0, 2.0, comm.rank]), length)


def planned(comm, x):
    return sparsecoll.allreduce_init(comm, x)(x)


CALLS = {  # name -> x of a rank, and the call
    "allreduce": (vector, sparsecoll.allreduce),
    "allreduce of the top k": (
        lambda comm: np.arange(40.0),
        lambda comm, x: sparsecoll.allreduce(comm, x, "oktopk", k=4, op="mean"),
    ),
    "allreduce of a dict": (lambda comm: {"a": 1, str(comm.rank): 2}, sparsecoll.allreduce),
    "allgather": (vector, lambda comm, x: sparsecoll.allgather(comm, x, value_dtype="float32")),
    "alltoallv": (lambda comm: {(comm.rank + 1) % P: vector(comm)}, sparsecoll.alltoallv),
    "reduce": (vector, lambda comm, x: sparsecoll.reduce(comm, x, 1, op="max")),
    "reduce_scatter": (vector, sparsecoll.reduce_scatter),
    "bcast": (
        lambda comm: vector(comm) if comm.rank == CULPRIT else None,
        lambda comm, x: sparsecoll.bcast(comm, x, CULPRIT),
    ),
    "gather": (vector, lambda comm, x: sparsecoll.gather(comm, x, CULPRIT)),
    "iallreduce": (vector, lambda comm, x: sparsecoll.iallreduce(comm, x).wait()),
    "allreduce_init": (vector, planned),
}


def program(name, target, known, comm):
    """Return (lines seen, what was raised); a call in which all ranks wait for all others comes after the first one."""
    make, call = CALLS[name]
    x = make(comm)
    if known:  # the ranks have agreed on the arguments
        call(comm, x)
    watch = Lines(wanted, target) if comm.rank == CULPRIT else contextlib.nullcontext()
    try:
        with watch:
            call(comm, x)
        sparsecoll.allreduce(comm, {0: 1})
    except CommunicationError as error:
        assert sparsecoll.allreduce(comm, {0: 1}) == {0: P}
        return list(getattr(watch, "seen", ())), str(error)
    except Injected:  # before the call had begun
        return [], None
    return list(getattr(watch, "seen", ())), None


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_an_exception_at_any_line_of_a_call_is_raised_on_all_ranks(name, known):
    lines = simulate(P, partial(program, name, None, known)).results[CULPRIT][0]
    binding = BINDING | {name.partition(" ")[0].removeprefix("i")}
    inside = [line for line in lines if line[0] not in binding]
    assert len(inside) > 25
    problems = []
    for target in spread(inside, TRIED):
        try:
            raised = {text for _, text in simulate(P, partial(program, name, target, known)).results}
        except Exception as error:
            raised = repr(error)
        if raised != {f"rank {CULPRIT} failed: Injected: here"}:
            problems.append((target, raised))
    assert not problems, "\n".join(map(str, problems))
