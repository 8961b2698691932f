"""Rows of values: those of equal number summed, some of them copied, and rows added to a table.

Matrices by rows (CSR) as ascending flat indices in C order, and back; for host memory only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparsecoll.kernels.keys import Array

__all__ = ["join_rows", "scatter_add_rows", "split_rows", "sum_rows", "take_rows"]


def sum_rows(parts: Sequence[Array], order: Array, starts: Array, out: Array) -> None:
    """out[u] = 0 + row order[starts[u]] + row order[starts[u] + 1] + ... up to starts[u + 1], in the dtype of `out`.

    Args:
        parts: 2-D arrays of one dtype and width, contiguous; their rows are numbered one part after the other.
        order: int64, the numbers of rows, those of one sum next to each other.
        starts: int64, ascending, one more than the rows of `out`; no sum is empty.
        out: 2-D, of the width of the parts.
    """
    rows = np.concatenate(list(parts)).astype(out.dtype)[order]
    out[:] = 0
    with np.errstate(over="ignore", invalid="ignore"):
        np.add.at(out, np.repeat(np.arange(starts.size - 1), np.diff(starts)), rows)


def take_rows(values: Array, positions: Array, out: Array) -> None:
    """out[i] = values[positions[i]], of 2-D arrays of one dtype; the positions are int64."""
    np.take(values, positions, axis=0, out=out, mode="clip")


def scatter_add_rows(table: Array, rows: Array, values: Array) -> None:
    """table[rows[i]] += values[i], in place, of 2-D arrays; the rows are int64 and unique."""
    with np.errstate(over="ignore", invalid="ignore"):
        table[rows] += values.astype(table.dtype)


def join_rows(starts: Array, columns: Array, width: int, flat: Array) -> bool:
    """Write row * width + column of each entry to `flat`; return whether the result is strictly ascending.

    Args:
        starts: int32 or int64, ascending: row r has the entries from starts[r] up to starts[r + 1].
        columns: unsigned integers, below `width`.
        width: number of columns.
        flat: uint32 or uint64, of as many items as columns.
    """
    rows = np.repeat(np.arange(starts.size - 1, dtype=flat.dtype), np.diff(starts))
    np.multiply(rows, flat.dtype.type(width), out=flat)
    np.add(flat, columns.astype(flat.dtype), out=flat)
    return bool((flat[1:] > flat[:-1]).all())


def split_rows(flat: Array, width: int, starts: Array, columns: Array) -> None:
    """Invert `join_rows` for ascending flat indices: fill `starts` and `columns`, of one dtype."""
    row = flat // flat.dtype.type(max(width, 1))
    columns[:] = flat - row * flat.dtype.type(width)
    starts[0] = 0
    np.cumsum(np.bincount(row.astype(np.int64), minlength=starts.size - 1), out=starts[1:])
