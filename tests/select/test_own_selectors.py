"""Selectors of a user's own: what they return is checked on all ranks, and options that are no fields are refused."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

import sparsecoll
from sparsecoll import DenseVector, Residual, SparseVector, select
from sparsecoll.select import RandomK, Selector, TopK
from sparsecoll.vector.values import dtype_of


def heavy(n):
    return (np.random.default_rng(0).standard_normal(n) ** 3).astype(np.float32)


@dataclass
class Others(Selector):
    """Looks for the largest entries, and returns as many others."""

    name = "others"

    def select(self, x, k):
        x.topk(k)
        return SparseVector(np.arange(k), np.arange(1, k + 1, dtype=np.float32), x.length)


def test_what_a_selector_removed_and_does_not_return_is_put_back():
    residual, gradient = Residual(6), np.arange(1, 7, dtype=np.float32)
    taken = residual.take(gradient, Others(), 2)
    assert taken.values.tolist() == [1, 2] and residual.array.tolist() == [0, 0, 3, 4, 5, 6]


@dataclass
class Wrong(Selector):
    """A selector of a user's own that returns something else than entries of x."""

    name = "wrong"

    make: Callable[[SparseVector], Any] | None = None

    def select(self, x, k):
        return self.make(x.topk(k))


WRONG = [  # what it makes of the entries, and the error
    (
        lambda y: SparseVector(y.indices, y.values, y.length + 1),
        ValueError,
        "a vector of length 5000 as x has, got 5001",
    ),
    (lambda y: y.astype(np.float64), TypeError, "entries of float32 as x has, got float64"),
    (lambda y: y.to_dense(), TypeError, "a SparseVector, got ndarray"),
]


@pytest.mark.parametrize("make, kind, message", WRONG)
@pytest.mark.parametrize("name", [*sparsecoll.ALGORITHMS, "hitopk"])
def test_what_a_selector_returns_is_checked_on_all_ranks(name, make, kind, message):
    algorithm = sparsecoll.HiTopK if name == "hitopk" else sparsecoll.ALGORITHMS[name]
    if name in ("arctopk", "exdyna"):
        pytest.skip("selects by itself")
    x = heavy(5000)
    if name == "hitopk":
        message = message.replace("5000", r"\d+").replace("5001", r"\d+")

    def program(comm):
        algo = algorithm(selector=Wrong(make) if comm.rank == 0 else select.TopK())
        with pytest.raises(kind, match=f"rank 0: selector: expected .* to return {message}"):
            sparsecoll.allreduce(comm, x, algo, k=10, check=False)
        return sparsecoll.allreduce(comm, x, algorithm(), k=10).nnz

    assert min(sparsecoll.simulate(3, program).results) > 0


@pytest.mark.parametrize("make, kind, message", WRONG)
def test_what_a_selector_returns_is_checked_when_a_residual_is_taken(make, kind, message):
    x = heavy(5000)
    residual = sparsecoll.Residual(5000)
    with pytest.raises(kind, match=message):
        residual.take(x, Wrong(make), 10)


CHANGED = [  # entries that x does not have, or not with these values
    lambda x, k: x.topk(k).with_values(10 * x.topk(k).values),
    lambda x, k: SparseVector(np.arange(k), np.full(k, 7, x.dtype), x.length),
    lambda x, k: x.topk(k).with_values(np.full(k, np.nan, x.dtype)),
]


@dataclass
class Choosing(Selector):
    """A selector of a user's own."""

    name = "choosing"

    choose: Callable[..., Any] | None = None

    def select(self, x, k):
        return self.choose(x, k)


@pytest.mark.parametrize("choose", CHANGED)
@pytest.mark.parametrize("sparse", [False, True])
def test_a_selector_that_returns_other_entries_is_refused_and_nothing_is_lost(choose, sparse):
    x, text = np.arange(50, dtype=np.float32), "to return entries of x with their values, got others"
    residual = Residual(50)
    with pytest.raises(ValueError, match=text):
        residual.take(x, Choosing(choose), 5)
    assert (residual.array == x).all()
    given = DenseVector(x).to_sparse() if sparse else x

    def program(comm):
        with pytest.raises(ValueError, match=f"rank 1: selector: expected .* {text}"):
            algo = sparsecoll.Allgather(selector=Choosing(choose) if comm.rank == 1 else TopK())
            sparsecoll.allreduce(comm, given, algo, k=5, check=False)
        return sparsecoll.allreduce(comm, given, "allgather", k=5).nnz

    assert sparsecoll.simulate(2, program).results == [5, 5]


@pytest.mark.parametrize("dtype", ["bool", "int64", "float16", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("sparse", [False, True])
def test_entries_that_a_selector_of_ones_own_returns_are_taken(dtype, sparse):
    x = DenseVector(np.arange(50).astype(dtype_of(dtype)))
    x = x.to_sparse() if sparse else x
    for choose in (lambda x, k: x.topk(k), lambda x, k: x.threshold(1).topk(k), lambda x, k: RandomK().select(x, k)):
        y = sparsecoll.select.base.selected(Choosing(choose), x, 5)
        assert np.array_equal(y.values, x.to_dense()[y.indices])
    x = DenseVector(np.array([1, np.nan, np.inf], np.float32))
    assert sparsecoll.select.base.selected(Choosing(lambda x, k: x.topk(k)), x, 2).indices.tolist() == [1, 2]


class WithInit(Selector):
    name = "with_init"

    def __init__(self, share):
        self.share = share

    def select(self, x, k):
        return x.topk(max(1, int(k * self.share)))


class Annotated(TopK):
    known: ClassVar[int] = 3
    share: float = 0.5


@dataclass
class OtherInit(TopK):
    share: float = 0.5

    def __init__(self, part):
        self.share = part


class Without(TopK):
    """A class without options of its own."""

    known: ClassVar[int] = 3

    def select(self, x, k):
        return x.topk(k - 1)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: WithInit(0.5), "WithInit with an __init__ of its own: add @dataclass"),
        (Annotated, "Annotated, which is none, with share: add @dataclass"),
        (lambda: OtherInit(0.5), "OtherInit with an __init__ of part beside the fields share: make its options"),
    ],
)
def test_options_of_ones_own_selectors_are_fields(make, text):
    """Ranks compare fields, and a failed call sets the other attributes to their defaults."""
    with pytest.raises(TypeError, match=f"selector: expected a dataclass, whose options are its fields, got {text}"):
        sparsecoll.Allgather(selector=make())
    with pytest.raises(TypeError, match="selector: expected a dataclass"):
        Residual(5).take(np.ones(5, np.float32), make(), 2)
    residual = Residual(5)
    assert residual.take(np.ones(5, np.float32), Without(), 3).nnz == 2 and residual.array.sum() == 3
    assert sparsecoll.Allgather(selector=Without()).selector is not None


@pytest.mark.parametrize("algorithm", sparsecoll.ALGORITHMS.values())
def test_selectors_are_objects(algorithm):
    for wrong in ("dgc", select.TopK, 5):
        with pytest.raises(TypeError, match=r"selector: expected an object of sparsecoll\.select or None, got"):
            algorithm(selector=wrong)
