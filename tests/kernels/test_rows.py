"""Flat indices become the rows of a matrix, and rows become flat indices again."""

import numpy as np
import pytest

from sparsecoll.kernels import cpu, reference

KERNELS = [reference, cpu]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("index", "dtype"), [(np.uint32, np.int32), (np.uint64, np.int64), (np.uint64, np.int32)])
@pytest.mark.parametrize(("rows", "width", "entries"), [(0, 5, 0), (4, 0, 0), (1, 7, 4), (9, 1, 5), (300, 40, 900)])
def test_entries_become_rows_and_entries_again(kernels, index, dtype, rows, width, entries):
    flat = np.sort(np.random.default_rng(2).choice(max(rows * width, 1), entries, replace=False)).astype(index)
    starts, columns, again = np.empty(rows + 1, dtype), np.empty(entries, dtype), np.empty(entries, index)
    kernels.split_rows(flat, width, starts, columns)
    assert starts.tolist() == np.searchsorted(flat, np.arange(rows + 1) * width).tolist() and starts[-1] == entries
    assert kernels.join_rows(starts, columns.view(f"u{columns.itemsize}"), width, again)
    np.testing.assert_array_equal(again, flat)


@pytest.mark.parametrize("kernels", KERNELS)
def test_unsorted_and_repeated_columns_are_noticed(kernels):
    starts = np.array([0, 2, 4], np.int32)
    for columns, ascending in (([1, 3, 0, 2], True), ([1, 1, 0, 2], False), ([1, 3, 2, 0], False)):
        flat = np.empty(4, np.uint32)
        assert kernels.join_rows(starts, np.array(columns, np.uint32), 5, flat) is ascending
        assert flat.tolist() == [columns[0], columns[1], 5 + columns[2], 5 + columns[3]]
