"""Sums, copies and scatter-additions of rows: Numba's kernels equal the reference bit for bit."""

import numpy as np
import pytest

from sparsecoll.kernels import cpu, reference, threads

DTYPES = ["float16", "float32", "float64", "int32", "int64"]


def given(dtype, width, seed=0):
    """Rows of three parts, in an order with runs of one to three, and special values."""
    rng = np.random.default_rng(seed)
    parts = [(rng.standard_normal((size, width)) * 100).astype(dtype) for size in (7, 0, 30)]
    if np.dtype(dtype).kind == "f":
        parts[2][::5, 0], parts[0][:3] = np.inf, -0.0
    starts = np.array([0, 1, 4, 6, 7, *range(9, 37, 2), 37])
    return parts, rng.permutation(37), starts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 3, 64])
def test_rows_are_summed_and_added_as_by_the_reference(dtype, width, monkeypatch):
    monkeypatch.setattr(threads, "count_for", lambda size: 2)
    parts, order, starts = given(dtype, width)
    target = np.float32 if dtype == "float16" else np.dtype(dtype)
    mine, theirs = (np.full((starts.size - 1, width), 9, target) for _ in range(2))
    cpu.sum_rows(parts, order, starts, mine)
    reference.sum_rows(parts, order, starts, theirs)
    assert mine.tobytes() == theirs.tobytes()
    rows = np.array([1, 5, 6, 8, 9, 11, 39])
    tables = [np.full((40, width), 3, dtype) for _ in range(2)]
    for kernels, table in zip((cpu, reference), tables, strict=True):
        kernels.scatter_add_rows(table, rows, parts[0])
    assert tables[0].tobytes() == tables[1].tobytes() and (tables[0][2] == 3).all()


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float64", "complex128"])
def test_rows_are_copied_by_number(dtype):
    values = np.arange(60).reshape(20, 3).astype(dtype)
    out = np.empty((3, 3), dtype)
    cpu.take_rows(values, np.array([19, 0, 7]), out)
    assert np.array_equal(out, values[[19, 0, 7]])


def test_sums_start_at_plus_zero():
    out = np.ones((1, 2), np.float32)
    cpu.sum_rows([np.full((1, 2), -0.0, np.float32)], np.array([0]), np.array([0, 1]), out)
    assert not np.signbit(out).any()
