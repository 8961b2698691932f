"""Folds equal NumPy's ufuncs where these are defined."""

import numpy as np
import pytest

from sparsecoll.kernels import reference
from sparsecoll.kernels.reference.folds import FOLDS

INTEGERS = ["bool", "int64"]
CASES = [(dtype, fold) for dtype in INTEGERS for fold in FOLDS]
CASES += [(dtype, fold) for dtype in ("float32",) for fold in ("min", "max", "prod", "differ", "last")]
CASES += [(dtype, fold) for dtype in ("complex64", "float16") for fold in ("prod", "differ", "last")]
UFUNCS = {"min": np.minimum, "max": np.maximum, "prod": np.multiply, "and": np.bitwise_and, "or": np.bitwise_or}
UFUNCS |= {"xor": np.bitwise_xor, "differ": lambda a, b: (a != 0) != (b != 0), "last": lambda a, b: b}


def values_of(rng, size, dtype):
    drawn = rng.choice([0, 1, -1, 2, 3, -7, 100], size)
    values = drawn.astype(dtype) if dtype != "bool" else drawn > 0
    if values.dtype.kind == "f":
        values[rng.random(size) < 0.1] = -0.0
    return values


@pytest.mark.parametrize(("dtype", "fold"), CASES)
def test_entries_at_the_same_index_are_combined_in_their_order(dtype, fold):
    rng = np.random.default_rng(3)
    for sizes, length in (((5, 0, 9), 20), ((1,), 9), ((0, 0), 9), ((400, 300, 2), 10**6)):
        index = np.uint64 if length == 20 and dtype == "int64" else np.uint32
        parts = [(np.sort(rng.choice(length, s, replace=False)).astype(index), values_of(rng, s, dtype)) for s in sizes]
        for zeros in (False, True):
            i, v = reference.merge_fold(parts, fold, zeros)
            assert (i.dtype, v.dtype) == (np.dtype(index), np.dtype(dtype))
            dense, seen = np.zeros(length, dtype), np.zeros(length, int)
            for indices, values in parts:
                new, old = indices[seen[indices] == 0], seen[indices] > 0
                dense[new] = values[~old]
                dense[indices[old]] = UFUNCS[fold](dense[indices[old]], values[old])
                seen[indices] += 1
            lacking = (seen > 0) & (seen < len(parts)) if zeros else np.zeros(length, bool)
            dense[lacking] = UFUNCS[fold](dense[lacking], np.zeros(1, dtype))
            np.testing.assert_array_equal(i, np.flatnonzero(seen))
            np.testing.assert_array_equal(v, dense[i])


@pytest.mark.parametrize(("dtype", "fold"), CASES)
def test_arrays_are_combined_as_by_numpy(dtype, fold):
    rng = np.random.default_rng(4)
    a, b = values_of(rng, 1000, dtype), values_of(rng, 1000, dtype)
    found = a.copy()
    reference.fold_into(found, b, fold)
    np.testing.assert_array_equal(found, UFUNCS[fold](a, b))


@pytest.mark.parametrize("fold", ["min", "max", "prod"])
def test_the_order_of_zeros_and_nan_does_not_matter(fold):
    other_nan = np.array([0xFFC12345], np.uint32).view(np.float32)[0]
    values = np.array([0.0, -0.0, np.nan, other_nan, np.inf, 1], np.float32)
    a, b = (grid.reshape(-1) for grid in np.meshgrid(values, values))
    one, two = a.copy(), b.copy()
    reference.fold_into(one, b, fold)
    reference.fold_into(two, a, fold)
    assert one.tobytes() == two.tobytes()
    assert set(one[np.isnan(one)].view(np.uint32).tolist()) == {0x7FC00000}
