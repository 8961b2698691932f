"""Rows of values: each row of the operands is read once, and each row of a sum written once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from sparsecoll.kernels import reference, threads
from sparsecoll.kernels.cpu.lanes import array_at, jit
from sparsecoll.kernels.keys import Array
from sparsecoll.kernels.memory import readonly


@jit
def _sum_rows(addresses, starts, width, like, out, first, last):  # type: ignore[no-untyped-def]
    zero = out.dtype.type(0)
    for u in range(first, last):
        start, stop, base = starts[u], starts[u + 1], u * width
        row = array_at(addresses[start], width, like)
        for j in range(width):
            out[base + j] = zero + row[j]
        for c in range(start + 1, stop):
            row = array_at(addresses[c], width, like)
            for j in range(width):
                out[base + j] += row[j]


@jit
def _take_rows(values, positions, width, out, first, last):  # type: ignore[no-untyped-def]
    for i in range(first, last):
        source, target = positions[i] * width, i * width
        for j in range(width):
            out[target + j] = values[source + j]


@jit
def _scatter_add_rows(table, rows, width, values):  # type: ignore[no-untyped-def]
    for i in range(rows.size):
        target, source = rows[i] * width, i * width
        for j in range(width):
            table[target + j] += values[source + j]


def _shared(function: Callable[..., Any], rows: int, width: int, *arguments: Any) -> None:
    """Call function(*arguments, first, last) on ranges of the rows, on several threads if there are many values."""
    count = min(threads.count_for(rows * width), max(rows, 1))
    edges = [rows * t // count for t in range(count + 1)]
    threads.run(function, [(*arguments, first, last) for first, last in pairwise(edges)])


def sum_rows(parts: Sequence[Array], order: Array, starts: Array, out: Array) -> None:
    if np.float16 in (parts[0].dtype, out.dtype) or parts[0].dtype.kind == "V":
        reference.sum_rows(parts, order, starts, out)
        return
    width, size = out.shape[1], parts[0].itemsize
    addresses = np.concatenate([p.ctypes.data + np.arange(p.shape[0]) * (width * size) for p in parts])[order]
    like = np.empty(0, parts[0].dtype)
    _shared(_sum_rows, out.shape[0], width, addresses, readonly(starts), width, like, out.reshape(-1))


def take_rows(values: Array, positions: Array, out: Array) -> None:
    bits = f"u{values.itemsize}" if values.itemsize <= 8 else "u8"
    words, copied = values.reshape(-1).view(bits), out.reshape(-1).view(bits)
    width = values.shape[1] * values.itemsize // words.itemsize
    _shared(_take_rows, positions.size, width, readonly(words), readonly(positions), width, copied)


def scatter_add_rows(table: Array, rows: Array, values: Array) -> None:
    if table.dtype == np.float16 or values.dtype == np.float16:
        reference.scatter_add_rows(table, rows, values)
        return
    _scatter_add_rows(table.reshape(-1), readonly(rows), table.shape[1], readonly(values.reshape(-1)))
