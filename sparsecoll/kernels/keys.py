"""Magnitude keys, which order values by |x|, and the integer types of indices: what all kernels share.

A magnitude key is an unsigned integer: for a float the bit pattern without its sign, so that 0 < subnormal numbers
< ... < infinity < NaN; for an integer the absolute value. Comparing keys is comparing magnitudes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Addend = tuple[Array, float]  # (addend, scale): values += scale * addend, in the dtype of values

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


def key_of(threshold: float, dtype: np.dtype[np.generic]) -> int:
    """The smallest key of a value of `dtype` whose magnitude is >= threshold."""
    if dtype.kind != "f":
        return int(np.ceil(threshold))
    with np.errstate(over="ignore"):
        cast = np.asarray(threshold, dtype=np.float64).astype(dtype)
    if float(cast) < threshold:
        cast = np.nextafter(cast, np.asarray(np.inf, dtype))
    return _key(cast)


def magnitude_of(key: int, dtype: np.dtype[np.generic]) -> float:
    """The magnitude of the values of `dtype` that have this key."""
    unsigned = np.asarray([key], dtype=_UNSIGNED[dtype.itemsize])
    return float(unsigned.view(dtype)[0]) if dtype.kind == "f" else float(key)


def nan_key(dtype: np.dtype[np.generic]) -> int:
    """Values of `dtype` whose key is at least this one are NaN. No key of an integer reaches it."""
    return 1 << (8 * dtype.itemsize) if dtype.kind != "f" else _key(np.asarray(np.inf, dtype)) + 1


def _key(value: Any) -> int:
    bits, mask = bits_and_mask(np.atleast_1d(value))
    return int(bits[0]) & mask
