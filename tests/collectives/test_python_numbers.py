"""Numbers of mappings are Python's: a result that int64 or float64 does not hold exactly is refused on all ranks."""

import functools
import operator
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import sparsecoll
from sparsecoll import simulate
from sparsecoll.collectives.convert import words

MANY = settings(max_examples=150, deadline=None)
CALLS = {
    "allreduce": sparsecoll.allreduce,
    "iallreduce": lambda comm, x, **options: sparsecoll.iallreduce(comm, x, **options).wait(),
    "sparcml": lambda comm, x, **options: sparsecoll.allreduce(comm, x, "sparcml", **options),
    "dense": lambda comm, x, **options: sparsecoll.allreduce(comm, x, "dense", **options),
    "top k": lambda comm, x, **options: sparsecoll.allreduce(comm, x, "oktopk", k=1, **options),
    "reduce": sparsecoll.reduce,
    "reduce_scatter": sparsecoll.reduce_scatter,
}
GATHERS = {"allgather": sparsecoll.allgather, "gather": sparsecoll.gather}
TOO_LARGE = {
    "sum": (
        [{1: 2**62}] * 3,
        {},
        "a sum of integers below 2^63, got magnitudes up to 2^62 on rank 0: use float(value)",
    ),
    "negative": ([{1: -(2**63)}] * 3, {}, "a sum of integers below 2^63, got magnitudes up to 2^63 on rank 0"),
    "on one rank": ([{1: 1}, {1: 2**63 - 1}, {}], {}, "below 2^63, got magnitudes up to 2^63 on rank 1"),
    "product": ([{1: 2**31}] * 3, {"op": "prod"}, "a product of integers below 2^63, got magnitudes up to 2^31"),
    "floats on another rank": ([{1: 2**53 + 1}, {2: 0.5}, {}], {}, "within 2^53 where other values are floats, got"),
    "sums beside floats": ([{1: 2**53}, {1: 1}, {2: 0.5}], {}, "a sum of integers within 2^53 where other values are"),
    "among floats": ([{1: 2**53, 2: 0.5}, {1: 1}, {}], {}, "magnitudes up to 2^53 on rank 0: use float(value) on all"),
    "in one mapping": ([{}, {1: 2**53 + 1, 2: 0.5}, {}], {}, "expected no integers beyond 2^53 beside floats, got 900"),
    "of complex": ([{}, {1: -(2**60), 2: 1j}, {}], {}, "expected no integers beyond 2^53 beside floats"),
}


@pytest.mark.parametrize("few", [words.FEW, 0])
@pytest.mark.parametrize("key", [int, str])
@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_a_result_might_not_hold_is_refused_on_all_ranks(name, key, few, monkeypatch):
    monkeypatch.setattr(words, "FEW", few)
    parts, options, text = TOO_LARGE[name]

    def program(comm):
        x, errors = {key(k): value for k, value in parts[comm.rank].items()}, []
        for label, call in CALLS.items():
            if options and label == "top k":
                continue
            with pytest.raises(ValueError) as caught:
                call(comm, x, **options)
            errors.append(str(caught.value))
        assert sparsecoll.allreduce(comm, {"a": 1}) == {"a": 3}
        return errors

    results = simulate(3, program).results
    assert results[0] == results[1] == results[2] and all(text in error for error in results[0])


EXTREMES = {1: 2**63 - 1, 2: -(2**63), 3: 2**53 + 1}


@pytest.mark.parametrize("P", [1, 2, 5])
def test_what_int64_holds_is_exact(P):
    def program(comm):
        for op in ("min", "max", "bitwise_and", "bitwise_or", "replace"):
            assert sparsecoll.allreduce(comm, EXTREMES, op=op) == EXTREMES
        alone = EXTREMES if comm.rank == P - 1 else {1: 0}  # nothing but zero can be added to these
        assert sparsecoll.allgather(comm, EXTREMES) == [EXTREMES] * P
        assert sparsecoll.bcast(comm, EXTREMES) == sparsecoll.alltoall(comm, [EXTREMES] * P)[0] == EXTREMES
        return sparsecoll.allreduce(comm, alone), sparsecoll.allreduce(comm, {"a": 2**60}, check=False)

    assert simulate(P, program).results == [(EXTREMES, {"a": P * 2**60})] * P


@pytest.mark.parametrize("name", GATHERS)
def test_a_gather_takes_the_dtype_of_all_ranks_only_if_nothing_is_lost(name):
    def program(comm):
        kept = GATHERS[name](comm, {1: 2**53} if comm.rank else {1: 0.5})
        assert kept is None or kept == [{1: 0.5}, {1: 2**53}]
        with pytest.raises(ValueError, match=r"expected integers within 2\^53 where other values are floats"):
            GATHERS[name](comm, {1: 2**53 + 1} if comm.rank else {1: 0.5})
        return GATHERS[name](comm, {1: 2**63 - 1})

    assert simulate(2, program).results[0] == [{1: 2**63 - 1}] * 2


@pytest.mark.parametrize("name", ["bcast", "scatter", "alltoall", "alltoallv"])
def test_integers_among_floats_are_kept_or_refused_where_nothing_is_added(name):
    def call(comm, x):
        sent = {"bcast": x, "alltoallv": {0: x}}.get(name, [x] * comm.size)
        return getattr(sparsecoll, name)(comm, sent)

    def program(comm):
        with pytest.raises(ValueError, match=r"no integers beyond 2\^53 beside floats, got 9007199254740993"):
            call(comm, {"a": 2**53 + 1, "b": 0.5})
        return call(comm, {"a": -(2**53), "b": 0.5})

    y = simulate(2, program).results[0]
    assert (y if name in ("bcast", "scatter") else y[0]) == {"a": -(2**53), "b": 0.5}


def test_booleans_count_as_one_in_a_sum():
    def program(comm):
        x = Counter({"a": True, "b": comm.rank > 0})
        y, part = sparsecoll.allreduce(comm, x), sparsecoll.reduce_scatter(comm, x)
        flags = sparsecoll.allreduce(comm, x, op="logical_and"), *sparsecoll.allgather(comm, x)
        assert all(type(value) is bool for flag in flags for value in flag.values())
        return y, sparsecoll.reduce(comm, x, 1), part, flags[0]

    results = simulate(3, program).results
    assert [y for y, *_ in results] == [{"a": 3, "b": 2}] * 3 and results[1][1] == {"a": 3, "b": 2}
    assert sum((part for _, _, part, _ in results), Counter()) == {"a": 3, "b": 2}
    assert results[0][3] == {"a": True, "b": False}


def test_the_check_takes_no_messages_of_its_own():
    def program(comm):
        counts = []
        for value in (1, 2**61):  # the second one is checked in the same messages
            before = sparsecoll.traffic(comm).copy()
            sparsecoll.allreduce(comm, {"a": value, "b": comm.rank})
            sparsecoll.reduce_scatter(comm, {"a": value, "b": comm.rank})
            counts.append(sparsecoll.traffic(comm).since(before).total.messages_received)
        before = sparsecoll.traffic(comm).copy()
        sparsecoll.allreduce(comm, {"a": 0.5})
        assert sparsecoll.traffic(comm).since(before).total.messages_received == 1
        return counts

    first, second = simulate(2, program).results[0]
    assert second <= first


NUMBERS = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.integers(-(2**53), 2**53), st.integers(-4, 4), st.floats(-1, 1), st.booleans()
)
FOLDS = {"sum": operator.add, "prod": operator.mul, "max": max, "min": min, "replace": lambda a, b: b}


@MANY
@given(
    parts=st.lists(st.dictionaries(st.sampled_from("abc"), NUMBERS), min_size=1, max_size=4),
    op=st.sampled_from(list(FOLDS)),
)
def test_integers_are_those_of_python_or_refused(parts, op):
    def program(comm):
        try:
            return sparsecoll.allreduce(comm, parts[comm.rank], op=op)
        except ValueError as error:
            return str(error)

    found, *others = simulate(len(parts), program).results
    assert all(other == found for other in others)
    if isinstance(found, dict):
        for key in set().union(*parts):
            values = [part[key] for part in parts if key in part]
            expected = functools.reduce(FOLDS[op], values)
            if all(isinstance(value, int) for value in values):
                assert found[key] == expected
            else:
                assert found[key] == pytest.approx(float(expected), rel=1e-15, abs=1e-15)


@pytest.mark.parametrize("value", [np.longdouble(1) / 3, 10**400, 2**64, None, [1, 2], "1"])
@pytest.mark.parametrize("other", [1, 0.5])
def test_other_numbers_are_refused(value, other):
    if np.dtype(np.longdouble) == np.float64 and isinstance(value, np.longdouble):
        pytest.skip("long double is double here")
    with pytest.raises((TypeError, ValueError), match=r"x: expected .*: use float\(value\)"):
        simulate(2, lambda comm: sparsecoll.allreduce(comm, {"a": value, "b": other}))


@pytest.mark.parametrize("options", [{"op": "mean"}, {"value_dtype": "bfloat16"}, {"op": "bitwise_or"}, {}], ids=str)
@pytest.mark.parametrize("name", ["allreduce", "iallreduce", "reduce", "reduce_scatter", *GATHERS])
def test_empty_mappings_on_all_ranks_are_numbers_of_any_type(name, options):
    given = {} if name in GATHERS and "op" in options else options

    def program(comm):
        found = {**CALLS, **GATHERS}[name](comm, {}, **given)
        return any(found) if isinstance(found, list) else found

    assert not any(simulate(3, program).results)
