"""Sums of sparse vectors and of rows, sparse vectors added to dense ones, and the intersection and difference of index
arrays. All additions have a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparsecoll.kernels.gpu import device
from sparsecoll.kernels.gpu.device import Array, launch, types, u32

MAX_COORDINATES_PER_ENTRY = 32  # up to which a sum is formed in a dense window


def _from(values: Array) -> str:
    return f"-DFROM={device.code(values.dtype)}"


def merge_sum(parts: Sequence[tuple[Array, Array]], dtype: np.dtype[np.generic]) -> tuple[Array, Array]:
    entries = sum(i.size for i, _ in parts)
    index = parts[0][0].dtype if parts else np.dtype(np.uint32)
    if entries == 0:
        return device.empty(0, index), device.empty(0, dtype)
    ends = _joined([end for i, _ in parts if i.size for end in (i[:1], i[-1:])], index).get()
    low, high = int(ends.min()), int(ends.max())
    if high - low < MAX_COORDINATES_PER_ENTRY * entries:
        return _in_window(parts, dtype, low, high - low + 1)
    indices = _joined([i for i, _ in parts], index)
    values = _joined([v.astype(dtype, copy=False) for _, v in parts], dtype)
    order = indices.argsort()  # stable in CuPy
    ascending = indices[order]
    runs = _runs(ascending)
    out = device.empty(runs.size, dtype)
    _add_runs(ascending, order, values, runs, None, out)
    return ascending[runs], out


def _joined(arrays: Sequence[Array], dtype: Any) -> Array:
    return np.concatenate(arrays, out=device.empty(sum(a.size for a in arrays), dtype))  # type: ignore[call-overload]


def _runs(ascending: Array) -> Array:
    """The positions at which runs of equal items begin."""
    begins = device.empty(ascending.size, np.bool_)
    begins[:1] = True
    begins[1:] = ascending[1:] != ascending[:-1]
    return np.flatnonzero(begins).astype(np.int64, copy=False)


def _add_runs(
    ascending: Array, order: Array, values: Array, runs: Array, dense: Array | None, out: Array | None
) -> None:
    target = out if dense is None else dense
    given = (ascending, order.astype(np.int64, copy=False), values, ascending.size, runs, runs.size, dense)
    macros = (*types(target, ascending), _from(values))
    launch("sums", "add_runs", runs.size, *given, 0 if dense is None else dense.size, out, macros=macros)


def _in_window(parts: Sequence[tuple[Array, Array]], dtype: Any, low: int, span: int) -> tuple[Array, Array]:
    window, bitmap = device.zeros(span, dtype), device.zeros(-(-span // 32), np.uint32)
    index = parts[0][0].dtype
    for indices, values in parts:
        given = (window, bitmap, indices, low, values, indices.size)
        launch("sums", "scatter_window", indices.size, *given, macros=(*types(window, indices), _from(values)))
    ends = popcount_ends(bitmap)
    out = device.empty(int(ends[-1]), index)
    launch("codecs", "bitmap_read", bitmap.size, bitmap, ends, bitmap.size, low, out, macros=types(indices=out))
    return out, window[(out - index.type(low)).astype(np.int64)]


def popcount_ends(words: Array) -> Array:
    """The number of 1 bits up to the end of each uint32 word (int64)."""
    counts = device.empty(words.size, np.int64)
    launch("codecs", "popcounts", words.size, words, words.size, counts)
    return np.cumsum(counts)


def scatter_add(dense: Array, indices: Array, values: Array, subtract: bool = False) -> None:
    given = (dense, indices, values, indices.size, u32(subtract))
    launch("sums", "scatter", indices.size, *given, macros=(*types(dense, indices), _from(values)))


def write_dense(dense: Array, indices: Array, values: Array, divisor: int | None = None) -> None:
    dense[:] = 0
    if divisor is None:
        dense[indices] = values
    else:
        scatter_add(dense, indices, np.divide(values, values.dtype.type(divisor)))


def write_sum(dense: Array, parts: Sequence[tuple[Array, Array]], divisor: int, together: int) -> None:
    dense[:] = 0
    for indices, values in parts:
        scatter_add(dense, indices, values)
    np.divide(dense, dense.dtype.type(divisor), out=dense)
    np.add(dense, dense.dtype.type(0), out=dense)


def scatter_add_marked(dense: Array, indices: Array, values: Array) -> int:
    order = indices.argsort()  # stable in CuPy
    ascending = indices[order]
    _add_runs(ascending, order, values, _runs(ascending), dense, None)
    return int(np.count_nonzero(ascending >= np.uint64(dense.size)))


def where_in(a: Array, b: Array, invert: bool = False) -> Array:
    found = device.empty(a.size, np.uint8)
    given = (a, a.size, b.astype(a.dtype, copy=False), b.size, u32(invert), found)
    launch("sums", "membership", a.size, *given, macros=types(indices=a))
    return np.flatnonzero(found)


def first_unsorted(indices: Array, length: int) -> int:
    found = device.zeros(1, np.uint64)
    launch("sums", "first_unsorted", indices.size, indices, indices.size, length, found, macros=types(indices=indices))
    inverted = int(found[0])
    return inverted ^ ((1 << 64) - 1) if inverted else -1


def sum_rows(parts: Sequence[Array], order: Array, starts: Array, out: Array) -> None:
    values = np.concatenate([part.reshape(-1) for part in parts]) if len(parts) > 1 else parts[0]
    given = (values, order, starts, int(out.shape[1]), out.size, out)
    launch("sums", "sum_rows", out.size, *given, macros=(*types(out), _from(values)))


def take_rows(values: Array, positions: Array, out: Array) -> None:
    given = (values, positions, int(values.shape[1]), out.size, out)
    launch("sums", "take_rows", out.size, *given, macros=(f"-DBITS=u{8 * values.itemsize}",))


def scatter_add_rows(table: Array, rows: Array, values: Array) -> None:
    given = (table, rows, values, int(table.shape[1]), values.size)
    launch("sums", "scatter_add_rows", values.size, *given, macros=(*types(table), _from(values)))
