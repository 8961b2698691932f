"""What users do with a SparseVector, in the words of NumPy and SciPy."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from sparsecoll import DenseVector, RowSparse, SparseVector, as_vector
from sparsecoll.vector import VALUE_DTYPES
from sparsecoll.vector.values import common_dtype

FEW = settings(max_examples=40, deadline=None)
X = SparseVector([1, 4], np.array([2.0, -3.0]), 6)
Y = SparseVector([0, 4], np.array([1.0, 5.0]), 6)


def of_scipy(indices, values, length):
    sparse = pytest.importorskip("scipy.sparse")
    return as_vector(sparse.coo_array((values, (indices,)), shape=(length,)))


@pytest.mark.parametrize("make", [SparseVector, SparseVector.from_pairs, of_scipy])
def test_an_index_buffer_may_be_filled_again(make):
    buffer = np.array([1, 4, 7], np.int32 if make is of_scipy else np.uint32)
    x = make(buffer, np.array([1.0, 2.0, 3.0]), 10)
    buffer[2] = 2_000_000_000
    assert x.indices.tolist() == [1, 4, 7]


def test_bad_arguments_of_methods_are_named():
    for call, text in (
        (lambda: X.topk(-1), "k: expected at least 0, got -1"),
        (lambda: as_vector(np.ones(3)).topk(-1), "k: expected at least 0, got -1"),
        (lambda: RowSparse([1], np.ones((1, 2)), 3).topk(-1), "k: expected at least 0, got -1"),
        (lambda: X.to_scipy(format="foo"), "format: expected "),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    with pytest.raises(TypeError, match="complex numbers"):
        SparseVector.from_pairs([0, 0], np.array([1j, 2]), 1, op="max")
    assert X.to_scipy(6).shape == (6,)


@FEW
@given(
    seed=st.integers(0, 1000),
    size=st.integers(0, 60),
    length=st.sampled_from([7, 2**32, 2**32 + 1, 2**63 - 1]),
    op=st.sampled_from(["sum", "min", "max", "replace"]),
    dtype=st.sampled_from(["float16", "float32", "float64", "int32", "int64"]),
)
def test_pairs_in_any_order_are_combined_as_given(seed, size, length, op, dtype):
    rng = np.random.default_rng(seed)
    few = np.unique(rng.integers(0, length, 10))
    indices, values = rng.choice(few, size), rng.integers(-9, 9, size).astype(dtype)
    expected = {}
    combine = {"sum": lambda a, b: a + b, "min": min, "max": max, "replace": lambda a, b: b}[op]
    for index, value in zip(indices.tolist(), values, strict=True):
        expected[index] = combine(expected[index], value) if index in expected else value
    x = SparseVector.from_pairs(indices, values, length, op)
    assert x.dtype == dtype and x.length == length
    assert dict(zip(x.indices.tolist(), x.values, strict=True)) == expected
    assert x.indices.tolist() == sorted(expected)
    assert SparseVector(x.indices, x.values, length) == x


def test_sums_of_pairs_are_formed_in_the_order_given():
    indices, values = np.array([3, 1, 3, 1, 3]), np.array([1e16, 1.0, 1.0, 2.0, -1e16])
    assert SparseVector.from_pairs(indices, values, 5).values.tolist() == [3.0, (1e16 + 1.0) - 1e16]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_pairs_in_16_bits_are_formed_in_32_and_rounded_once(dtype):
    dtype = dtype if dtype == "float16" else pytest.importorskip("ml_dtypes").bfloat16
    given = {7: [1] * 3000, 2: [6e4, 6e4, -6e4], 4: [6e4, 6e4]}
    indices = np.repeat(list(given), [len(values) for values in given.values()])
    x = SparseVector.from_pairs(indices, np.concatenate(list(given.values())).astype(dtype), 9)
    assert x.dtype == dtype and x.indices.tolist() == [2, 4, 7]
    last = 65504 if dtype == "float16" else 120_000  # a finite sum stays finite
    assert x.values.tolist() == np.array([6e4, last, 3000]).astype(dtype).tolist()


def test_values_of_pairs_that_are_sorted_are_not_copied():
    values = np.array([2.0, -3.0])
    assert np.shares_memory(SparseVector.from_pairs([1, 4], values, 6).values, values)


@pytest.mark.parametrize("dtype", ["float32", "complex128", "int8"])
@pytest.mark.parametrize("room", [0, 1, 3, 5, 9, 100_000])
def test_parts_are_collected_as_they_come(dtype, room):
    whole = SparseVector([0, 2, 3, 7, 8], np.arange(5).astype(dtype), 9)
    for edges in ([0, 9], [0, 3, 9], [0, 0, 1, 4, 4, 9, 9]):
        parts = whole.split(edges)
        assert SparseVector.collect(iter(parts), room) == SparseVector.concatenate(parts) == whole
    assert SparseVector.collect([SparseVector.empty(9, dtype)], 0) == SparseVector.empty(9, dtype)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([3, -1], np.ones(2), 5), ValueError, "indices: expected at least 0, got -1"),
        (([3, 5], np.ones(2), 5), ValueError, "indices: expected below length 5, got 5"),
        (([3], np.ones(2), 5), ValueError, "two 1-D arrays of one size"),
        (([3, 1, 3], np.ones(3), 5, None), ValueError, "unique indices for op=None, got 3 more than once"),
        (([3], np.ones(1), 5, "mean"), ValueError, "op: expected 'sum', 'min', 'max', 'replace' or None, got 'mean'"),
        (([1.5], np.ones(1), 5), TypeError, "indices: expected integers, got float64"),
        (([1], np.ones(1, "m8[s]"), 5), TypeError, r"got timedelta64\[s\]: use x.view\(np.int64\)"),
        (([1], np.ones(1, np.longdouble), 5), TypeError, r"use x.astype\(np.float64\)"),
        (([1], np.array(["a"]), 5), TypeError, "values: expected dtype .* got <U1$"),
    ],
)
def test_pairs_that_are_invalid(arguments, error, text):
    with pytest.raises(error, match=text):
        SparseVector.from_pairs(*arguments)


def test_values_of_the_other_byte_order_are_converted():
    values = np.array([2.0, -3.0]).astype(">f8")
    assert SparseVector([1, 4], values, 6) == X and SparseVector([1, 4], values, 6).dtype.isnative
    assert SparseVector(np.array([1, 4], ">i8"), X.values, 6) == X
    dense = np.array([[1, 2]], ">i4")
    assert as_vector(dense).values.tolist() == [1, 2] and as_vector(dense).dtype == np.int32
    rows = RowSparse([1], np.ones((1, 2)), 3)
    for dtype in (">f8", ">f4", ">f2", ">i4", ">c16", np.float32):
        own = np.dtype(dtype).newbyteorder("=")
        for x in (X.astype(dtype), as_vector(np.ones(3)).astype(dtype), rows.astype(dtype)):
            assert x.dtype == own and x.dtype.isnative and x.topk(1).nnz == 1
        assert SparseVector.empty(3, dtype).dtype.isnative and RowSparse.empty(3, 2, dtype).dtype.isnative
        assert DenseVector.zeros(3, dtype, X).dtype == X.with_values(np.ones(2, dtype)).dtype == own
        assert SparseVector.merge([X, X], np.dtype(dtype)).astype(np.complex128) == 2 * X.astype(complex)


def test_values_of_any_layout_are_stored_contiguous():
    table = np.arange(1.0, 7).reshape(2, 3)
    rows = RowSparse([1, 4], table, 6).with_values(np.asfortranarray(table))
    assert rows + rows == 2 * RowSparse([1, 4], table, 6)
    strided = np.array([2.0, 0, -3.0, 0])[::2]
    for x in (X.with_values(strided), as_vector(strided), SparseVector([1, 4], strided, 6)):
        assert x.values.flags.c_contiguous and x.topk(1).values.tolist() == [-3]
    with pytest.raises(ValueError, match=r"values: expected shape \(2,\), got \(1,\)"):
        X.with_values(np.ones(1))


def test_what_an_array_has():
    assert X.shape == (6,) and X.size == len(X) == 6 and X.ndim == 1 and X.nnz == 2
    assert repr(X) == "SparseVector(length=6, nnz=2, density=0.333, dtype=float64, entries={1: 2, 4: -3})"
    long = SparseVector.from_dense(np.arange(1, 100))
    assert repr(long).endswith("entries={0: 1, 1: 2, 2: 3, 3: 4, ...})")
    assert repr(SparseVector.empty(3, np.float32)).endswith("entries={})")
    for wrong in (bool, iter, reversed, list, hash):
        with pytest.raises((TypeError, ValueError)):
            wrong(X)
    assert len(SparseVector.empty(2**63 - 1, np.float32)) == 2**63 - 1


def test_indices_and_slices_are_those_of_an_array():
    dense = X.to_dense()
    for index in range(-6, 6):
        assert X[index] == dense[index] and X[np.int64(index)].dtype == np.float64
    for start in (None, 0, 1, 2, 5, 6, 9, -2, -9):
        for stop in (None, 0, 1, 4, 5, 6, 9, -2, -9):
            part = X[start:stop]
            np.testing.assert_array_equal(part.to_dense(), dense[start:stop])
            assert part.length == dense[start:stop].size and part.indices.dtype == np.uint32
    for wrong, error in ((6, IndexError), (-7, IndexError), (1.0, TypeError), (True, TypeError), ([1], TypeError)):
        with pytest.raises(error, match="index: expected"):
            X[wrong]
    with pytest.raises(IndexError, match="got step 2"):
        X[::2]


def test_indexing_beyond_32_bits():
    x = SparseVector([5, 2**40, 2**62], np.array([1, 2, 3]), 2**63 - 1)
    assert (x[2**40], x[2**40 + 1], x[-1], x[2**62]) == (2, 0, 0, 3)
    part = x[2**40 - 1 : 2**40 + 2**31]
    assert part.indices.tolist() == [1] and part.indices.dtype == np.uint32
    assert SparseVector([1], np.ones(1), 2**32)[1 : 2**32].length == 2**32 - 1
    assert SparseVector([1], np.ones(1), 2**32)[2**32 :].length == 0


def test_arithmetic_is_that_of_arrays():
    dense, other = X.to_dense(), Y.to_dense()
    for mine, theirs in (
        (X + Y, dense + other),
        (X - Y, dense - other),
        (-X, -dense),
        (2 * X, 2 * dense),
        (X * np.float32(0.5), dense * 0.5),
        (np.float32(2) * X, 2 * dense),
        (np.array(2.0) * X, 2 * dense),
        (X / 4, dense / 4),
        (sum([X, Y]), dense + other),
        (abs(X), abs(dense)),
        (+X, dense),
    ):
        assert isinstance(mine, SparseVector)
        np.testing.assert_array_equal(np.asarray(mine), theirs)
    assert (X.values.tolist(), Y.values.tolist()) == ([2, -3], [1, 5])
    for wrong in (lambda: X + 1, lambda: X * dense, lambda: dense * X, lambda: X * Y, lambda: 1 / X, lambda: X + dense):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(ValueError, match=r"SparseVector: expected two of one shape, got \(6,\) and \(5,\)"):
        X + SparseVector.empty(5, np.float64)
    assert (X * 1j).values.tolist() == [2j, -3j]


@pytest.mark.parametrize("a", ["float16", "float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("b", ["float16", "float32", "float64", "int32", "int64"])
def test_dtypes_of_sums_are_numpys(a, b):
    total = X.astype(a) + Y.astype(b)
    assert total.dtype == np.result_type(np.dtype(a), np.dtype(b))
    np.testing.assert_array_equal(total.to_dense(), X.to_dense() + Y.to_dense())
    assert (X.astype(a) * 2).dtype == a and (X.astype(a) / 2).dtype == (np.ones(1, a) / 2).dtype


@pytest.mark.parametrize("b", ["bool", "int8", "uint8", "uint64"])
@pytest.mark.parametrize("a", ["int16", "uint32", "float32", "complex64"])
def test_differences_of_two_dtypes_are_numpys(a, b):
    """What is subtracted is negated in the dtype of the result: -1 of uint8 is 255, and -(-128) of int8 is -128."""
    first, second = np.array([5, 1], a), np.array([1, 0 if b == "bool" else np.iinfo(b).min], b)
    difference = SparseVector([1, 3], first, 6) - SparseVector([1, 3], second, 6)
    assert difference.dtype == (first - second).dtype and difference.values.tolist() == (first - second).tolist()


def beside_bfloat16(dtype):
    """Return the dtype of a sum of bfloat16 and another dtype, as torch has it."""
    return dtype if dtype[:7] in ("float32", "float64", "complex") else "float32" if dtype == "float16" else "bfloat16"


@pytest.mark.parametrize("other", VALUE_DTYPES)
@pytest.mark.parametrize("operation", ["a + b", "b + a", "a - b", "b - a"])
def test_bfloat16_beside_every_dtype(operation, other):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    values = {"a": np.array([1.5, 3], bfloat16), "b": np.array([1, 0], other)}
    for make in (lambda v: SparseVector([1, 4], v, 6), lambda v: RowSparse([1, 4], v[:, None], 6)):
        y = eval(operation, {name: make(value) for name, value in values.items()})
        assert y.dtype.name == beside_bfloat16(other)
        expected = eval(operation, {name: value.astype(np.complex128) for name, value in values.items()})
        assert y.values.ravel().tolist() == expected.tolist()


def test_products_with_bfloat16_are_those_of_torch():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    x, dtypes = X.astype(bfloat16), {"bfloat16": bfloat16} | {name: name for name in VALUE_DTYPES[:-1]}
    for name, dtype in dtypes.items():
        factor = np.ones(1, dtype)[0]
        for y in (x * factor, factor * x, x / factor, x * np.array(factor), SparseVector([0], factor[None], 6) * x[1]):
            assert y.dtype.name == beside_bfloat16(name)
    for factor in (2, 0.1, True):
        for y in (factor * x, x / factor):
            assert y.dtype == bfloat16
    assert (x * 0.1).values.tolist() == (x.values.astype(np.float32) * np.float32(0.1)).astype(bfloat16).tolist()
    assert (x * 1j).values.tolist() == [2j, -3j] and (x * 1j).dtype == np.complex64


def test_types_without_a_sum_are_refused_by_name():
    bools = SparseVector([1], np.ones(1, bool), 3)
    for do in (lambda: -bools, lambda: bools - bools):
        with pytest.raises(TypeError, match=r"SparseVector: expected numbers for -, got bool: use x.astype\(np.int8\)"):
            do()
    with pytest.raises(TypeError, match=r"expected dtypes that can be added, got datetime64.* and float32"):
        common_dtype(np.dtype("M8[s]"), np.dtype(np.float32))


def test_equal_vectors_have_the_same_entries():
    assert X.copy() == X and X.astype(np.int32) == X
    for other in (Y, 2 * X, X[:5], SparseVector([1, 3, 4], np.array([2.0, 0.0, -3.0]), 6), None, 3):
        assert other != X
    nan = SparseVector([1], np.array([np.nan]), 3)
    assert nan != nan.copy()  # as in NumPy


@pytest.mark.parametrize("do", ["x == a", "a == x", "x != a", "x + a", "a + x", "x - a"])
def test_arrays_and_matrices_are_refused_rather_than_unequal(do):
    for dense in (X.to_dense(), X.to_scipy(format="csr", shape=(2, 3)) if "a +" not in do else X.to_dense()):
        with pytest.raises(
            TypeError, match=r"SparseVector: expected another SparseVector, got .*: use x\.to_dense\(\)"
        ):
            eval(do, {"x": X, "a": dense})


def test_a_dtype_that_is_not_supported_is_refused():
    for dtype in (str, np.longdouble, object):
        with pytest.raises(TypeError, match="values: expected dtype bool, int8"):
            X.astype(dtype)


def test_copies_and_pickles():
    for made in (X.copy(), copy.copy(X), copy.deepcopy(X), *(pickle.loads(pickle.dumps(X, p)) for p in range(2, 6))):
        assert made == X and made.dtype == X.dtype and type(made) is SparseVector
    assert not np.shares_memory(X.copy().values, X.values) and not np.shares_memory(X.copy().indices, X.indices)


def test_as_an_array():
    dense = X.to_dense()
    np.testing.assert_array_equal(np.asarray(X), dense)
    np.testing.assert_array_equal(X.toarray(), dense)
    np.testing.assert_array_equal(np.array(X, dtype=np.int32, copy=True), dense.astype(np.int32))
    assert np.asarray(X, dtype=np.float32).dtype == np.float32 and np.array(X).dtype == np.float64
    with pytest.raises(ValueError, match="copy"):
        X.__array__(copy=False)
    for function in (np.sum, np.mean, np.flatnonzero):
        with pytest.raises(TypeError, match=r"use \.to_dense"):
            function(X)


@pytest.mark.parametrize("form", ["coo", "csr", "csc", "bsr", "lil", "dok", "dia"])
def test_to_and_from_scipy(form):
    sparse = pytest.importorskip("scipy.sparse")
    dense = X.to_dense().reshape(2, 3)
    x = X.to_scipy((2, 3), form)
    assert SparseVector.from_scipy((x * (1 + 1j)).real).topk(1).values.tolist() == [-3]  # whose data has strides
    assert x.format == form and isinstance(x, getattr(sparse, f"{form}_array"))
    np.testing.assert_array_equal(x.toarray(), dense)
    assert SparseVector.from_scipy(x) == X
    with pytest.raises(ValueError, match=r"shape: expected 6 coordinates, got shape \(2, 4\)"):
        X.to_scipy((2, 4), form)


def test_to_scipy_in_one_dimension():
    sparse = pytest.importorskip("scipy.sparse")
    if sparse.coo_array(np.ones(2)).ndim != 1:
        pytest.skip("this SciPy has no arrays of one dimension")
    x = X.to_scipy()
    assert x.shape == (6,) and np.shares_memory(x.data, X.values)
    assert SparseVector.from_scipy(x) == X
    long = SparseVector([2**40], np.ones(1), 2**41)
    assert SparseVector.from_scipy(long.to_scipy()) == long
    with pytest.raises(TypeError, match="x: expected a SciPy sparse array or matrix, got ndarray"):
        SparseVector.from_scipy(np.eye(2))


@pytest.mark.parametrize("dtype", [name for name in VALUE_DTYPES if name != "bfloat16"])
def test_every_type_of_values(dtype):
    x = SparseVector.from_pairs([4, 1, 4, 7], np.array([1, 2, 1, 0], dtype), 9)
    assert x.dtype == dtype and x.values.tolist() == ([2, 2, 0] if dtype != "bool" else [True, True, False])
    assert (x + x).dtype == dtype and x[4] == x.values[1] and SparseVector.from_dense(x.to_dense()).nnz == 2
    assert x.topk(1).indices.tolist() == [1] and x.threshold(0.5).indices.tolist() == [1, 4]
    swapped = SparseVector([1], np.ones(1, np.dtype(dtype).newbyteorder()), 9)
    assert swapped.dtype == dtype and swapped.dtype.isnative


def test_magnitudes_of_complex_and_unsigned_values():
    x = SparseVector([0, 1, 2, 3], np.array([3 + 4j, -6, 5j, 1e308 + 1.7e308j]), 4)
    assert x.topk(2).indices.tolist() == [1, 3] and x.threshold(5).nnz == 4 and x.first_not_finite() is None
    assert SparseVector([2], np.array([complex(0, np.nan)]), 4).first_not_finite() == 2
    large = SparseVector([0, 1], np.array([2**64 - 1, 2**63], np.uint64), 4)
    assert abs(x).values[0] == 5 and abs(x).dtype == np.float64
    assert large.topk(1).indices.tolist() == [0] and SparseVector([0], np.array([-128], np.int8), 1).threshold(128).nnz


@pytest.mark.parametrize("kernels", ["", "reference"])
def test_a_row_as_long_as_its_indices_can_name(kernels, monkeypatch):
    """2^32 columns have indices of uint32, which does not hold their number."""
    monkeypatch.setenv("SPARSECOLL_KERNELS", kernels)
    x = SparseVector([5, 2**32 - 1], np.array([1.0, 2.0]), 2**32)
    matrix = x.to_scipy((1, 2**32), "csr")
    assert matrix.indices.tolist() == [5, 2**32 - 1] and matrix.indptr.tolist() == [0, 2]
    assert SparseVector.from_scipy(matrix).indices.tolist() == [5, 2**32 - 1]
