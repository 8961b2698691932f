"""RowSparse: construction, conversions, arithmetic, and what it refuses."""

import pickle

import numpy as np
import pytest

import sparsecoll
from sparsecoll import RowSparse


def x_of(dtype=np.float64):
    return RowSparse([1, 4], np.array([[2, 1], [0, 3]], dtype), 6)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "float32", "complex64"])
def test_pairs_in_any_order_are_summed(dtype):
    rng = np.random.default_rng(0)
    ids, values = rng.integers(0, 9, 40), rng.integers(0, 3, (40, 2)).astype(dtype)
    expected = np.zeros((9, 2), dtype)
    (np.logical_or if dtype == "bool" else np.add).at(expected, ids, values)
    x = RowSparse.from_pairs(ids, values, 9)
    assert np.array_equal(x.to_dense(), expected) and x.rows.tolist() == sorted(set(ids.tolist()))


def test_other_ways_to_combine_pairs():
    ids, values = [4, 1, 4], np.array([[1.0], [2.0], [-3.0]])
    assert RowSparse.from_pairs(ids, values, 6, "min").values.tolist() == [[2], [-3]]
    assert RowSparse.from_pairs(ids, values, 6, "max").values.tolist() == [[2], [1]]
    assert RowSparse.from_pairs(ids, values, 6, "replace").values.tolist() == [[2], [-3]]
    assert RowSparse.from_pairs([4, 1], values[:2], 6, None).rows.tolist() == [1, 4]
    with pytest.raises(ValueError, match="got 4 more than once"):
        RowSparse.from_pairs(ids, values, 6, None)


def test_sums_of_half_precision_are_formed_in_float32():
    x = RowSparse.from_pairs([0] * 4096, np.ones((4096, 1), np.float16), 1)
    assert x.values[0, 0] == 4096  # one by one in float16 they stop at 2048


def test_arithmetic_and_comparison():
    x = x_of()
    assert (x + x) / 2 == x and 2 * x == x * 2 == x + x and sum([x, x]) == x + x
    assert (x - x).nnz == 2 and not (x - x).values.any()
    assert x != RowSparse([1, 4], x.values, 7) and x != 3 and x.astype(np.float32).dtype == np.float32
    assert np.array_equal(np.asarray(x), x.toarray()) and pickle.loads(pickle.dumps(x)) == x
    assert (len(x), x.nnz, x.n, x.d, x.shape, x.density) == (6, 2, 6, 2, (6, 2), 1 / 3)
    assert x[1:5] == RowSparse([0, 3], x.values, 4) and x.to_dense(fill=7)[0].tolist() == [7, 7]
    assert x[4].tolist() == [0, 3] and x[-6].tolist() == [0, 0] and RowSparse.from_dense(x.to_dense()) == x
    with pytest.raises(TypeError, match=r"use \.to_dense"):
        np.sum(x)
    with pytest.raises(ValueError, match="one shape"):
        x + RowSparse.empty(7, 2, float)


def test_rows_are_added_to_a_table():
    for dtype in (np.float16, np.float32, np.int32):
        table = np.ones((6, 2), dtype)
        x_of(dtype).add_to(table)
        assert np.array_equal(table, 1 + x_of(dtype).to_dense())
    with pytest.raises(ValueError, match="expected a contiguous array of shape"):
        x_of().add_to(np.ones((2, 6)).T)


def test_a_table_that_cannot_take_the_rows_is_left_as_it_is():
    table = np.zeros((6, 2), np.float32)
    table.flags.writeable = False
    with pytest.raises(ValueError, match="table: expected an array that can be written to"):
        x_of().add_to(table)
    whole = np.zeros((6, 2), np.int64)
    for dtype, into in ((np.float32, whole), (complex, whole.astype(float))):
        with pytest.raises(TypeError, match=f"table: expected a dtype to which {np.dtype(dtype)} can be added, got"):
            x_of(dtype).add_to(into)
    assert not table.any() and not whole.any()


@pytest.mark.parametrize(
    "rows, values, n, error, text",
    [
        ([4, 1], np.ones((2, 2)), 6, ValueError, "unsorted: 4 at position 0, then 1"),
        ([1, 1], np.ones((2, 2)), 6, ValueError, "repeated: 1 at position 0, then 1"),
        ([1, 6], np.ones((2, 2)), 6, ValueError, "rows: expected below n 6, got 6"),
        ([-1, 2], np.ones((2, 2)), 6, ValueError, "at least 0, got -1"),
        ([1, 2], np.ones(2), 6, ValueError, r"got shapes \(2,\) and \(2,\)"),
        ([1, 2], np.ones((2, 0)), 6, ValueError, "d of at least 1"),
        ([1, 2], np.ones((3, 2)), 6, ValueError, r"got shapes \(2,\) and \(3, 2\)"),
        ([1.5], np.ones((1, 2)), 6, TypeError, "rows: expected integers"),
        ([1], np.ones((1, 2), object), 6, TypeError, "values: expected dtype"),
        ([1], np.ones((1, 2)), 2.0, TypeError, "n: expected an integer"),
        ([], np.ones((0, 2)), -1, ValueError, "n: expected 0 <= n"),
    ],
)
def test_wrong_rows_and_values_are_refused(rows, values, n, error, text):
    with pytest.raises(error, match=text):
        RowSparse(rows, values, n)


def test_a_residual_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="gradient: expected shape"):
        sparsecoll.RowResidual(5, 2).compensate(x_of())
    with pytest.raises(ValueError, match=r"contributed: expected shape \(5, 2\), got \(6, 2\)"):
        sparsecoll.RowResidual(5, 2).update(x_of())


@pytest.mark.parametrize("use", [sparsecoll.RowResidual.compensate, sparsecoll.RowResidual.update])
def test_a_residual_refuses_what_would_lose_more_than_digits(use):
    residual = sparsecoll.RowResidual(6, 2)
    residual.compensate(x_of())
    for wrong, text in (
        (1j * x_of(), "expected a dtype that can be added to float32, got complex"),
        (x_of().to_dense(), "expected a RowSparse, got ndarray"),
    ):
        with pytest.raises(TypeError, match=text):
            use(residual, wrong)
    assert residual.rows == x_of()


def test_the_largest_rows_are_found_where_squares_of_float32_vanish():
    x = RowSparse([0, 1, 2, 4], np.array([[1.0], [1e-25], [3e-25], [0.0]], np.float32), 5)
    assert x.topk(2).rows.tolist() == [0, 2] and x.topk(3).rows.tolist() == [0, 1, 2]
