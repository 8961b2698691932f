"""A rank that fails between the messages of any collective is heard by all, and the communicator goes on."""

import contextlib

import numpy as np
import pytest
from cases import case, same_bits
from failing import fail_at, unpatch

import sparsecoll
from sparsecoll import CommunicationError, DeadlockError, SparseVector, simulate
from sparsecoll.transport.all_ranks import allgather
from sparsecoll.transport.call import CollectiveCall

P = 3
CALLS = {
    "gather": lambda comm, x: sparsecoll.gather(comm, x, 1),
    "scatter": lambda comm, x: sparsecoll.scatter(comm, x, 1),
    "alltoall": lambda comm, x: sparsecoll.alltoall(comm, [x] * P),
    "alltoallv": lambda comm, x: sparsecoll.alltoallv(comm, {(comm.rank + 1) % P: x}),
    "ireduce": lambda comm, x: sparsecoll.ireduce(comm, x).wait(),
    "allreduce_init": lambda comm, x: sparsecoll.allreduce_init(comm, x, "sparcml")(x),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_rank_that_fails_between_messages_is_heard_by_all(name):
    """At its first and second send and receive, in a call that is new and in one that all have agreed on before."""

    def program(comm, culprit, method, number, known):
        x, text = case("random", comm.rank, P), None
        if known:
            CALLS[name](comm, x)
        if comm.rank == culprit:
            fail_at(comm.transport, method, number)
        try:
            CALLS[name](comm, x)
            unpatch(comm.transport, method)  # it has fewer messages
            sparsecoll.allreduce(comm, x)  # who had finished hears of it here
        except CommunicationError as error:
            text = str(error)
        unpatch(comm.transport, method)
        CALLS[name](comm, x)
        return text, sparsecoll.allreduce(comm, x, "allgather")

    heard = 0
    for culprit in range(P):
        for method in ("isend", "irecv"):
            for number in (1, 2):
                for known in (False, True):
                    case_of = (culprit, method, number, known)
                    results = simulate(P, lambda comm, c=case_of: program(comm, *c)).results
                    texts = {text for text, _ in results}
                    assert texts in ({None}, {f"rank {culprit} failed: Fault: {method} {number}"}), case_of
                    heard += texts != {None}
                    assert all(same_bits(results[0][1], y) for _, y in results)
    assert heard >= 6


STEPS = {
    "gather": (lambda x: x, lambda x: {-1: 1}),
    "reduce": (lambda x: x, lambda x: x * np.nan),
    "alltoallv": (lambda x: {0: x}, lambda x: {0: x, 1: {-1: 1}}),
}


@pytest.mark.parametrize("name", STEPS)
def test_all_ranks_repeat_a_step_that_ends_with_a_call_of_all(name):
    """As docs/reliability.md says: some ranks do not wait for the one that refuses x."""

    def program(comm, failing):
        x = case("random", comm.rank, comm.size)
        (right, wrong), steps, failed = (of(x) for of in STEPS[name]), [], False
        while len(steps) < 4:
            try:
                getattr(sparsecoll, name)(
                    comm, wrong if len(steps) == 1 and comm.rank == failing and not failed else right
                )
                sparsecoll.allreduce(comm, {0: 1})
                steps.append(None)
            except ValueError as error:
                steps, failed = [*steps[:1], str(error)], True
        return steps

    for failing in range(5):
        (steps,) = {tuple(steps) for steps in simulate(5, lambda comm, rank=failing: program(comm, rank)).results}
        assert steps[1].startswith(f"rank {failing}: ") and steps == (None, steps[1], None, None)


STARTED = {
    "igather": lambda comm, x: sparsecoll.igather(comm, x, 1),
    "ireduce": lambda comm, x: sparsecoll.ireduce(comm, x, 1),
    "iscatter": lambda comm, x: sparsecoll.iscatter(comm, x, 1),
    "ibcast": lambda comm, x: sparsecoll.ibcast(comm, x, 1),
    "ialltoallv": lambda comm, x: sparsecoll.ialltoallv(comm, {(comm.rank + 1) % P: x}),
    "iallreduce": lambda comm, x: sparsecoll.iallreduce(comm, x),
}


def outcome(wait):
    try:
        y = wait()
        return y.to_dense().tolist() if isinstance(y, SparseVector) else None
    except (CommunicationError, TypeError):
        return "raised"


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("culprit", range(P))
@pytest.mark.parametrize("name", STARTED)
def test_calls_that_are_queued_behind_one_that_fails_meet_the_same_calls_on_all_ranks(name, culprit, known, blocking):
    """They raise or are right, and so is what follows, whether a rank has finished the first one or not."""

    def queued(comm, x, wrong=False):
        a, b, c = (SparseVector([i, comm.rank + 3], np.array([4.0**comm.rank, 1.0]) * 10**i, 9) for i in range(3))
        first = STARTED[name](comm, "wrong" if wrong and comm.rank == culprit else x)
        second = sparsecoll.iallreduce(comm, a, k=2)
        third = outcome(lambda: sparsecoll.allreduce(comm, b, k=2)) if blocking else sparsecoll.iallreduce(comm, b, k=2)
        last = sparsecoll.iallreduce(comm, c, k=2)
        waited = [outcome(first.wait), outcome(second.wait)]
        return [*waited, third if blocking else outcome(third.wait), outcome(last.wait)]

    def one_by_one(comm, x):
        """A failure that some ranks see in the second call, which the others do not start."""
        try:
            STARTED[name](comm, "wrong" if comm.rank == culprit else x).wait()
            sparsecoll.iallreduce(comm, SparseVector([0], [1.0], 9), k=1).wait()
        except (CommunicationError, TypeError):
            pass

    def not_counted(comm):
        """Likewise, in a call that others make, such as the optimizers of sparsecoll.torch."""
        try:
            with CollectiveCall(comm.transport, "another"):
                if comm.rank == culprit:
                    raise TypeError("wrong")
            sparsecoll.allreduce(comm, {0: 1.0})
        except (CommunicationError, TypeError):
            pass

    def mixed(comm, x):
        """Some ranks make blocking calls where others make nonblocking ones."""
        for _ in range(3):
            if comm.rank == culprit:
                sparsecoll.iallreduce(comm, x).wait()
            else:
                sparsecoll.allreduce(comm, x)

    def program(comm):
        x = case("random", comm.rank, P)
        right = queued(comm, x)[1:] if known else None
        for _ in range(2):
            one_by_one(comm, x)
            not_counted(comm)
            mixed(comm, x)
            seen = queued(comm, x, wrong=True)[1:]
            not_counted(comm)
            total = sparsecoll.allreduce(comm, {0: 1.0})
            again = queued(comm, x)[1:]
            assert total == {0: 3.0} and right in (None, again) and "raised" not in again
            assert all(got in ("raised", expected) for got, expected in zip(seen, again, strict=True))
        return seen

    simulate(P, program)


@pytest.mark.parametrize("name", STARTED)
@pytest.mark.parametrize("culprits", [(0, 1), (1, 0), (2, 2), (0, 2)])
def test_a_call_that_fails_after_another_failure_was_seen(name, culprits):
    def program(comm):
        x = case("random", comm.rank, P)

        def started(culprit=None):
            return STARTED[name](comm, "wrong" if comm.rank == culprit else x)

        def sums():
            vectors = [SparseVector([i, comm.rank + 3], np.array([4.0**comm.rank, 1.0]) * 10**i, 9) for i in range(2)]
            return [sparsecoll.iallreduce(comm, each, k=2) for each in vectors]

        right = [outcome(request.wait) for request in sums()]
        first, second = started(culprits[0]), started(culprits[1])
        outcome(first.wait)
        later = sums()
        outcome(second.wait)
        seen = [outcome(request.wait) for request in later]
        assert all(got in ("raised", expected) for got, expected in zip(seen, right, strict=True))
        assert sparsecoll.allreduce(comm, {0: 1.0}) == {0: 3.0}
        assert [outcome(request.wait) for request in sums()] == right

    simulate(P, program)


def test_what_is_queued_behind_a_failure_is_not_met_by_later_calls_of_a_rank_that_has_gone_on():
    """It has finished several calls, and waits in one of another kind, as an optimizer's step makes it."""

    def gathered(request):
        try:
            return [y.values.tolist() for y in request.wait(60) or []]
        except (CommunicationError, TypeError):
            return "raised"

    def program(comm):
        for turn in range(6):
            x = SparseVector([comm.rank], [1.0 + turn], 9)
            given = "wrong" if turn == 1 and comm.rank == 1 else x
            requests = [STARTED["igather"](comm, each) for each in (given, x)]
            try:
                with CollectiveCall(comm.transport, "step"):
                    allgather(comm.transport, np.array([comm.rank]))
            except (CommunicationError, TypeError):
                assert turn
            for request in requests:
                right = [[1.0 + turn]] * P if comm.rank == 1 else []
                assert gathered(request) in ("raised" if turn else None, right)

    with contextlib.suppress(DeadlockError):  # in the end, the slow rank waits for those that have gone on
        simulate(P, program)
