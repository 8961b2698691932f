"""Coordinates of n-dimensional arrays as flat indices in C order, and back.

Matrices by rows need neither a sort nor an array of rows. Flat indices have `index_dtype` of the number of coordinates,
so that most matrices are converted with 32 bits an entry; NumPy divides by a scalar without divisions.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsecoll.kernels import kernels_of
from sparsecoll.kernels.keys import index_dtype
from sparsecoll.kernels.memory import contiguous, empty, native


def count(shape: tuple[int, ...]) -> int:
    """Return the number of coordinates of a shape; raise ValueError if there are 2^63 or more."""
    length = math.prod(map(int, shape))
    if length >= 2**63:
        raise ValueError(f"x: expected fewer than 2^63 coordinates, got shape {tuple(shape)}")
    return length


def as_integers(indices: Any, dtype: np.dtype[Any]) -> Any:
    """Return indices that are not negative as `dtype`, signed or not, without a copy if it has the same size."""
    indices = native(contiguous(indices))
    return indices.view(dtype) if indices.dtype.itemsize == dtype.itemsize else indices.astype(dtype)


def check_below(indices: Any, size: int, where: str) -> None:
    """Raise ValueError if one of the integers is negative, or `size` or more; the message says `where` they are."""
    indices = native(indices)
    if indices.size and int(indices.view(f"u{indices.itemsize}").max()) >= size:  # those below 0 are the largest
        low, high = int(indices.min()), int(indices.max())
        raise ValueError(f"x: expected indices of at least 0 and below {size} {where}, got {low if low < 0 else high}")


def flat_indices(coordinates: Any, shape: tuple[int, ...]) -> Any:
    """Return flat indices; `coordinates` has an array for each dimension.

    Raises:
        ValueError: A coordinate is outside the shape, or the arrays differ in length.
    """
    if len({row.size for row in coordinates}) > 1:
        raise ValueError(f"x: expected as many indices in each dimension, got {[row.size for row in coordinates]}")
    dtype = index_dtype(count(shape))
    flat: Any = None
    for dimension, (row, size) in enumerate(zip(coordinates, shape, strict=True)):
        check_below(row, size, f"in dimension {dimension}")
        own = as_integers(row, dtype)
        flat = own if flat is None or size >> 8 * dtype.itemsize else flat * dtype.type(size) + own
    return flat.copy() if flat is own else flat  # callers may fill their arrays again


def coordinates(flat: Any, shape: tuple[int, ...], dtype: Any = np.int64) -> list[Any]:
    """Invert `flat_indices`, as arrays of `dtype`."""
    rest, rows = flat, []
    for size in reversed(shape[1:]):
        if size >> 8 * rest.itemsize or not rest.size:  # the dimensions before have one coordinate
            rows.append(rest.astype(dtype))
            rest = rest - rest
            continue
        quotient = rest // rest.dtype.type(size)
        remainder = quotient * rest.dtype.type(size)
        np.subtract(rest, remainder, out=remainder)
        rows.append(as_integers(remainder, np.dtype(dtype)))
        rest = quotient
    return [rest.astype(dtype), *reversed(rows)]


def used_indices(x: Any, rows: int, width: int) -> NDArray[Any]:
    """Return the indices in use of a matrix that is compressed by rows, or by columns or rows of blocks.

    Args:
        x: with indptr, indices and data, as SciPy's CSR; what comes after indptr[-1] is spare room.

    Raises:
        ValueError: indptr does not ascend from 0 to at most the number of stored entries, or an index is outside the
            matrix: compiled code would write past the end of its arrays.
    """
    starts, stored = x.indptr, min(len(x.indices), len(x.data))
    if len(starts) != rows + 1 or starts[0] != 0 or starts[-1] > stored or bool((starts[1:] < starts[:-1]).any()):
        limits = f"from 0 to at most {stored} stored entries, in {rows + 1} items"
        raise ValueError(f"x: expected indptr to ascend {limits}, got others: x.check_format() of SciPy says which")
    indices: NDArray[Any] = x.indices[: starts[-1]]
    check_below(indices, width, f"in {x.format} format")
    return indices


def flat_of_rows(x: Any, shape: tuple[int, int]) -> tuple[NDArray[Any], bool]:
    """Return flat indices of a matrix by rows (CSR), and whether they are strictly ascending."""
    columns = native(contiguous(used_indices(x, *shape)))
    flat = empty(columns.size, index_dtype(count(shape)))
    unsigned = columns.view(f"u{columns.itemsize}")
    return flat, kernels_of(flat).join_rows(native(contiguous(x.indptr)), unsigned, shape[1], flat)


def rows_of_flat(flat: NDArray[Any], shape: tuple[int, int], dtype: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Invert `flat_of_rows` for ascending flat indices; both arrays have `dtype`."""
    if shape[1] >> 8 * flat.itemsize:  # one row or none, whose number of columns the indices' own dtype cannot hold
        return np.array([0, flat.size][: shape[0] + 1], dtype), flat.astype(dtype)
    starts, columns = np.empty(shape[0] + 1, dtype), empty(flat.size, dtype)
    kernels_of(flat).split_rows(flat, shape[1], starts, columns)
    return starts, columns
