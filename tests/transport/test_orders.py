"""Every order in which messages may arrive, with one failure anywhere: the right result, or an error on all ranks.

SPARSECOLL_ORDERS is the number of orders of one failure, in all calls on 2 and 3 ranks (`make fuzz`); without it, a
part of the calls is tested. With -rP, each test prints what it has counted: searches that have more orders are "cut".
A failure prints the choices that lead to it: `Search.replay` runs them again.
"""

import ast
import functools
import itertools
import os
import random
import re
import threading
from concurrent.futures import Future

import numpy as np
import pytest
from cases import case
from failing import K, algorithm
from mismatched import CALLS, NAMED, PAIRS, mismatched, ordinary, rows, vector
from oracles import oracle
from orders import Search, orders_of

import sparsecoll
from sparsecoll import ALGORITHMS, CommunicationError, RowSparse, SparseVector, simulate
from sparsecoll.algorithms import ROW_ALGORITHMS
from sparsecoll.transport.virtual_ranks import SimTransport, Step

ALL = "SPARSECOLL_ORDERS" in os.environ
LIMIT = int(os.environ.get("SPARSECOLL_ORDERS", "40"))  # orders of one failure
PAIRED = 100 if ALL else 2  # pairs of different calls
CAUSES = (
    "no answer within the timeout",
    "failed: Fault: injected",
    "lost rank",
    "was interrupted on rank",
    "is gone",
)
FAILURES = ("raise", "raise, late", "interrupt", "die", "stop")
OTHERS = {
    name: CALLS[name] for name in CALLS if name not in ALGORITHMS and ", other" not in name and name != "unchecked"
}
OTHERS["allgather of vectors"] = CALLS["allgather"]
OTHERS |= {
    f"rows, {name}": lambda comm, name=name: sparsecoll.allreduce(comm, rows(comm), name) for name in ROW_ALGORITHMS
}
TESTED = {
    **{
        name: lambda comm, name=name: sparsecoll.allreduce(comm, inputs(comm), algorithm(name), k=K)
        for name in ALGORITHMS
    },
    **OTHERS,
}
SHORT = ("sparcml", "reduce to 0")  # tested in all ways, also if not all calls are
RANKS = [2, pytest.param(3, marks=pytest.mark.slow)]


@functools.cache
def input_of(rank, P):
    return case("random", rank, P)


def inputs(comm):
    return input_of(comm.rank, comm.size)


def bits(value):
    """What a call has returned, as bytes."""
    if isinstance(value, (SparseVector, RowSparse)):
        return value.indices.tobytes(), value.values.tobytes(), str(value.dtype)
    if isinstance(value, (list, tuple)):
        return [bits(one) for one in value]
    if isinstance(value, dict):
        return {key: bits(one) for key, one in value.items()}
    return value.tobytes() if isinstance(value, np.ndarray) else value


def program(comm, call, kind=None):
    """Two calls, the second one of which waits for all ranks, with a failure in the first one; then an ordinary one.

    Returns:
        Whether the failure has happened here, the result of the first call, what the two have raised, and the result of
        the last call or what it has raised.
    """
    rank, value, said = comm.transport, None, None
    rank.armed = True
    rank.limited = kind in ("timeout", "stop")
    try:
        value = bits(call(comm))
        happened, rank.armed = not rank.armed, False
        sparsecoll.alltoall(comm, [vector(comm)] * comm.size)
    except (KeyboardInterrupt, Exception) as error:
        happened, said = rank.fault is not None, f"{type(error).__name__}: {error}"
    rank.armed, rank.limited = False, kind == "stop"
    try:
        last = ordinary(comm)
    except CommunicationError as error:
        last = str(error)
    return happened, value, said, last


def verdict(kind, culprit, expected):
    """Return a function that raises if a run has ended in another way than it may."""

    def check(results, steps):
        alive = {rank: result for rank, result in enumerate(results) if result is not None}
        assert len(alive) == len(results) - (kind in ("die", "stop") and results[culprit] is None)
        for rank, (_, value, _, _) in alive.items():
            assert value is None or value == expected[rank], "a wrong result"
        said, last = ({rank: result[i] for rank, result in alive.items()} for i in (2, 3))
        failed = kind in FAILURES and (culprit not in alive or alive[culprit][0])
        late = any(step.what == "timeout" for step in steps)
        if kind == "timeout":
            failed = late
        if not failed:
            assert set(said.values()) == {None} and all(y == [len(results)] for y in last.values()), (said, last)
            assert all(value == expected[rank] for rank, (_, value, _, _) in alive.items()), "a wrong result"
        elif kind in ("raise", "raise, late") and not late:
            own = said.pop(culprit)
            assert own == f"CommunicationError: rank {culprit} failed: Fault: injected", own
            assert set(said.values()) <= {own}, said
            assert all(y == [len(results)] for y in last.values()), last
        else:
            assert all(isinstance(y, str) for y in last.values()), last
            texts = [*last.values(), *(text for text in said.values() if text is not None)]
            if kind == "interrupt":
                texts.remove("KeyboardInterrupt: ")
            assert all(any(cause in text for cause in CAUSES) for text in texts), texts
            assert all(text.startswith("CommunicationError") for text in texts[len(last) :]), texts

    return check


def expected_of(name, P):
    """What a call returns on each rank: as its oracle says, or in the simulator's own order."""
    results = simulate(P, lambda comm: bits(TESTED[name](comm))).results
    if name in ALGORITHMS:
        wanted = oracle([case("random", r, P) for r in range(P)], "oktopk" if name == "hierarchical" else name, K)
        y = simulate(P, lambda comm: TESTED[name](comm)).results[0]
        np.testing.assert_array_equal(y.to_dense(), wanted)
        assert all(bits(y) == result for result in results)
    return results


def searches(name, P, kind=None, **bounds):
    """Yield the search of each failure of a kind; of the call without a failure if `kind` is None."""
    expected, call = expected_of(name, P), TESTED[name]
    for culprit in range(P if kind in FAILURES else 1):
        for nth in itertools.count(1):
            fault = (kind, culprit, nth) if kind in FAILURES else None
            check, waits = verdict(kind, culprit, expected), kind == "stop"
            search = Search(P, lambda comm: program(comm, call, kind), check, fault, give_up=waits, **bounds).run()
            happened = search.last[culprit] is None or search.last[culprit][0]
            if happened or kind not in FAILURES:
                yield search
            if not happened or kind not in FAILURES:
                break


def count(what, done):
    """Print what the searches have counted."""
    done = list(done)
    histories, states = (sum(len(getattr(search, name)) for search in done) for name in ("histories", "states"))
    cut, runs = sum(not search.complete for search in done), sum(search.runs for search in done)
    print(f"{what}: {len(done)} searches ({cut} cut), {runs} runs, {states} states, {histories} histories")
    return done


@pytest.mark.parametrize("P", [2, 3])
@pytest.mark.parametrize("name", TESTED)
def test_every_order_of_a_call_gives_the_right_result(name, P):
    """All orders of all steps are one history: messages match in one way."""
    (search,) = count(f"{name}, P={P}", searches(name, P, every_step=ALL or P == 2 or name in SHORT))
    assert search.complete and len(search.histories) == 1
    print(f"{orders_of(search.first, P):.1e} orders")


@pytest.mark.parametrize("P", RANKS)
@pytest.mark.parametrize("name", TESTED if ALL else SHORT)
def test_a_rank_that_is_late_is_no_error(name, P):
    """At any time each of them may look whether it waits for ever."""
    (search,) = count(f"{name}, P={P}, late", searches(name, P, stalls=1, limit=2 * LIMIT))
    assert len(search.histories) == 1


@pytest.mark.parametrize("P", RANKS)
@pytest.mark.parametrize("kind", FAILURES)
@pytest.mark.parametrize("name", TESTED if ALL else SHORT)
def test_one_failure_anywhere_is_an_error_on_all_ranks(name, kind, P):
    late = int(kind == "raise, late")
    limit = LIMIT if ALL or P == 2 else 5
    count(f"{name}, P={P}, {kind}", searches(name, P, kind, timeouts=late, limit=limit))


@pytest.mark.parametrize("P", RANKS)
@pytest.mark.parametrize("name", TESTED if ALL else SHORT)
def test_a_timeout_at_any_wait_is_an_error_on_all_ranks(name, P):
    count(f"{name}, P={P}, timeout", searches(name, P, "timeout", timeouts=4 - P, limit=2 * LIMIT))


@pytest.mark.parametrize("peeks", [False, True])
@pytest.mark.parametrize("P", RANKS)
def test_different_calls_are_the_same_error_in_every_order(P, peeks):
    """Also if ranks look early whether they wait for ever."""

    def check(results, steps):
        texts = {text for text, _ in results}
        assert len(texts) == 1 and NAMED.match(str(results[0][0])), texts
        assert all(value == [P] for _, value in results), results

    done = []
    for own, others in random.Random(P).sample(PAIRS, PAIRED):
        for known in ("both", "none"):
            case = P - 1, own, others, known
            search = Search(P, functools.partial(mismatched_as, case), check, stalls=1, peeks=peeks, limit=LIMIT)
            done.append(search.run())
    count(f"different calls, P={P}", done)


def mismatched_as(case, comm):
    return mismatched(comm, *case)


class Late(Future):
    """Of a nonblocking call that is made when it is waited for, or before the next call."""

    def __init__(self, worker):
        super().__init__()
        self._worker = worker

    def result(self, timeout=None):
        self._worker.catch_up()
        return super().result(timeout)


class LateWorker:
    """Makes nonblocking calls in their order, each at once or later, as the schedule says."""

    def __init__(self, transport):
        self._transport, self._queue, self.thread = transport, [], None
        transport.threads, transport.worker = True, self

    def submit(self, call):
        me, future = self._transport.members[self._transport.rank], Late(self)
        self._queue.append((call, future))
        ways = [Step(me, "now"), Step(me, "later")]
        if self._transport._world.wait(me, (), lambda: ways).what == "now":
            self.catch_up()
        return future

    def in_order(self, call, transport):
        self.catch_up()
        return call()

    def catch_up(self):
        self.thread = threading.get_ident()
        try:
            while self._queue:
                call, future = self._queue.pop(0)
                try:
                    future.set_result(call())
                except Exception as error:
                    future.set_exception(error)
        finally:
            self.thread = None


@pytest.mark.parametrize("P", RANKS)
def test_nonblocking_calls_are_made_in_their_order_however_late(P):
    def calls(comm, late=True):
        if late:
            LateWorker(comm.transport)
        x = vector(comm)
        first, second = sparsecoll.iallreduce(comm, x, "sparcml"), sparsecoll.iallreduce(comm, x * 2, "allgather")
        total = second.wait() if comm.rank else None
        between = sparsecoll.reduce_scatter(comm, x)
        third = sparsecoll.iallreduce(comm, x * 3, "sparcml")
        return [bits(y) for y in (first.wait(), second.wait() if total is None else total, between, third.wait())]

    expected = simulate(P, lambda comm: calls(comm, late=False)).results

    def check(results, steps):
        assert results == expected

    count(f"nonblocking, P={P}", [Search(P, calls, check, limit=2 * LIMIT).run()])


@pytest.mark.parametrize(
    ("name", "kind", "bounds"),
    [("sparcml", "raise", {}), ("gtopk", "timeout", {"timeouts": 1}), ("reduce to 0", "die", {})],
)
def test_steps_that_commute_are_no_choices(name, kind, bounds):
    """The histories are those that all orders of all steps have."""
    few, all_of_them = (list(searches(name, 2, kind, every_step=every, **bounds)) for every in (False, True))
    assert [s.histories.keys() for s in few] == [s.histories.keys() for s in all_of_them]
    assert sum(s.runs for s in few) < sum(s.runs for s in all_of_them)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [("interrupt", 0, 1), *([("die", 2, 3), ("raise", 0, 3)] if ALL else [])])
def test_steps_that_commute_are_no_choices_on_three_ranks(fault):
    """What the ranks return is what they return in some order of all steps; reports are read in any order."""
    check = verdict(fault[0], fault[1], expected_of("reduce to 0", 3))
    few, every = (
        Search(3, lambda comm: program(comm, TESTED["reduce to 0"]), check, fault, every_step=every).run()
        for every in (False, True)
    )
    assert {*few.histories.values()} == {*every.histories.values()}
    assert fault[0] == "raise" or few.histories.keys() == every.histories.keys()


def test_a_program_whose_result_depends_on_the_order_is_found_and_replays():
    def racing(comm):
        if len(seen) == 2:
            seen.clear()
        seen.append(comm.rank)  # both ranks have it
        place = len(seen)
        comm.transport.isend(1 - comm.rank, np.full(1, place, np.uint8))
        comm.transport.recv(1 - comm.rank)
        return place

    def check(results, steps):
        assert results == [1, 2]

    seen = []
    search = Search(2, racing, check, every_step=True)
    with pytest.raises(AssertionError, match="the same steps, other bytes") as caught:
        search.run()
    choices = ast.literal_eval(re.search(r"with the choices (\[.*?\])", str(caught.value))[1])
    with pytest.raises(AssertionError, match="with the choices") as again:
        search.replay(choices)
    assert "[1, 2]" in str(again.value)


def not_revoked(self, report):
    """Tell nobody that the communicator is out of use."""


def hasty(self, tag):
    """Take a rank that is behind for one in another call."""
    return self.tag != tag


def careless(self, source, tag):
    """Take every message for the one that is expected."""
    self._wait([source], "a message", True)
    return self._next(source).content


@pytest.mark.parametrize(
    ("method", "fault", "kind", "bounds"),
    [
        ("revoke", not_revoked, "timeout", {"timeouts": 1}),
        ("is_in_another_call", hasty, None, {"stalls": 1}),
        ("_take", careless, "raise", {}),
    ],
)
def test_a_transport_with_a_fault_is_found(method, fault, kind, bounds, monkeypatch):
    monkeypatch.setattr(SimTransport, method, fault, raising=False)
    with pytest.raises(AssertionError, match="with the choices"):
        list(searches("sparcml", 3, kind, **bounds))
