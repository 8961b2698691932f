"""Rows of values: those of equal number summed, some of them copied, and rows added to a table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparsecoll.kernels.keys import Array

__all__ = ["scatter_add_rows", "sum_rows", "take_rows"]


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
