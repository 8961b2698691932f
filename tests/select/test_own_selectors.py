"""Selectors of a user's own, with error feedback and in algorithms (their contract: tests/test_own_classes.py)."""

from dataclasses import dataclass, field

import numpy as np
import pytest

import sparsecoll
from sparsecoll import DenseVector, Residual, select
from sparsecoll.select import Selector, TopK


@dataclass
class Others(Selector):
    """Looks for the largest entries, and returns as many others."""

    name = "others"

    def select(self, x, k):
        x.topk(k)
        return x.take(np.arange(k))


def test_what_a_selector_removed_and_does_not_return_is_put_back():
    residual, gradient = Residual(6), np.arange(1, 7, dtype=np.float32)
    taken = residual.take(gradient, Others(), 2)
    assert taken.values.tolist() == [1, 2] and residual.array.tolist() == [0, 0, 3, 4, 5, 6]


@dataclass
class Block(Selector):
    """Returns a view of the values, which `take` clears."""

    name = "block"

    def select(self, x, k):
        return sparsecoll.SparseVector(np.arange(k), x.to_dense()[:k], x.length)


def test_entries_may_be_a_view_of_the_values():
    residual = Residual(6)
    sent = residual.take(np.arange(1, 7, dtype=np.float32), Block(), 2)
    assert sent.values.tolist() == [1, 2] and residual.array.tolist() == [0, 0, 3, 4, 5, 6]


class Without(TopK):
    """A class without options of its own."""

    def select(self, x, k):
        return x.topk(k - 1)


def test_a_subclass_without_options_needs_no_decorator():
    residual = Residual(5)
    assert residual.take(np.ones(5, np.float32), Without(), 3).nnz == 2 and residual.array.sum() == 3
    x, algo = np.arange(9.0), sparsecoll.Allgather(selector=Without())
    assert sparsecoll.simulate(2, lambda comm: sparsecoll.allreduce(comm, x, algo, k=3).nnz).results == [2, 2]


@pytest.mark.parametrize("algorithm", sparsecoll.ALGORITHMS.values())
def test_selectors_are_objects(algorithm):
    for wrong in ("dgc", select.TopK, 5):
        with pytest.raises(TypeError, match=r"selector: expected an object of sparsecoll\.select or None, got"):
            algorithm(selector=wrong)


class Dense(Selector):
    """Returns what it keeps as a dense vector."""

    name = "dense"

    def select(self, x, k):
        values = x.to_dense()
        return DenseVector(np.where(abs(values) >= np.sort(abs(values))[-k], values, 0))


def test_a_selector_may_return_a_dense_vector():
    residual, x = Residual(9, np.float64), np.array([0, 3.0, -1, 5, 0, 2, -4, 0, 1])
    taken = residual.take(x, Dense(), 3)
    assert taken.indices.tolist() == [1, 3, 6] and residual.array.tolist() == [0, 0, -1, 0, 0, 2, 0, 0, 1]
    residual.restore(taken)
    assert residual.array.tolist() == x.tolist()


@dataclass
class Counting(Selector):
    """Has a dict among its state."""

    name = "counting"

    seen: dict = field(default_factory=dict, init=False)

    def select(self, x, k):
        self.seen[str(k)] = self.seen.get(str(k), 0) + 1
        return x.topk(k)


def test_a_dict_may_be_state():
    one, other = Counting(), Counting()
    one.select(DenseVector(np.ones(9)), 2)
    other.load_state_dict(one.state_dict())
    assert other.seen == {"2": 1}
