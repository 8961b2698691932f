"""Rows of values: sums in a fixed order, copies, and rows added to a table; a thread has one value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparsecoll.kernels.gpu import device
from sparsecoll.kernels.gpu.device import launch, types

Array = Any  # of CuPy


def _macros(target: Array, values: Array) -> tuple[str, ...]:
    return (*types(target), f"-DFROM={device.code(values.dtype)}")


def sum_rows(parts: Sequence[Array], order: Array, starts: Array, out: Array) -> None:
    values = np.concatenate([part.reshape(-1) for part in parts]) if len(parts) > 1 else parts[0]
    given = (values, order, starts, int(out.shape[1]), out.size, out)
    launch("row_sums", "sum_rows", out.size, *given, macros=_macros(out, values))


def take_rows(values: Array, positions: Array, out: Array) -> None:
    given = (values, positions, int(values.shape[1]), out.size, out)
    launch("row_sums", "take_rows", out.size, *given, macros=(f"-DBITS=u{8 * values.itemsize}",))


def scatter_add_rows(table: Array, rows: Array, values: Array) -> None:
    given = (table, rows, values, int(table.shape[1]), values.size)
    launch("row_sums", "scatter_add_rows", values.size, *given, macros=_macros(table, values))
