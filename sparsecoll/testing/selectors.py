"""The contract of selectors."""

from __future__ import annotations

import copy

import numpy as np

from sparsecoll.errors import NonFiniteError
from sparsecoll.residual import Residual
from sparsecoll.select import Selector
from sparsecoll.testing.cases import case_of, check_class, expect, same_bits
from sparsecoll.testing.formats import check_vector
from sparsecoll.vector import DenseVector, SparseVector


def check_selector(selector: Selector) -> None:
    """Check the contract of selectors; takes about a second.

    `select` returns entries of x, unchanged; in one pass with error feedback (`Residual.take`), it selects the same
    ones, and nothing is lost, also if it raises; a saved state continues with the same choices.

    Args:
        selector: an object of the class; calls are made on copies.

    Raises:
        AssertionError: The contract is broken; the text names the case.
        TypeError: The class has no name, or its options are not the fields of a dataclass.
    """
    expect(isinstance(selector, Selector), f"selector: expected an object of sparsecoll.select, got {selector!r}")
    check_class("selector", selector)
    for dtype in ("float16", "float32", "float64", "int32"):
        x = (_heavy(20_000) * (50 if dtype == "int32" else 1)).astype(dtype)
        for source in (DenseVector(x), SparseVector.from_dense(x)):
            with case_of(f"300 of 20,000 values of {dtype}, from a {type(source).__name__}"):
                _select(selector, source, 300)
    few = (np.zeros(50), 5), (np.ones(50), 5), (np.empty(0), 3), (np.ones(3), 9), (_heavy(50), 0), (_heavy(9), 9)
    for x, k in few:
        with case_of(f"{k} of {x.size} values"):
            _select(selector, DenseVector(x), k)
    for dtype in ("float32", "float64", "float16"):
        with case_of(f"error feedback in {dtype}"):
            _feedback(selector, dtype)
    with case_of("a selector that raises takes nothing"):
        residual, gradient = Residual(5000), np.where(np.arange(5000) % 2, _heavy(5000), np.nan).astype(np.float32)
        try:
            residual.take(gradient, copy.deepcopy(selector), 500)
        except NonFiniteError:
            np.testing.assert_array_equal(residual.array, gradient)
    with case_of("state that is saved and loaded"):
        first, second = copy.deepcopy(selector), copy.deepcopy(selector)
        for step in range(3):
            first.select(DenseVector(_heavy(20_000) * np.float32(1 + step / 50)), 200)
        second.load_state_dict(first.state_dict())
        expect(same_bits(*(own.select(DenseVector(_heavy(20_000)), 200) for own in (first, second))), "other choices")


def _heavy(n: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return (np.random.default_rng(0).standard_normal(n) ** 3).astype(np.float32)


def _select(selector: Selector, x: DenseVector | SparseVector, k: int) -> None:
    chosen = copy.deepcopy(selector).select(x, k)
    check_vector(chosen, x.length)
    expect(chosen.dtype == x.dtype, f"expected entries of {x.dtype}, got {chosen.dtype}")
    np.testing.assert_array_equal(chosen.values, x.to_dense()[chosen.indices], err_msg="other entries than those of x")


def _feedback(selector: Selector, dtype: str) -> None:
    """Check that take = compensate, select, clear, for thresholds that select as many as wanted, too few, too many."""
    rng, fused, plain = np.random.default_rng(3), Residual(30_000, dtype), Residual(30_000, dtype)
    mine, theirs = copy.deepcopy(selector), copy.deepcopy(selector)
    for _ in range(8):
        gradient = (rng.standard_normal(30_000) ** 3 * rng.choice([1, 1, 8]) / 8).astype(np.float32)
        before = fused.array.copy()
        taken = fused.take(gradient, mine, 400, scale=0.5)
        acc = plain.compensate(gradient, 0.5).values
        total = before + np.dtype(dtype).type(0.5) * gradient.astype(dtype)
        np.testing.assert_array_equal(acc, total)
        chosen = theirs.select(DenseVector(acc), 400)
        plain.update(chosen)
        expect(same_bits(taken, chosen), "expected the entries of the separate steps")
        np.testing.assert_array_equal(fused.array, plain.array)
        np.testing.assert_array_equal(fused.array + taken.to_dense(), total, err_msg="entries are lost")
