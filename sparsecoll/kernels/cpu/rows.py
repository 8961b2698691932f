"""Rows of values, and matrices by rows: each item of the operands is read once, and each of a result written once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparsecoll.kernels import reference, threads
from sparsecoll.kernels.cpu.lanes import array_at, jit
from sparsecoll.kernels.keys import Array
from sparsecoll.kernels.memory import readonly


@jit
def _sum_rows(addresses, starts, width, like, out_at, out, first, last):  # type: ignore[no-untyped-def]
    zero, size = out.dtype.type(0), width * out.itemsize
    for u in range(first, last):
        start, stop = starts[u], starts[u + 1]
        target, row = array_at(out_at + u * size, width, out), array_at(addresses[start], width, like)
        for j in range(width):
            target[j] = zero + row[j]
        for c in range(start + 1, stop):
            row = array_at(addresses[c], width, like)
            for j in range(width):
                target[j] += row[j]


@jit
def _scatter_add_rows(table_at, table, rows, width, values_at, values):  # type: ignore[no-untyped-def]
    for i in range(rows.size):
        target = array_at(table_at + rows[i] * width * table.itemsize, width, table)
        row = array_at(values_at + i * width * values.itemsize, width, values)
        for j in range(width):
            target[j] += row[j]


@jit
def _join_rows(starts, columns, width, flat):  # type: ignore[no-untyped-def]
    """Without branches on the number of entries in a row: how many rows begin at an entry is counted there first."""
    flat[:] = 0
    for row in range(1, starts.size - 1):
        if starts[row] < flat.size:
            flat[starts[row]] += flat.dtype.type(1)
    first, next_, ascending = np.uint64(0), np.uint64(0), True
    for i in range(flat.size):
        first += np.uint64(flat[i]) * np.uint64(width)
        here = first + np.uint64(columns[i])
        flat[i] = here
        ascending &= here >= next_
        next_ = here + np.uint64(1)
    return ascending


@jit
def _split_rows(flat, width, starts, columns):  # type: ignore[no-untyped-def]
    starts[:] = 0
    for i in range(flat.size):
        row = flat[i] // flat.dtype.type(width)
        columns[i] = flat[i] - row * flat.dtype.type(width)
        starts[np.int64(row) + 1] += starts.dtype.type(1)
    total = starts.dtype.type(0)
    for row in range(starts.size):
        total += starts[row]
        starts[row] = total


def sum_rows(parts: Sequence[Array], order: Array, starts: Array, out: Array) -> None:
    if np.float16 in (parts[0].dtype, out.dtype) or parts[0].dtype.kind == "V":
        return reference.sum_rows(parts, order, starts, out)
    width, size = out.shape[1], parts[0].itemsize
    addresses = np.concatenate([p.ctypes.data + np.arange(p.shape[0]) * (width * size) for p in parts])[order]
    like = np.empty(0, parts[0].dtype)
    given = (addresses, readonly(starts), width, like, out.ctypes.data, out[:0].reshape(-1))
    threads.run(_sum_rows, [(*given, *rows) for rows in threads.ranges(out.shape[0], width=width)])


def scatter_add_rows(table: Array, rows: Array, values: Array) -> None:
    if table.dtype == np.float16 or values.dtype == np.float16:
        return reference.scatter_add_rows(table, rows, values)
    kinds = table[:0].reshape(-1), values[:0].reshape(-1)
    _scatter_add_rows(table.ctypes.data, kinds[0], readonly(rows), table.shape[1], values.ctypes.data, kinds[1])


def join_rows(starts: Array, columns: Array, width: int, flat: Array) -> bool:
    return bool(_join_rows(readonly(starts), readonly(columns), width, flat))


def split_rows(flat: Array, width: int, starts: Array, columns: Array) -> None:
    _split_rows(readonly(flat), width, starts, columns)
