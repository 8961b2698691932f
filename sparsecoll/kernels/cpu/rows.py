"""Ascending flat indices in C order as a matrix by rows (CSR), in one pass without divisions."""

from __future__ import annotations

import numpy as np

from sparsecoll.kernels.cpu.lanes import jit
from sparsecoll.kernels.keys import Array
from sparsecoll.kernels.memory import readonly


@jit
def _split(flat, width, starts, columns):  # type: ignore[no-untyped-def]
    row = 0
    first = np.uint64(0)
    starts[0] = 0
    for i in range(flat.size):
        column = np.uint64(flat[i]) - first
        while column >= width:
            column -= width
            first += width
            row += 1
            starts[row] = i
        columns[i] = column
    for r in range(row + 1, starts.size):
        starts[r] = flat.size


def split_rows(flat: Array, width: int, starts: Array, columns: Array) -> None:
    _split(readonly(flat), np.uint64(width), starts, columns)
