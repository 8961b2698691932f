"""The specification of every kernel, in plain NumPy. Slow where that is plainer; the oracle of the tests.

Words used here:
    key         an unsigned integer that orders values by magnitude: for floats the bit pattern without its sign (so
                0 < subnormal < ... < inf < NaN), for integers the absolute value. Comparing keys is comparing |x|.
    position    a place in an array (int64); index: a coordinate of the long sparse vector (uint32 or uint64).
All selections break ties by (larger magnitude, then lower position).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_UNSIGNED: dict[int, Any] = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def index_dtype(length: int) -> np.dtype[np.generic]:
    """uint32 for lengths up to 2^32 (the largest index then fits), uint64 above."""
    return np.dtype(np.uint32 if length <= 2**32 else np.uint64)


def bits_and_mask(values: Array) -> tuple[Array, int]:
    """(unsigned array, mask) with key = bits & mask. A view for floats, |x| for integers."""
    unsigned: Any = _UNSIGNED[values.dtype.itemsize]
    if values.dtype.kind == "f":
        return values.view(unsigned), int(np.iinfo(unsigned).max >> 1)
    return np.abs(values).view(unsigned), int(np.iinfo(unsigned).max)


def magnitude_keys(values: Array) -> Array:
    """keys of `values`, an unsigned array of the same item size."""
    bits, mask = bits_and_mask(values)
    keys: Array = bits & bits.dtype.type(mask)
    return keys


def key_of(threshold: float, dtype: np.dtype[np.generic]) -> int:
    """The smallest key whose magnitude is >= threshold, in `dtype`."""
    if dtype.kind != "f":
        return int(np.ceil(threshold))
    with np.errstate(over="ignore"):
        cast = np.asarray(threshold, dtype=np.float64).astype(dtype)
    if float(cast) < threshold:
        cast = np.nextafter(cast, np.asarray(np.inf, dtype))
    return int(magnitude_keys(np.atleast_1d(cast))[0])


def magnitude_of(key: int, dtype: np.dtype[np.generic]) -> float:
    """The magnitude that a key stands for."""
    unsigned = np.asarray([key], dtype=_UNSIGNED[dtype.itemsize])
    return float(unsigned.view(dtype)[0]) if dtype.kind == "f" else float(key)


def nan_key(dtype: np.dtype[np.generic]) -> int:
    """Keys at or above this one are NaN (for integers: no key is)."""
    if dtype.kind != "f":
        return 1 << (8 * dtype.itemsize)
    return int(magnitude_keys(np.asarray([np.inf], dtype=dtype))[0]) + 1


def count_at_least(values: Array, key: int) -> int:
    """How many values have a key >= `key`."""
    return int(np.count_nonzero(magnitude_keys(values) >= key))


def select_at_least(values: Array, key: int, expected: int = 0) -> Array:
    """Positions (int64, ascending) of the values with a key >= `key`. `expected`: a guess of their number."""
    return np.flatnonzero(magnitude_keys(values) >= key)


def kth_key(values: Array, k: int) -> tuple[int, int]:
    """(key of the k-th largest magnitude, how many values with exactly that key belong to the top k); 1 <= k <= n."""
    ordered = np.sort(magnitude_keys(values))[::-1]
    key = int(ordered[k - 1])
    return key, k - int(np.count_nonzero(ordered > key))


def take_top(values: Array, key: int, ties: int, expected: int = 0) -> Array:
    """Positions (int64, ascending) of all values above `key` and of the first `ties` values equal to it."""
    keys = magnitude_keys(values)
    chosen = keys > key
    chosen[np.flatnonzero(keys == key)[:ties]] = True
    return np.flatnonzero(chosen)


def topk(values: Array, k: int) -> Array:
    """Positions (int64, ascending) of the k largest magnitudes; 0 <= k <= n; ties by lower position."""
    order = np.lexsort((np.arange(values.size), np.invert(magnitude_keys(values))))
    return np.sort(order[:k])


def merge_sum(parts: Sequence[tuple[Array, Array]], dtype: np.dtype[np.generic]) -> tuple[Array, Array]:
    """Sum of sparse vectors given as (ascending unique indices, values), added in the order of `parts` from +0.

    Returns (indices, sums in `dtype`). Entries that cancel to zero stay: positions depend on indices alone.
    """
    if not parts:
        return np.empty(0, np.uint32), np.empty(0, dtype)
    indices, place = np.unique(np.concatenate([i for i, _ in parts]), return_inverse=True)
    sums = np.zeros(indices.size, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        np.add.at(sums, place.reshape(-1), np.concatenate([v.astype(dtype) for _, v in parts]))
    return indices, sums


def scatter_add(dense: Array, indices: Array, values: Array) -> None:
    """dense[indices] += values, in place; indices are unique."""
    with np.errstate(over="ignore", invalid="ignore"):
        dense[indices] += values.astype(dense.dtype)


def scatter_subtract(dense: Array, indices: Array, values: Array) -> None:
    """dense[indices] -= values, in place; indices are unique."""
    with np.errstate(over="ignore", invalid="ignore"):
        dense[indices] -= values.astype(dense.dtype)


def intersect(a: Array, b: Array) -> Array:
    """Positions (int64, ascending) in `a` of the indices that are in `b` too; both ascending and unique."""
    return np.flatnonzero(np.isin(a, b, assume_unique=True))


def first_disorder(indices: Array, length: int) -> int:
    """Position of the first index that is not above its predecessor or is >= length; -1 if there is none."""
    if indices.size == 0:
        return -1
    bad = indices >= np.uint64(length)
    bad[1:] |= indices[1:] <= indices[:-1]
    return int(np.argmax(bad)) if bad.any() else -1
