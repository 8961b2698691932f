"""Entries or rows in any order: sorted once, and those with the same index combined, in the order given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparsecoll.kernels import kernels_of, kernels_of_values
from sparsecoll.kernels.memory import asarray_like, empty, to_host
from sparsecoll.vector.operation import SUM, Operation
from sparsecoll.vector.values import accumulator_dtype, saturating_cast, taken

COMBINE = ("sum", "min", "max", "replace")


def combined(indices: Any, values: Any, op: str | None) -> tuple[Any, Any]:
    """Return ascending, unique indices and their values, of entries in any order; the arrays themselves if they are.

    Args:
        indices: unsigned integers.
        values: as many values, or rows of values.
        op: how values of the same index are combined, in the order given: "sum", "min", "max" or "replace", which keeps
            the last one; None raises ValueError for a repeated index.

    Raises:
        ValueError: An index is repeated and op is None; `op` is another; or there are more indices than values, or
            fewer.
    """
    if indices.size != len(values):
        raise ValueError(f"x: expected as many values as indices, got {len(values)} for {indices.size}")
    if op is not None and op not in COMBINE:
        raise ValueError(f"op: expected {', '.join(map(repr, COMBINE))} or None, got {op!r}")
    if not indices.size or bool((indices[1:] > indices[:-1]).all()):
        return indices, values
    order = None
    if values.ndim == 2 or bool((indices[1:] < indices[:-1]).any()):
        indices, order = sorted_order(indices)
    first = run_starts(indices)
    starts = np.flatnonzero(first)
    if op is None and starts.size < indices.size:
        repeated = indices[np.flatnonzero(~first)[0]]
        raise ValueError(f"x: expected unique indices for op=None, got {int(repeated)} more than once")
    if op == "sum" and values.ndim == 2 and values.dtype.kind != "b":
        sums = run_sums([values], order, starts, accumulator_dtype(values.dtype))
        return indices[starts], saturating_cast(sums, values.dtype)
    values = values if order is None else taken(values, order)
    if starts.size == indices.size:
        return indices, values
    return indices[starts], _combine(op, values, first, starts)


def _combine(op: str | None, values: Any, first: Any, starts: Any) -> Any:
    if op == "sum" and values.ndim == 1:  # one after the other, in the order given; half precision is rounded once
        addends = saturating_cast(values, accumulator_dtype(values.dtype))
        sums = empty(int(starts.size), addends.dtype, values)
        sums[:] = 0
        kernels_of_values(sums).scatter_add_marked(sums, (np.cumsum(first) - 1).astype(np.uint64), addends)
        return saturating_cast(sums, values.dtype)
    if op == "replace":
        return taken(values, np.concatenate([starts[1:], asarray_like(np.array([len(values)]), starts)]) - 1)
    if values.dtype.kind == "c":
        raise TypeError(f"op: expected no {op!r} of complex numbers, which have no order, got {values.dtype}")
    fold = np.minimum if op == "min" else np.maximum  # a sum of bool is the logical or
    return asarray_like(fold.reduceat(to_host(values), to_host(starts)), values)  # CuPy's cannot do it


def run_starts(indices: Any) -> Any:
    """Return a mask of the elements that differ from the one before."""
    return np.concatenate([asarray_like(np.ones(min(indices.size, 1), bool), indices), indices[1:] != indices[:-1]])


def sorted_order(indices: Any) -> tuple[Any, Any]:
    """Return the ascending indices and the positions that sort them, equal ones in the order given."""
    if not isinstance(indices, np.ndarray):
        order = indices.argsort()  # stable in CuPy
        return indices[order], order
    bits = int(indices.size).bit_length()
    if int(indices.max(initial=0)).bit_length() + bits > 64:
        order = np.argsort(indices, kind="stable")
        return indices[order], order
    keys = indices.astype(np.uint64)  # index and position in one word: np.sort is vectorised, a stable argsort is not
    keys <<= np.uint64(bits)
    keys |= np.arange(keys.size, dtype=np.uint64)
    keys.sort()
    order = (keys & np.uint64((1 << bits) - 1)).view(np.int64)
    keys >>= np.uint64(bits)
    return keys.astype(indices.dtype, copy=False), order


def run_sums(parts: Sequence[Any], order: Any, starts: Any, dtype: np.dtype[Any], op: Operation = SUM) -> Any:
    """Return the sum of each run of rows, added in order from +0, or its result by another operation.

    Args:
        parts: arrays of shape (r, d), whose rows are numbered one part after the other.
        order: numbers of the rows, those of one sum next to each other.
        starts: where in `order` each sum begins.
        dtype: in which values are combined and returned.
        op: the operation (default: the sum).
    """
    if op.fold(dtype) is not None:
        return _run_folds(parts, order, starts, dtype, op)
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


def _run_folds(parts: Sequence[Any], order: Any, starts: Any, dtype: np.dtype[Any], op: Operation) -> Any:
    """Return the result of `op` for each run of rows.

    Rows are numbered by their sums, so that the values of each part have ascending flat positions, as entries have.
    """
    d, count = int(parts[0].shape[1]), int(starts.size)
    number_of = np.empty(order.size, np.uint64)
    number_of[order] = np.repeat(np.arange(count), np.diff(starts, append=order.size))
    flat = number_of[:, None] * np.uint64(d) + np.arange(d, dtype=np.uint64)
    numbers = np.split(flat, np.cumsum([len(part) for part in parts])[:-1])
    values = [part.reshape(-1).astype(dtype, copy=False) for part in parts]
    pairs, fold = list(zip([own.reshape(-1) for own in numbers], values, strict=True)), op.fold(dtype)
    _, values = kernels_of(parts[0]).merge_fold(pairs, fold, op.zeros and fold != "last")
    return values.reshape(count, d)
