"""Mappings with tuples as keys, whose results have equal keys, and classes of mappings."""

from collections import ChainMap, Counter, UserDict, namedtuple
from enum import IntEnum
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import sparsecoll
from sparsecoll import SparseVector, as_vector, like, simulate
from sparsecoll.collectives.convert import words

FEW = settings(max_examples=40, deadline=None)
ALGORITHMS = ["auto", "allgather", "sparcml", "densestream", "dense"]
Edge = namedtuple("Edge", "u v")
Colour = IntEnum("Colour", "RED GREEN")
EDGES = [
    Counter({(0, 1): 2, (1, 0): 5, (-7, 2**70): 1}),
    Counter(),
    Counter({(0, 1): 3, ("chr1", 1234): 1, ("the", "cat"): 7, (): 1}),
    Counter({("0", "1"): 1, (0, "1"): 2, ("a\0b", 'quoted"'): 1, ("\U0001f600", "\ud83d\ude00"): 1}),
    Counter({(1,): 9, (0, 1, 2): 1, ("0,1",): 4}),
]


@pytest.mark.parametrize("few", [words.FEW, 0])
@pytest.mark.parametrize("P", [1, 2, 3, 5])
def test_keys_that_are_tuples_are_summed_and_moved_by_every_collective(P, few, monkeypatch):
    monkeypatch.setattr(words, "FEW", few)
    total = sum(EDGES[:P], Counter())

    def program(comm):
        x = EDGES[comm.rank]
        sums = [sparsecoll.allreduce(comm, x, algo) for algo in ALGORITHMS]
        moved = sparsecoll.bcast(comm, x, P - 1), sparsecoll.alltoall(comm, [x] * P), sparsecoll.allgather(comm, x)
        split = sparsecoll.scatter(comm, x, P - 1), sparsecoll.reduce_scatter(comm, x)
        return sums, sparsecoll.reduce(comm, x, P - 1), moved, split

    results = simulate(P, program).results
    assert results[-1][1] == total
    for sums, _, (sent, exchanged, gathered), _ in results:
        for y in sums:
            assert type(y) is Counter and y == total and list(y) == list(results[0][0][0])
        assert sent == EDGES[P - 1] and exchanged == gathered == EDGES[:P]
        assert all(type(key) is tuple for key in sums[0])
    for part, whole in ((0, EDGES[P - 1]), (1, total)):
        assert dict(item for r in results for item in r[3][part].items()) == whole


def test_equal_tuples_are_one_key():
    keys = [(1, "a"), (np.int32(1), np.str_("a")), Edge(Colour.RED, "a")]

    def program(comm):
        return sparsecoll.allreduce(comm, {keys[comm.rank]: 1})

    assert simulate(3, program).results == [{(1, "a"): 3}] * 3
    assert like({(2, 1): 1, (1, 9): 1}, as_vector({(1, 9): 3, (2, 1): 4})) == {(1, 9): 3, (2, 1): 4}


@FEW
@given(
    parts=st.lists(
        st.dictionaries(st.lists(st.integers() | st.text(), max_size=3).map(tuple), st.integers(-9, 9)),
        min_size=1,
        max_size=4,
    )
)
def test_any_tuple_of_integers_and_text_is_a_key(parts):
    results = simulate(len(parts), lambda comm: sparsecoll.allreduce(comm, parts[comm.rank])).results
    expected = {key: sum(part.get(key, 0) for part in parts) for key in set().union(*parts)}
    assert all(y == expected for y in results)


def test_strings_that_are_no_valid_unicode_arrive_as_they_are():
    x = {"\ud83d\ude00": 1, "\U0001f600": 2, "\udc80": 3}
    assert simulate(2, lambda comm: sparsecoll.bcast(comm, x)).results == [x] * 2


class Words(Counter):
    pass


@pytest.mark.parametrize("kind", [Words, UserDict, ChainMap, MappingProxyType])
def test_a_mapping_of_another_class_is_refused_on_all_ranks(kind):
    def program(comm):
        for call in (sparsecoll.allreduce, sparsecoll.bcast, sparsecoll.reduce):
            with pytest.raises(TypeError, match=f"got {kind.__name__}: use dict"):
                call(comm, kind({"a": 1}) if comm.rank == 0 else {"a": 1})
        return sparsecoll.allreduce(comm, dict(kind({"a": 1})))

    assert simulate(2, program).results == [{"a": 2}] * 2


def test_a_damaged_name_of_a_class_is_an_error():
    from sparsecoll.collectives.convert import from_text, to_text
    from sparsecoll.collectives.convert.mappings import ToMapping

    text = to_text(ToMapping("Counter", "None"))
    assert type(from_text(text)(SparseVector([1], np.ones(1), 2))) is Counter
    for damaged in (text.replace("Counter", "os:getcwd"), text.replace('"None"', '"list"')):
        with pytest.raises(ValueError, match="expected the name of a mapping, got"):
            from_text(damaged)


@pytest.mark.parametrize("make", ["coo_array", "csr_array", "bsr_array"])
def test_coordinates_in_the_other_byte_order_are_read(make):
    sparse = pytest.importorskip("scipy.sparse")
    x = getattr(sparse, make)(sparse.coo_array((np.arange(1.0, 4), ([0, 1, 1], [3, 0, 70000])), shape=(2, 70001)))
    expected = sparsecoll.as_vector(x)
    names = ("row", "col") if make == "coo_array" else ("indices", "indptr")
    swapped = {name: getattr(x, name).astype(getattr(x, name).dtype.newbyteorder()) for name in names}
    if make == "coo_array":
        x.coords = tuple(swapped.values())
    else:
        x.indices, x.indptr = swapped.values()
    found = sparsecoll.as_vector(x)
    assert np.array_equal(found.indices, expected.indices) and np.array_equal(found.values, expected.values)


def test_subclasses_of_tensors_are_tensors():
    torch = pytest.importorskip("torch")

    class Mine(torch.Tensor):
        pass

    def program(comm):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.ones(3, dtype=dtype).as_subclass(Mine).requires_grad_()
            assert torch.equal(sparsecoll.bcast(comm, x.detach()), torch.ones(3, dtype=dtype))
            assert sparsecoll.allreduce(comm, x.detach(), "dense").to_dense().tolist() == [2.0] * 3

    simulate(2, program)
