"""Rows of values, combined in a fixed order, and the blocks of SciPy that are rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparsecoll.kernels import kernels_of, kernels_of_values
from sparsecoll.kernels.memory import asarray_like, empty
from sparsecoll.vector.operation import SUM, Operation
from sparsecoll.vector.values import saturating_cast


def sums(parts: Sequence[Any], order: Any, starts: Any, dtype: np.dtype[Any], op: Operation = SUM) -> Any:
    """Return the sum of each run of rows, added in order from +0, or what another operation makes of it.

    Args:
        parts: arrays of shape (r, d), whose rows are numbered one part after the other.
        order: numbers of the rows, those of one sum next to each other.
        starts: where in `order` each sum begins.
        dtype: in which values are combined and returned.
        op: the operation (default: the sum).
    """
    if op.fold(dtype) is not None:
        return _folded(parts, order, starts, dtype, op)
    d, count = int(parts[0].shape[1]), int(starts.size)
    ends = np.concatenate([starts, asarray_like(np.array([order.size]), starts)]).astype(np.int64, copy=False)
    out = empty(count * d, dtype, parts[0]).reshape(count, d)
    if not count:
        return out
    number = np.dtype(f"i{dtype.itemsize}") if dtype.kind == "u" else dtype  # the same bits as signed integers
    if dtype.kind == "c":  # a row of twice as many numbers
        number = np.dtype(f"f{dtype.itemsize // 2}")
    addends = [saturating_cast(part, dtype).view(number) for part in parts]
    kernels_of_values(out.view(number)).sum_rows(addends, order, ends, out.view(number))
    return out


def _folded(parts: Sequence[Any], order: Any, starts: Any, dtype: np.dtype[Any], op: Operation) -> Any:
    """Return what `op` makes of each run of rows.

    Rows are numbered by their sums, so that the values of each part have ascending flat positions, as entries have.
    """
    d, count = int(parts[0].shape[1]), int(starts.size)
    number_of = np.empty(order.size, np.int64)
    first = np.zeros(order.size, np.int64)
    first[starts] = 1
    number_of[order] = np.cumsum(first) - 1
    pairs, begin = [], 0
    for part in parts:
        numbers = number_of[begin : begin + part.shape[0]]
        flat = (numbers[:, None] * d + np.arange(d)).reshape(-1).astype(np.uint64)
        pairs.append((flat, part.reshape(-1).astype(dtype, copy=False)))
        begin += part.shape[0]
    fold = op.fold(dtype)
    _, values = kernels_of(parts[0]).merge_fold(pairs, fold, op.zeros and fold != "last")
    return values.reshape(count, d)
