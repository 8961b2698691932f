"""Arrays of values: the dtypes that are supported, casts and differences that stay finite."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsecoll.kernels.keys import Array
from sparsecoll.kernels.memory import contiguous, on_gpu

VALUE_DTYPES = tuple(np.dtype(name) for name in ("float16", "float32", "float64", "int32", "int64"))
SMALLEST = 5e-324  # the smallest magnitude above zero


def accumulator_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which values of `dtype` are summed: float32 for float16, else `dtype` itself."""
    return np.dtype(np.float32) if dtype == np.float16 else dtype


def check_value_dtype(dtype: np.dtype[Any]) -> None:
    """Raise TypeError unless `dtype` is one of VALUE_DTYPES."""
    if dtype not in VALUE_DTYPES:
        native = dtype.newbyteorder("=")
        cure = f" of the other byte order: use x.astype(np.{native})" if native in VALUE_DTYPES else ""
        raise TypeError(f"values: expected dtype {', '.join(map(str, VALUE_DTYPES))}, got {dtype}{cure}")


def asarray(array: Any) -> Any:
    """`array` as a NumPy array; a CuPy array is returned as it is."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError("array: expected one without a mask, got a masked one: use .filled(0) or .compressed()")
    return array if on_gpu(array) else np.asarray(array)


def dense_values(array: Any) -> Any:
    """`array` as a contiguous 1-D array of a supported dtype.

    Raises:
        ValueError: it is not 1-D.
        TypeError: its dtype is not supported.
    """
    values = asarray(array)
    if values.ndim != 1:
        raise ValueError(f"dense vector: expected a 1-D array, got shape {values.shape}")
    check_value_dtype(values.dtype)
    return contiguous(values)


def saturating_cast(values: Array, dtype: np.dtype[Any]) -> Array:
    """`values` as `dtype`; finite values beyond its range become its largest finite value, not infinity."""
    if values.dtype == dtype:
        return values
    if dtype.kind == "f" and values.dtype.kind == "f" and dtype.itemsize < values.dtype.itemsize:
        limit = np.finfo(dtype).max
        with np.errstate(over="ignore", invalid="ignore"):
            narrow = values.astype(dtype)
        overflown = np.flatnonzero(np.isinf(narrow) & np.isfinite(values))
        if overflown.size:
            narrow[overflown] = np.copysign(limit, values[overflown]).astype(dtype)
        return narrow
    return values.astype(dtype)


def finite_difference(a: Array, b: Array) -> Array:
    """a - b in the dtype of a; zero where both are the same infinity or either is NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        difference: Array = a - b.astype(a.dtype)
    if a.dtype.kind == "f":
        difference[np.isnan(difference)] = 0
    return difference
