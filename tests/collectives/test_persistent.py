"""Plans: what the blocking calls return, no message but data in later calls, and the same errors on all ranks."""

import inspect

import numpy as np
import pytest
from cases import case, same_bits

import sparsecoll
from sparsecoll import CommunicationError, Request, RowSparse, SparseVector, simulate
from sparsecoll.transport import LocalTransport

NAMES = [name for name in sparsecoll.__all__ if name.endswith("_init")]
ALIKE = ["reduce_init", "reduce_scatter_init", "allgather_init", "gather_init", "scan_init", "exscan_init"]
CASES = {
    "allreduce_init": {"op": "max"},
    "reduce_init": {"root": 1, "k": 20},
    "reduce_scatter_init": {"format": "coo", "op": "mean"},
    "allgather_init": {"value_dtype": "float16"},
    "gather_init": {"root": 2},
    "bcast_init": {"root": 1},
    "scatter_init": {"root": 2},
    "scan_init": {"op": "min", "missing": "zero"},
}


def given(name, x, rank, P):
    """The argument of a collective that sends x."""
    vectors = {"alltoall_init": [x] * P, "scatter_init": [x] * P, "alltoallv_init": {(rank + 1) % P: x, 0: 2 * x}}
    return vectors.get(name, x)


def same(a, b):
    """Whether two results are the same to the last bit."""
    if isinstance(a, SparseVector):
        return same_bits(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same_bits(a[key], b[key]) for key in a)
    return a is b is None or all(map(same_bits, a, b))


def test_every_collective_has_a_persistent_one_with_its_arguments():
    others = {"as_vector", "like", "Plan", *NAMES}
    blocking = {name for name in set(sparsecoll.collectives.__all__) - others if name[0] != "i"}
    assert {name.removesuffix("_init") for name in NAMES} == blocking
    for name in set(NAMES) - {"allreduce_init"}:
        init, call = getattr(sparsecoll, name), getattr(sparsecoll, name.removesuffix("_init"))
        assert init.__name__ == name and init.__doc__.startswith(f"Prepare `sparsecoll.{call.__name__}`")
        assert list(inspect.signature(init).parameters) == list(inspect.signature(call).parameters)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("P", [3, 4])
def test_results_are_those_of_the_blocking_call_without_comparing_arguments(P, name):
    call, options = getattr(sparsecoll, name.removesuffix("_init")), CASES.get(name, {})

    def program(comm):
        xs = [given(name, case(kind, comm.rank, P), comm.rank, P) for kind in ("random", "one_region", "empty_ranks")]
        traffic, results = sparsecoll.traffic(comm), []
        with getattr(sparsecoll, name)(comm, xs[0], **options) as plan:
            before = set(traffic.copy().phases)
            traffic.phases.clear()
            planned = [plan(x) for x in xs] + [plan.start(x).wait() for x in xs]
            assert {"agree", "partners"}.isdisjoint(traffic.phases) and "agree" in before
        results = [call(comm, x, **options) for x in xs]
        return [same(y, z) for y, z in zip(planned, 2 * results, strict=True)]

    assert all(all(equal) for equal in simulate(P, program).results)


@pytest.mark.parametrize("name", NAMES)
def test_one_rank(name):
    comm, x = LocalTransport(), case("random", 0, 1)
    sent = {"alltoall_init": [x], "scatter_init": [x], "alltoallv_init": {0: x}}.get(name, x)
    plan = getattr(sparsecoll, name)(comm, sent)
    assert same(plan(sent), getattr(sparsecoll, name.removesuffix("_init"))(comm, sent))


ERRORS = {
    "length": (lambda x: x[:100], "length: expected 2003 as in NAME, got 100"),
    "dtype": (lambda x: x.astype(np.float64), "dtype: expected 'float32' as in NAME, got 'float64'"),
    "NaN": (lambda x: x * np.nan, "x: expected finite values"),
    "type": (lambda x: "no", "x: expected a SparseVector, "),
    "keys": (lambda x: {1: 2}, "x: expected a type with a length for NAME, got dict"),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", ALIKE)
def test_another_kind_of_x_is_refused_on_all_ranks(name, error):
    wrong, text = ERRORS[error]
    if error == "NaN" and "gather" in name:
        return  # these pass NaN on

    failing = 0 if "scan" in name else 1  # a rank from which the other one receives

    def program(comm):
        x = case("random", comm.rank, 2)
        plan = getattr(sparsecoll, name)(comm, x)
        y = plan(x)
        with pytest.raises((ValueError, TypeError), match=f"rank {failing}: {text.replace('NAME', name)}") as caught:
            plan(wrong(x) if comm.rank == failing else x)
        assert same(plan(x), y) and same(plan(x), y)  # it goes on
        return str(caught.value)

    assert len(set(simulate(2, program).results)) == 1


@pytest.mark.parametrize("name", ["gather_init", "scan_init", "exscan_init", "alltoallv_init"])
def test_all_ranks_repeat_a_step_that_ends_with_a_call_of_all(name):
    """As docs/reliability.md says: some ranks do not wait for the one that refuses x."""

    def program(comm, failing):
        x = case("random", comm.rank, comm.size)
        right, wrong = (
            (x, x[:100]) if name != "alltoallv_init" else ({(comm.rank + to) % comm.size: x} for to in (1, 2))
        )
        plan, steps, failed = getattr(sparsecoll, name)(comm, right), [], False
        while len(steps) < 4:
            try:
                plan(wrong if len(steps) == 1 and comm.rank == failing and not failed else right)
                sparsecoll.allreduce(comm, {0: 1})
                steps.append(None)
            except ValueError as error:
                steps, failed = [*steps[:1], str(error)], True
        return steps

    for failing in range(5):
        (steps,) = {tuple(steps) for steps in simulate(5, lambda comm, rank=failing: program(comm, rank)).results}
        assert steps[1].startswith(f"rank {failing}: ") and steps == (None, steps[1], None, None)


def test_other_kinds_on_all_ranks_are_refused():
    sparse = pytest.importorskip("scipy.sparse")
    x = sparse.csr_array(np.diag([1.0, 2.0, 0.0, 0.0]))

    def program(comm):
        plan = sparsecoll.reduce_init(comm, x)
        with pytest.raises(ValueError, match=r"shape: expected \[4, 4\] as in reduce_init, got \[2, 8\]"):
            plan(x.reshape(2, 8))
        y = plan(sparse.csc_array(x))
        return None if y is None else (y.format, y.nnz)

    assert simulate(2, program).results == [("csc", 2), None]


def test_rows():
    def program(comm):
        x = RowSparse([comm.rank, 7], np.ones((2, 3)), 9)
        part, every = sparsecoll.reduce_scatter_init(comm, x, owner="range"), sparsecoll.allgather_init(comm, x)
        for y in (x, 2 * x):
            assert part(y) == sparsecoll.reduce_scatter(comm, y, owner="range")
            assert every(y) == sparsecoll.allgather(comm, y)
        with pytest.raises(ValueError, match="d: expected 3 as in allgather_init, got 4"):
            every(RowSparse([1], np.ones((1, 4)), 9))

    simulate(3, program)


def test_kinds_may_differ_where_messages_say_them():
    def program(comm):
        root = comm.rank == 1
        plan = sparsecoll.bcast_init(comm, case("random", 0, 1) if root else None, 1)
        assert plan({"a": 1} if root else None) == {"a": 1}
        assert plan(SparseVector([3], np.ones(1, np.int8), 9) if root else None)[3] == 1
        exchange = sparsecoll.alltoall_init(comm, [{comm.rank: to} for to in range(3)])
        assert exchange([{comm.rank: float(to)} for to in range(3)]) == [{r: float(comm.rank)} for r in range(3)]

    simulate(3, program)


def test_partners_are_those_of_the_first_call():
    def program(comm):
        x, rank, other = case("random", comm.rank, 2), comm.rank, 1 - comm.rank
        plan = sparsecoll.alltoallv_init(comm, {other: x, rank: x})
        assert list(plan({rank: 2 * x, other: x})) == [0, 1]
        with pytest.raises(ValueError) as caught:
            plan({rank: x} if rank == 1 else {other: x, rank: x})
        assert str(caught.value) == "rank 1: x: expected vectors for ranks [0, 1] as in alltoallv_init, got [1]"
        return len(plan({other: x, rank: x}))

    assert simulate(2, program).results == [2, 2]


def test_arguments_are_compared_between_ranks():
    def program(comm):
        x = case("random", comm.rank, 3)
        with pytest.raises(CommunicationError, match="root: expected the same value on all ranks"):
            sparsecoll.reduce_init(comm, x, root=comm.rank)
        with pytest.raises(ValueError, match="rank 0: root: expected a rank from 0 to 2"):
            sparsecoll.gather_init(comm, x, root=3)
        plan, other = sparsecoll.reduce_init(comm, x), sparsecoll.reduce_init(comm, x, 1)
        with pytest.raises(CommunicationError, match="root: expected the same value on all ranks"):
            (plan if comm.rank else other)(x)
        with pytest.raises(CommunicationError, match="call: expected the same value on all ranks"):
            plan(x) if comm.rank else sparsecoll.reduce(comm, x)
        assert (plan(x) is None) == (comm.rank != 0)

    simulate(3, program)


def test_start_wait_and_free():
    comm = LocalTransport()
    x = SparseVector([1, 3], np.ones(2), 5)
    with sparsecoll.scan_init(comm, x) as plan:
        assert Request.waitall([plan.start(x)]) == [x]
        plan.start(2 * x)  # the call before it has been waited for
        for misuse in (lambda: plan.start(x), plan.free):
            with pytest.raises(CommunicationError, match=r"expected wait\(\) for the call started before"):
                misuse()
        assert plan.wait() == 2 * x
        plan.start(3 * x)
    with pytest.raises(CommunicationError, match=r"plan: expected one that is in use, got one of scan_init after free"):
        plan(x)
    with pytest.raises(ValueError, match="finite"), sparsecoll.scan_init(comm, x) as plan:
        plan.start(x * np.nan)  # the end of the block waits


def test_calls_of_a_plan_that_one_rank_has_freed_fail_on_all():
    def program(comm):
        x = case("random", comm.rank, 3)
        plan = sparsecoll.allgather_init(comm, x)
        if comm.rank == 2:
            plan.free()
        with pytest.raises(CommunicationError, match="rank 2: plan: expected one that is in use"):
            plan(x)

    simulate(3, program)
