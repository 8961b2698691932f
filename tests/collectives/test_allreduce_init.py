"""allreduce_init: the bits of allreduce, no message but data in later calls, and the same errors on all ranks."""

import sys

import numpy as np
import pytest
from cases import case, same_bits

import sparsecoll
from sparsecoll import CommunicationError, Request, SparseVector, simulate
from sparsecoll.transport import LocalTransport

CASES = {
    "auto": {},
    "dense": {},
    "allgather": {"format": "coo", "value_dtype": "float16"},
    "sparcml": {"op": "max", "missing": "zero"},
    "densestream": {"op": "mean"},
    "hierarchical": {"k": 20},
    "oktopk": {"k": 20},
    "gtopk": {"density": 0.01},
}


@pytest.mark.parametrize("algo", CASES)
@pytest.mark.parametrize("P", [1, 3, 4])
def test_bits_are_those_of_allreduce(P, algo):
    """With one algorithm object for all calls, which then keeps its thresholds as the plan's own does."""

    def program(comm):
        xs = [case(name, comm.rank, P) for name in ("random", "one_region", "empty_ranks", "random")]
        plan = sparsecoll.allreduce_init(comm, xs[0], algo, **CASES[algo])
        kept = sparsecoll.ALGORITHMS[algo]()
        return [same_bits(plan(x), sparsecoll.allreduce(comm, x, kept, **CASES[algo])) for x in xs]

    assert all(all(same) for same in simulate(P, program, ranks_per_node=2).results)


@pytest.mark.parametrize("k", [60, 3000])
def test_auto_adds_in_the_order_of_allreduce(k):
    """Where ranks send short vectors together with the arguments, and where they do not."""

    def program(comm):
        rng = np.random.default_rng(comm.rank)
        x = SparseVector(np.sort(rng.choice(20_000, k, replace=False)), rng.standard_normal(k), 20_000)
        return same_bits(sparsecoll.allreduce_init(comm, x)(x), sparsecoll.allreduce(comm, x))

    assert all(simulate(8, program).results)


@pytest.mark.parametrize("op", ["sum", "max"])
def test_an_example_with_nan_that_may_pass(op):
    def program(comm):
        x = SparseVector([0, comm.rank + 1], np.array([1.0, np.nan if comm.rank == 2 else 2.0]), 4)
        return sparsecoll.allreduce_init(comm, x, op=op, nonfinite="pass")(x).values.tolist()

    for values in simulate(3, program).results:
        assert values[:3] == [3.0 if op == "sum" else 1.0, 2.0, 2.0] and np.isnan(values[3])


def test_later_calls_send_data_alone():
    """allgather: 16 bytes and 8 for each entry of a message, where allreduce also sends 16 bytes to each rank."""

    def program(comm):
        x = case("random", comm.rank, 4)
        plan = sparsecoll.allreduce_init(comm, x, "allgather", format="coo")
        traffic = sparsecoll.traffic(comm)
        received = []
        for call in (plan, plan, lambda x: sparsecoll.allreduce(comm, x, "allgather", format="coo")):
            before = traffic.copy()
            call(x)
            counts = traffic.since(before).total
            received.append((counts.messages_received, counts.bytes_received))
        return received, x.nnz

    for (first, second, other), nnz in simulate(4, program).results:
        assert first == second == (2, 3 * (8 + 16 + 8 * nnz))  # with the sizes of the blocks
        assert other == (2, first[1] + 3 * 16)


def calls_of(function):
    """How many functions of Python and C `function` calls."""
    events = []
    sys.setprofile(lambda frame, event, _: events.append(event in ("call", "c_call")))
    try:
        function()
    finally:
        sys.setprofile(None)
    return sum(events)


def test_fewer_functions_are_called():
    comm, x = LocalTransport(), case("random", 0, 1)
    plan = sparsecoll.allreduce_init(comm, x)
    plan(x)
    sparsecoll.allreduce(comm, x)
    assert calls_of(lambda: plan(x)) < 0.8 * calls_of(lambda: sparsecoll.allreduce(comm, x))


def test_started_calls_are_made_in_order():
    """Also several before any is waited for, and after one that has failed."""
    comm = LocalTransport()
    x = SparseVector([1, 3], np.ones(2), 5)
    plan = sparsecoll.allreduce_init(comm, x)
    requests = [plan.start(step * x) for step in range(3)]
    assert plan(x) == x and all(request.test() for request in requests)
    assert Request.waitall(requests) == [step * x for step in range(3)]
    failing = plan.start(x * np.nan)
    with pytest.raises(ValueError, match="finite"):
        failing.wait()
    assert plan.start(x).wait(30) == x


ERRORS = {
    "length": (
        lambda x: x[:100],
        r"rank 1: x: expected a SparseVector of length 2003 of float32 as in .* length 100 of",
    ),
    "dtype": (
        lambda x: x.astype(np.float64),
        "rank 1: x: expected a SparseVector of length 2003 of float32 as in .* of",
    ),
    "dense": (
        lambda x: x.to_dense(),
        "rank 1: x: expected a SparseVector of .* as in allreduce_init, got a DenseVector",
    ),
    "NaN": (lambda x: x * np.nan, "rank 1: x: expected finite values"),
    "type": (lambda x: "no", "rank 1: x: expected a SparseVector, "),
    "keys": (lambda x: {1: 2}, "rank 1: x: expected a type with a length, got dict: use allreduce"),
    "words": (lambda x: dict(zip(map(str, range(2003)), [0.5] * 2003, strict=True)), "rank 1: x: expected a type with"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_later_calls_are_the_same_on_all_ranks(name):
    wrong, text = ERRORS[name]

    def program(comm):
        x = case("random", comm.rank, 3)
        plan = sparsecoll.allreduce_init(comm, x)
        y = plan(x)
        with pytest.raises((ValueError, TypeError), match=text) as caught:
            plan(wrong(x) if comm.rank == 1 else x)
        assert same_bits(plan(x), y) and same_bits(plan(x), y)  # it goes on
        return str(caught.value)

    assert len(set(simulate(3, program).results)) == 1


def test_shapes_are_compared_with_the_example():
    sparse = pytest.importorskip("scipy.sparse")
    x = sparse.csr_array(np.diag([1.0, 2.0, 0.0, 0.0]))

    def program(comm):
        plan = sparsecoll.allreduce_init(comm, x)
        y = plan(2 * x)
        assert type(y) is type(x) and (y != 2 * comm.size * x).nnz == 0
        with pytest.raises(ValueError, match=r"and shape \[4, 4\] of float64 as in allreduce_init, got .*\[2, 8\]"):
            plan(x.reshape(2, 8))
        return plan(sparse.csc_array(x)).format

    assert simulate(2, program).results == ["csc", "csc"]


def test_errors_of_the_first_call_are_the_same_on_all_ranks():
    def program(comm):
        x, texts = case("random", comm.rank, 3), []
        for arguments, text in (
            ({"x": {3: 1}}, "x: expected a type with a length, got dict: use allreduce"),
            ({"algo": "oktopk"}, "k, density: expected one of them for algo='oktopk', got neither"),
            ({"op": "max", "algo": "oktopk", "k": 3}, "op: expected 'sum' or 'mean'"),
            ({"format": "no"}, "format: expected one of"),
            ({"k": comm.rank}, "k: expected the same value on all ranks"),
        ):
            with pytest.raises((ValueError, TypeError, CommunicationError), match=text) as caught:
                sparsecoll.allreduce_init(comm, **{"x": x} | arguments)
            texts.append(str(caught.value))
        plan = sparsecoll.allreduce_init(comm, x)
        with pytest.raises(CommunicationError, match="call: expected the same value on all ranks"):
            plan(x) if comm.rank else sparsecoll.allreduce(comm, x)
        plan(x)
        return texts

    results = simulate(3, program).results
    assert results[0] == results[1] == results[2]


def test_what_a_session_shows_of_calls_fits_one_line():
    """repr of a plan, a request, traffic and a simulation; a notebook shows traffic as a table."""

    def program(comm):
        x = sparsecoll.SparseVector([comm.rank], np.ones(1), 4)
        plan = sparsecoll.allreduce_init(comm, x)
        request = plan.start(x)
        request.wait()
        return [repr(plan), repr(request), repr(sparsecoll.traffic(comm))], sparsecoll.traffic(comm)._repr_html_()

    simulation = simulate(2, program)
    texts, table = simulation.results[0]
    assert texts[:2] == ["Plan(auto, 2 ranks)", "Request(finished)"]
    received = simulation.traffic[0].total.bytes_received
    assert texts[2].startswith("Traffic(sent ") and f"received {received:,} bytes" in texts[2]
    assert f"<tr><td>total</td><td>{received:,}</td><td>{received:,}</td>" in table
    assert repr(simulation).startswith("Simulation(2 ranks, ") and f"at most {received:,} bytes" in repr(simulation)


def test_ranks_in_plans_of_the_same_arguments_raise():
    """The examples have other numbers of entries, by which messages are divided."""

    def program(comm):
        few = SparseVector([comm.rank], np.ones(1), 1_000_000)
        many = SparseVector(np.arange(0, 900_000, 15), np.ones(60_000), 1_000_000)
        plans = [sparsecoll.allreduce_init(comm, x, "allgather") for x in (few, many)]
        assert [plan(many).values.sum() for plan in plans] == [120_000, 120_000]
        with pytest.raises(CommunicationError, match="entries of the plan: expected the same value on all ranks"):
            plans[comm.rank](many)
        return True

    assert all(simulate(2, program).results)


def test_a_plan_takes_what_error_feedback_returns():
    def program(comm):
        plan = sparsecoll.allreduce_init(comm, np.zeros(9, np.float32), "dense")
        return plan(sparsecoll.Residual(9).compensate(np.ones(9, np.float32))).to_dense().tolist()

    assert simulate(2, program).results == [[2.0] * 9] * 2
