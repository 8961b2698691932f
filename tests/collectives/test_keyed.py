"""Types with keys and no length: every rank receives its own type, with the sums of all ranks."""

import functools
from collections import Counter, OrderedDict, defaultdict
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import sparsecoll
from sparsecoll import SparseVector, as_vector, like, simulate
from sparsecoll.collectives.convert import words

FEW = settings(max_examples=25, deadline=None)
RANKS = [1, 2, 3, 5]
ALGORITHMS = ["auto", "allgather", "sparcml", "densestream", "hierarchical"]
WORDS = [[3, 8, 3], [], [900, 8, 0, 8], [5], [2**20]]


@pytest.mark.parametrize("P", RANKS)
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_counters_are_summed_by_every_algorithm(P, algo):
    counters = [Counter(words) for words in WORDS[:P]]
    total = sum(counters, Counter())
    for y in simulate(P, lambda comm: sparsecoll.allreduce(comm, counters[comm.rank], algo)).results:
        assert type(y) is Counter and y == total and list(y) == sorted(total)
        assert all(type(key) is int and type(value) is int for key, value in y.items())
    assert counters == [Counter(words) for words in WORDS[:P]]


@FEW
@given(
    parts=st.lists(st.dictionaries(st.integers(0, 2**63 - 2), st.integers(-(2**50), 2**50)), min_size=1, max_size=5),
)
def test_any_integer_keys(parts):
    expected = {}
    for part in parts:
        for key, value in part.items():
            expected[key] = expected.get(key, 0) + value
    results = simulate(len(parts), lambda comm: sparsecoll.allreduce(comm, parts[comm.rank])).results
    assert all(y == expected for y in results)


@pytest.mark.parametrize(
    "make", [dict, OrderedDict, functools.partial(defaultdict, float), functools.partial(defaultdict, None)]
)
def test_sums_of_mappings_are_of_their_class(make):
    def program(comm):
        return sparsecoll.allreduce(comm, make({comm.rank: 0.5, 7: 1} if comm.rank else {}))

    for y in simulate(3, program).results:
        assert type(y) is type(make()) and list(y.items()) == [(1, 0.5), (2, 0.5), (7, 2.0)] and type(y[7]) is float
        assert getattr(y, "default_factory", 0) == getattr(make(), "default_factory", 0)


def test_ints_on_one_rank_and_floats_on_another_are_floats():
    parts = [{1: 2}, {1: 0.5, 3: 1}, {}]
    assert simulate(3, lambda comm: sparsecoll.allreduce(comm, parts[comm.rank])).results == [{1: 2.5, 3: 1.0}] * 3
    assert simulate(2, lambda comm: sparsecoll.allreduce(comm, {})).results == [{}, {}]


def test_every_collective_takes_counters():
    parts = [Counter({5: 1, 2: 3}), Counter({9: 4}), Counter()]

    def program(comm):
        x = parts[comm.rank]
        return (
            sparsecoll.reduce(comm, x, root=1),
            sparsecoll.reduce_scatter(comm, x),
            sparsecoll.allgather(comm, x),
            sparsecoll.bcast(comm, x if comm.rank == 1 else None, 1),
            sparsecoll.iallreduce(comm, x).wait(),
            sparsecoll.allreduce(comm, x, "oktopk", k=2),
        )

    results = simulate(3, program).results
    total = {2: 3, 5: 1, 9: 4}
    assert [r[0] for r in results] == [None, total, None]
    assert [r[1] for r in results] == [{2: 3}, {5: 1}, {9: 4}]
    for _, part, gathered, sent, summed, top in results:
        assert type(part) is type(sent) is Counter and gathered == parts and sent == {9: 4}
        assert summed == total and top == {2: 3, 9: 4}


WRONG = {
    "mixed": (
        {"a": 1, 7: 1},
        TypeError,
        "integers below 2^63 - 1, all str, all bytes, or all tuples of int and str, got 'a': use str(key)",
    ),
    "str": ({"a": 1}, TypeError, "x: expected keys of one type on all ranks, got integers and str"),
    "float": ({1: 1, 2.5: 1}, TypeError, "got 2.5: use str(key)"),
    "bool": ({True: 1}, TypeError, "got True: use int(key)"),
    "words and pairs": ({"cat": 3, ("the", "cat"): 2}, TypeError, "got 'cat': use str(key)"),
    "pairs beside int": ({(1, 2): 1, 3: 1}, TypeError, "got (1, 2): use str(key)"),
    "bytes beside str": ({b"\xff": 1, "a": 1}, TypeError, "got b'\\xff': use str(key)"),
    "NumPy's bool": ({np.True_: 1, 5: 1}, TypeError, "got np.True_: use int(key)"),
    "bool beside int": ({True: 1, 5: 1}, TypeError, "got True: use int(key)"),
    "fraction": ({Fraction(1, 3): 1}, TypeError, "got Fraction(1, 3): use str(key)"),
    "decimal": ({Decimal("0.1"): 1}, TypeError, "got Decimal('0.1'): use str(key)"),
    "pairs": ({(1, 2): 1}, TypeError, "keys of one type on all ranks, got"),
    "nested": ({(1, (2, 3)): 1}, TypeError, "x: expected tuples of int and str as keys, got (1, (2, 3)): use str(key)"),
    "bool in a tuple": ({(1, 2): 1, (1, True): 1}, TypeError, "as keys, got (1, True): use str(key)"),
    "float in a tuple": ({(1, 2.5): 1}, TypeError, "as keys, got (1, 2.5): use str(key)"),
    "huge": ({2**70: 1}, TypeError, f"got {2**70}"),
    "length": ({2**63 - 1: 1}, TypeError, f"got {2**63 - 1}: use str(key)"),
    "negative": ({-3: 1}, ValueError, "x: expected keys of at least 0, got -3"),
    "values": ({1: "a"}, TypeError, "values such as str"),
    "big": ({1: 2**64}, TypeError, "x: expected values of bool, int below 2^63, float or complex"),
    "unsigned": ({1: 2**63}, TypeError, "x: expected values of bool, int below 2^63, float or complex"),
    "unsigned beside signed": ({1: 2**63 + 1, 2: 5}, TypeError, "got uint64 from values such as int"),
    "unsigned words": ({"a": 2**64 - 1, "b": -5}, TypeError, "got uint64 from values such as int"),
    "unsigned of NumPy": ({1: np.uint64(3), 2: np.int64(-5)}, TypeError, "got uint64 from values such as uint64"),
    "defaultdict": (type("Mine", (defaultdict,), {})(int, {1: 1}), TypeError, "got Mine: use dict(x)"),
    "factory": (defaultdict(list, {1: 1}), TypeError, r"got one of list: use dict(x)"),
    "partial": (defaultdict(functools.partial(int, 5), {1: 1}), TypeError, r"got one of functools.partial"),
    "other int": (defaultdict(type("int", (), {}), {1: 1}), TypeError, r"got one of int: use dict(x)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_on_one_rank_is_raised_on_all(name):
    x, error, text = WRONG[name]

    def program(comm):
        with pytest.raises(error) as caught:
            sparsecoll.allreduce(comm, x if comm.rank == 1 else {1: 1})
        return str(caught.value), sparsecoll.allreduce(comm, {1: 1})

    results = simulate(3, program).results
    assert len({found for found, _ in results}) == 1 and text in results[0][0]
    assert all(y == {1: 3} for _, y in results)


def test_keys_on_one_rank_and_a_vector_on_another():
    def program(comm):
        with pytest.raises(sparsecoll.CommunicationError, match="expected the same value on all ranks"):
            sparsecoll.allreduce(comm, {1: 1} if comm.rank == 1 else SparseVector([1], np.ones(1, int), 2))
        return sparsecoll.allreduce(comm, {1: 1})

    assert simulate(3, program).results == [{1: 3}] * 3


TEXTS = ["the cat the dog", "", "a cat \U0001f600 \udc80 the", "dog", "cat a \0"]


@pytest.mark.parametrize("P", RANKS)
@pytest.mark.parametrize("kind", [str, bytes])
def test_keys_that_are_words_are_summed_and_moved_by_every_collective(P, kind):
    def split(text):
        return [word if kind is str else word.encode(errors="surrogatepass") for word in text.split(" ") if word]

    counters = [Counter(split(text)) for text in TEXTS[:P]]
    total = sum(counters, Counter())

    def program(comm):
        x = counters[comm.rank]
        sums = [sparsecoll.allreduce(comm, x, algo) for algo in ALGORITHMS]
        largest, part = sparsecoll.allreduce(comm, x, op="max"), sparsecoll.reduce_scatter(comm, x)
        sent = sparsecoll.bcast(comm, dict(x) if comm.rank == 0 else None)
        return sums, sparsecoll.reduce(comm, x), largest, part, sparsecoll.allgather(comm, x), sent

    results = simulate(P, program).results
    assert results[0][1] == total and dict(item for r in results for item in r[3].items()) == total
    for sums, _, largest, part, gathered, sent in results:
        for y in sums:
            assert type(y) is Counter and y == total and list(y) == list(results[0][0][0])
        assert largest == functools.reduce(lambda a, b: a | b, counters) and type(part) is Counter
        assert gathered == counters and sent == dict(counters[0])


@FEW
@given(
    parts=st.lists(st.dictionaries(st.text(), st.floats(0, 1).map(lambda x: x or 1.0)), min_size=1, max_size=5),
)
def test_any_text_is_a_key(parts):
    results = simulate(len(parts), lambda comm: sparsecoll.allreduce(comm, parts[comm.rank], "sparcml")).results
    assert all(y.keys() == set().union(*parts) and list(y) == list(results[0]) for y in results)


def test_keys_of_two_types():
    def program(comm):
        with pytest.raises(TypeError, match="expected keys of one type on all ranks"):
            sparsecoll.allreduce(comm, {b"a": 1} if comm.rank else {"a": 1})

    simulate(3, program)
    assert like({"b": 1, "a": 2}, as_vector({"a": 3, "b": 4})) == {"a": 3, "b": 4}
    with pytest.raises(ValueError, match="expected length 1, got 2"):
        like({"b": 1}, as_vector({"a": 3, "b": 4}))


def test_of_many_keys_each_travels_to_its_owner_and_from_there_once(monkeypatch):
    parts = [{f"word number {number}": 1 for number in range(rank, 300)} for rank in range(4)]
    others = [{"\0": rank} if rank else {} for rank in range(4)]

    def program(comm):
        y = sparsecoll.allreduce(comm, parts[comm.rank])
        phases = sparsecoll.traffic(comm).phases
        received = phases["keys" if "keys" in phases else "gather"].bytes_received
        assert sparsecoll.allreduce(comm, parts[comm.rank] | others[comm.rank]) == y | {"\0": 6}
        return y, received

    few = simulate(4, program).results
    monkeypatch.setattr(words, "FEW", 100)
    many = simulate(4, program).results
    size = sum(map(len, parts[0])) + len(parts[0])
    assert all(y == few[0][0] and list(y) == list(many[0][0]) for y, _ in many)
    assert y_of(parts) == few[0][0]
    assert all(size < received < 1.75 * size for _, received in many)


def received_in(comm, call):
    """The result of a call, and the messages that this rank receives in it."""
    before = sparsecoll.traffic(comm).copy()
    y = call()
    return y, sparsecoll.traffic(comm).since(before).total.messages_received


@pytest.mark.parametrize("key", [int, str])
def test_few_keys_take_one_round_and_a_rank_with_many_another_way(key):
    def program(comm):
        x = Counter({key(n): comm.rank for n in range(comm.rank, 40)})
        sparsecoll.allreduce(comm, x)
        few = received_in(comm, lambda: sparsecoll.allreduce(comm, x))
        at_root = received_in(comm, lambda: sparsecoll.reduce(comm, x, 1))
        many = Counter({key(n): 1 for n in range(3000 if comm.rank == 2 else 5)})
        assert sparsecoll.allreduce(comm, many) == Counter({key(n): 4 if n < 5 else 1 for n in range(3000)})
        largest = sparsecoll.allreduce(comm, x, op="max", missing="zero")
        return x, few, at_root, largest, sparsecoll.allreduce(comm, {}), sparsecoll.reduce(comm, {}, 3)

    results = simulate(4, program).results
    total = y_of([x for x, *_ in results])
    for rank, (_, few, at_root, largest, none, reduced) in enumerate(results):
        assert few == (total, 2) and at_root[1] == 2 and at_root[0] == (total if rank == 1 else None)
        assert (
            largest == {key(n): min(n, 3) for n in range(40)} and none == {} and reduced == ({} if rank == 3 else None)
        )


def test_errors_of_few_keys_are_the_same_on_all_ranks():
    def program(comm):
        wrong = comm.rank == 1
        for arguments, text in (
            ({"x": {"a": np.nan} if wrong else {"a": 1.0}}, "rank 1: x: expected finite values"),
            ({"op": "max" if wrong else "sum"}, "op: expected the same value on all ranks"),
            ({"algo": "dense" if wrong else "auto"}, "expected the same value on all ranks"),
            ({"format": "coo" if wrong else "auto"}, "expected the same value on all ranks"),
            ({"k": 1 if wrong else None}, "expected the same value on all ranks"),
            ({"op": "mean"}, "rank 0: op: expected 'sum' for int64, got 'mean'"),
            (
                {"x": SparseVector([1], np.ones(1), 3) if wrong else {"a": 1.0}},
                "^x: expected the same value on all ranks, got 'a type with keys' on ranks 0, 2, 'a vector' on rank 1$",
            ),
        ):
            with pytest.raises((ValueError, TypeError, sparsecoll.CommunicationError), match=text):
                sparsecoll.allreduce(comm, **{"x": {"a": 1}} | arguments)
        assert sparsecoll.allreduce(comm, {"a": 1} if wrong else {"a": 0.5}, op="mean") == {"a": 2 / 3}

    simulate(3, program)


def y_of(parts):
    """The sum of all parts."""
    total = Counter()
    for part in parts:
        total.update(part)
    return total


def test_the_root_alone_gets_a_sum_of_words():
    parts = [Counter({f"{rank}{number}": number for number in range(100)}) for rank in range(3)]

    def program(comm):
        y = sparsecoll.reduce(comm, parts[comm.rank], 2)
        return y, sparsecoll.reduce(comm, parts[comm.rank], 2, k=3)

    *others, (y, top) = simulate(3, program).results
    assert y == y_of(parts) and top == y_of([dict(part.most_common(3)) for part in parts])
    assert others == [(None, None)] * 2


def test_damaged_messages():
    for keys in (["a", "", "long"], [b"a\0", b"b"], []):
        text = words.Text.of(keys)
        message = text.packed()
        assert words.unpacked(message).keys("bytes" if b"b" in keys else "str") == keys
        for wrong in (message[:-1], message[:4], np.concatenate([message, message[-1:]])):
            with pytest.raises(sparsecoll.CommunicationError, match="do not hold"):
                words.unpacked(wrong)


def test_a_mapping_is_a_vector_of_its_keys():
    x = as_vector({7: 1, 2: 5})
    assert x == SparseVector([2, 7], np.array([5, 1]), 8)
    assert like(Counter(), x) == Counter({2: 5, 7: 1})


def test_a_series_is_refused_with_what_to_pass():
    pandas = pytest.importorskip("pandas")
    x = pandas.Series([1.0, 2.0], index=["a", "b"])
    with pytest.raises(TypeError, match=r"got pandas.*Series: use x\.to_dict\(\)"):
        as_vector(x)
    assert simulate(2, lambda comm: sparsecoll.allreduce(comm, x.to_dict())).results == [{"a": 2.0, "b": 4.0}] * 2


@pytest.mark.parametrize("call", ["allreduce", "reduce", "reduce_scatter", "allgather", "gather"])
def test_nothing_on_all_ranks_is_nothing(call):
    def program(comm):
        y = getattr(sparsecoll, call)(comm, Counter() if comm.rank else {})
        return None if y is None else y[-1] if isinstance(y, list) else y

    assert all(y in ({}, None) for y in simulate(2, program).results)


def test_keys_of_several_integer_types_are_one_type():
    keys = [{np.uint64(5): 1, 7: 1}, {np.uint64(2**63 - 2): 1, np.int64(7): 1}]
    assert simulate(2, lambda comm: sparsecoll.allreduce(comm, keys[comm.rank])).results[0] == {
        5: 1,
        7: 2,
        2**63 - 2: 1,
    }


def test_bools_count_as_integers_that_may_overflow():
    values = [{1: 2**63 - 1}, {1: True}]
    with pytest.raises(ValueError, match="rank"):
        simulate(2, lambda comm: sparsecoll.allreduce(comm, values[comm.rank]))
    values = [{1: 2**53}, {1: True}, {2: 0.5}]
    with pytest.raises(ValueError, match="rank"):
        simulate(3, lambda comm: sparsecoll.allreduce(comm, values[comm.rank]))
    assert simulate(2, lambda comm: sparsecoll.allreduce(comm, {1: True})).results[0] == {1: 2}
