"""What a notebook shows of results, and messages that name what the caller knows."""

from collections import Counter

import numpy as np
import pytest

import sparsecoll
from sparsecoll import SparseVector, simulate


def test_one_line_or_a_table():
    def program(comm):
        x = SparseVector([comm.rank], np.ones(1), 9)
        request = sparsecoll.iallreduce(comm, x)
        request.wait()
        plan = sparsecoll.allreduce_init(comm, x)
        shown = [repr(request), repr(plan)]
        started = plan.start(x)
        started.wait()
        shown.append(repr(plan))
        plan.wait()
        plan.free()
        return [*shown, repr(plan)], sparsecoll.traffic(comm)

    run = simulate(3, program)
    shown, traffic = run.results[0]
    assert shown == ["Request(done)", "Plan(not started)", "Plan(Request(done))", "Plan(freed)"]
    assert repr(traffic) == str(traffic) and repr(traffic).splitlines()[0].split() == [
        "phase",
        "sent",
        "received",
        "messages",
        "seconds",
    ]
    few = simulate(1000, lambda comm: comm.rank)
    assert repr(few) == "Simulation(ranks=1000, seconds=0, results=[0, ...])"
    assert repr(simulate(1, lambda comm: comm.rank)) == "Simulation(ranks=1, seconds=0, results=[0])"


@pytest.mark.parametrize(
    "x, options, message",
    [
        ({"b": 1.0, "a": float("nan")}, {}, "got NaN or infinity, the first at key 'a'"),
        ({"b": 1.0, "a": float("inf")}, {"op": "max"}, "got NaN or infinity, the first at key 'a'"),
        ({b"b": 1.0, b"a": float("nan")}, {"algo": "dense"}, "got NaN or infinity, the first at key b'a'"),
        ({7: float("nan"), 3: 1.0}, {}, "got NaN or infinity, the first at index 7"),
        (Counter(a=1), {"op": "mean"}, "op: expected 'sum' for int64, got 'mean': use floats, or divide the sum by"),
        (object(), {}, "x: expected a SparseVector, an array, .* or a mapping, got builtins.object"),
    ],
)
def test_messages(x, options, message):
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        simulate(2, lambda comm: sparsecoll.allreduce(comm, x, **options))
    assert len(str(caught.value)) < 200
