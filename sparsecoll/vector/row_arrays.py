"""The arrays of RowSparse: validation, rows in any order, combinations of rows, casts, and blocks of SciPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparsecoll.kernels import kernels_of, kernels_of_values
from sparsecoll.kernels.memory import asarray_like, contiguous, empty, on_gpu
from sparsecoll.vector.coordinates import used_indices
from sparsecoll.vector.operation import Operation
from sparsecoll.vector.pairs import COMBINE, run_starts, sorted_order
from sparsecoll.vector.scipy_arrays import block_shape
from sparsecoll.vector.values import accumulator_dtype, asarray, checked_length, native_values, saturating_cast


def checked(rows: Any, values: Any, n: Any) -> tuple[Any, Any, int]:
    """Return rows in any order as int64, contiguous values of shape (len(rows), d), and n.

    Raises:
        ValueError: A row is out of range, the shapes do not fit, or n is out of range.
        TypeError: A dtype is not supported, or only one of the arrays is on the GPU.
    """
    n, given, values = checked_length(n, "n"), asarray(rows), asarray(values)
    if on_gpu(given) != on_gpu(values):
        where = ["CuPy" if on_gpu(array) else "NumPy" for array in (given, values)]
        raise TypeError(f"rows, values: expected both on the GPU or neither, got arrays of {' and '.join(where)}")
    if given.size == 0 and given.ndim == 1:
        given = given.astype(np.int64)
    if given.ndim != 1 or values.ndim != 2 or given.size != values.shape[0] or values.shape[1] < 1:
        raise ValueError(
            "rows, values: expected shapes (r,) and (r, d) with d of at least 1,"
            f" got {tuple(given.shape)} and {tuple(values.shape)}"
        )
    if given.dtype.kind not in "iu":
        raise TypeError(f"rows: expected integers, got {given.dtype}")
    values = native_values(values)
    if given.size and int(given.min()) < 0:
        raise ValueError(f"rows: expected at least 0, got {int(given.min())}")
    if given.size and int(given.max()) >= n:
        raise ValueError(f"rows: expected below n = {n}, got {int(given.max())}")
    return contiguous(given, np.dtype(np.int64)), contiguous(values), n


def combined(rows: Any, values: Any, op: str | None) -> tuple[Any, Any]:
    """Return ascending, unique rows and their values, of rows in any order; the arrays themselves if they are.

    Args:
        rows: int64.
        values: of shape (len(rows), d).
        op: how values of the same row are combined, see `RowSparse.from_pairs`.
    """
    if op is not None and op not in COMBINE:
        raise ValueError(f"op: expected {', '.join(map(repr, COMBINE))} or None, got {op!r}")
    if not rows.size or bool((rows[1:] > rows[:-1]).all()):
        return rows, values
    ascending, order = sorted_order(rows)
    first = run_starts(ascending)
    starts = np.flatnonzero(first)
    if op is None and starts.size < rows.size:
        repeated = ascending[np.flatnonzero(~first)[0]]
        raise ValueError(f"rows: expected unique ones for op=None, got {int(repeated)} more than once")
    if op == "sum" and values.dtype.kind != "b":
        return ascending[starts], cast(sums([values], order, starts, accumulator_dtype(values.dtype)), values.dtype)
    if op != "replace":
        combine = np.minimum if op == "min" else np.maximum  # the sum of bool is the logical or
        return ascending[starts], combine.reduceat(taken(values, order), starts, axis=0)
    ends = np.concatenate([starts[1:], asarray_like(np.array([rows.size]), starts)]) - 1
    return ascending[starts], taken(values, order[ends])


def sums(parts: Sequence[Any], order: Any, starts: Any, dtype: np.dtype[Any]) -> Any:
    """Return the sum of each run of rows, added in order from +0.

    Args:
        parts: arrays of shape (r, d), whose rows are numbered one part after the other.
        order: numbers of the rows, those of one sum next to each other.
        starts: where in `order` each sum begins.
        dtype: in which values are added and returned.
    """
    d, count = int(parts[0].shape[1]), int(starts.size)
    ends = np.concatenate([starts, asarray_like(np.array([order.size]), starts)]).astype(np.int64, copy=False)
    out = empty(count * d, dtype, parts[0]).reshape(count, d)
    if not count:
        return out
    number = np.dtype(f"i{dtype.itemsize}") if dtype.kind == "u" else dtype  # the same bits as signed integers
    if dtype.kind == "c":  # a row of twice as many numbers
        number = np.dtype(f"f{dtype.itemsize // 2}")
    addends = [(part if part.dtype == dtype else cast(part, dtype)).view(number) for part in parts]
    kernels_of_values(out.view(number)).sum_rows(addends, order, ends, out.view(number))
    return out


def folded(parts: Sequence[Any], order: Any, starts: Any, dtype: np.dtype[Any], op: Operation) -> Any:
    """Return what `op` makes of each run of rows; arguments as of `sums`.

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


def taken(values: Any, positions: Any, out: Any = None) -> Any:
    """Return values[positions] of 2-D values, in `out` if it is given."""
    d = int(values.shape[1])
    if out is None:
        out = empty(int(positions.size) * d, values.dtype, values).reshape(positions.size, d)
    if positions.size:
        kernels_of(values).take_rows(values, positions, out)
    return out


def stacked(parts: Sequence[Any]) -> Any:
    """Return the rows of several 2-D arrays of one dtype, one after the other."""
    d, count = int(parts[0].shape[1]), sum(int(part.shape[0]) for part in parts)
    return np.concatenate(parts, out=empty(count * d, parts[0].dtype, parts[0]).reshape(count, d))


def cast(values: Any, dtype: np.dtype[Any]) -> Any:
    """Return 2-D values as `dtype`; finite values beyond its range become its largest finite value."""
    if values.dtype == dtype:
        return values
    if values.dtype.name == "bfloat16" and dtype == np.float32:
        bits = values.reshape(-1).view(np.uint16)
        return kernels_of(bits).from_bfloat16(bits).reshape(values.shape)
    if values.dtype == np.float16 and dtype == np.float32:
        return kernels_of(values).from_float16(values.reshape(-1)).reshape(values.shape)
    return saturating_cast(values.reshape(-1), dtype).reshape(values.shape)


def blocks_of(x: Any) -> tuple[Any, Any]:
    """Return the numbers of the stored blocks of a SciPy BSR matrix, and their values, one block in a row.

    Raises:
        ValueError: As `used_indices`.
    """
    size = x.blocksize[0] * x.blocksize[1]
    high, wide = block_shape(x)
    columns = used_indices(x, high, wide).astype(np.int64)
    block_rows = np.repeat(np.arange(high, dtype=np.int64), np.diff(x.indptr))
    return block_rows * wide + columns, np.ascontiguousarray(x.data[: columns.size]).reshape(columns.size, size)
