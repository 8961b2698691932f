"""The arrays of vectors: validation, supported dtypes, casts and differences that stay finite."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparsecoll.kernels import kernels_of
from sparsecoll.kernels.keys import COMPILED_DTYPES, Array, index_dtype, is_float, key_of
from sparsecoll.kernels.memory import contiguous, empty, native, on_gpu

VALUE_DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bfloat16"),
)
_NUMPY_DTYPES = frozenset(map(np.dtype, VALUE_DTYPES[:-1]))  # the name of a dtype takes NumPy microseconds
SMALLEST = 5e-324  # the smallest magnitude above zero


class Values:
    """An array of values: the base of SparseVector and DenseVector."""

    __slots__ = ("_array",)

    _array: NDArray[Any]
    width = 0  # number of values in a row; 0 where an entry has one value

    @property
    def values(self) -> NDArray[Any]:
        """The stored values."""
        return self._array

    @property
    def dtype(self) -> np.dtype[Any]:
        """dtype of the values."""
        return self._array.dtype

    @property
    def on_gpu(self) -> bool:
        """Whether the values are in a CuPy array."""
        return on_gpu(self._array)

    @property
    def _kernels(self) -> Any:
        return kernels_of(self._array)

    def count_at_least(self, threshold: float) -> int:
        """Return the number of stored values with a magnitude >= threshold."""
        return int(self._kernels.count_at_least(self.values, key_of(threshold, self.dtype)))


def accumulator_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which values are summed: float32 for float16 and bfloat16, else `dtype`, native."""
    return np.dtype(np.float32) if dtype.itemsize == 2 and is_float(dtype) else dtype.newbyteorder("=")


def common_dtype(*dtypes: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a sum of values of these dtypes: NumPy's, and torch's for bfloat16.

    bfloat16 beside bool and integers gives bfloat16, beside float16 float32, and beside other dtypes the wider one.

    Raises:
        TypeError: There is none.
    """
    others = [dtype for dtype in dtypes if dtype.name != "bfloat16"]
    if len(others) < len(dtypes):
        if all(dtype.kind in "biu" for dtype in others):
            return next(dtype for dtype in dtypes if dtype.name == "bfloat16")
        others.append(np.dtype(np.float32))
    try:
        return np.result_type(*others)
    except TypeError as error:
        found = " and ".join(map(str, dtypes))
        raise TypeError(f"values: expected dtypes that can be added, got {found}: convert one by astype") from error


def can_add(dtype: np.dtype[Any], to: np.dtype[Any]) -> bool:
    """Return whether values of `dtype` can be added to those of `to` without losing more than digits."""
    return dtype == to or (np.can_cast(dtype, to, "same_kind") and (dtype.kind != "c" or to.kind == "c"))


def check_value_dtype(dtype: np.dtype[Any]) -> None:
    """Raise TypeError unless `dtype` is one of VALUE_DTYPES."""
    if dtype not in _NUMPY_DTYPES and dtype.name not in VALUE_DTYPES:
        cures = {"f": "x.astype(np.float64)", "c": "x.astype(np.complex128)", "m": "x.view(np.int64)"}
        cures |= {"M": cures["m"], "O": "x.astype(np.float64), or another dtype of numbers"}
        cure = f": use {cures[dtype.kind]}" if dtype.kind in cures else ""
        raise TypeError(f"values: expected dtype {', '.join(VALUE_DTYPES)}, got {dtype}{cure}")


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype of a name in VALUE_DTYPES; bfloat16 is that of ml_dtypes."""
    if name == "bfloat16":
        importlib.import_module("ml_dtypes")
    return np.dtype(name)


def asarray(array: Any) -> Any:
    """Return `array` as a NumPy array; a CuPy array is returned as it is."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError("array: expected one without a mask, got a masked one: use .filled(0) or .compressed()")
    return array if on_gpu(array) else np.asarray(array)


def native_values(array: Any) -> Any:
    """Return `array`, contiguous and in the machine's byte order; raise TypeError if its dtype is not supported."""
    values = native(contiguous(asarray(array)))
    check_value_dtype(values.dtype)
    if on_gpu(values) and values.dtype not in COMPILED_DTYPES:
        known = ", ".join(map(str, COMPILED_DTYPES))
        raise TypeError(f"values: expected dtype {known} on the GPU, got {values.dtype}: use an array of NumPy")
    return values


def dense_values(array: Any) -> Any:
    """Return `array` as a contiguous 1-D array of a supported dtype.

    Raises:
        ValueError: it is not 1-D.
        TypeError: its dtype is not supported.
    """
    values = native_values(array)
    if values.ndim != 1:
        raise ValueError(f"dense vector: expected a 1-D array, got shape {values.shape}")
    return values


class Kind(NamedTuple):
    """The names of the arguments of a class of entries in errors, and the shape of its values."""

    indices: str
    length: str
    name: str
    shapes: str
    ndim: int


ENTRIES = Kind("indices", "length", "SparseVector", "two 1-D arrays of one size", 1)
ROWS = Kind("rows", "n", "RowSparse", "shapes (r,) and (r, d) with d of at least 1", 2)


def pairs(indices: Any, values: Any, length: Any, kind: Kind = ENTRIES) -> tuple[Any, Any, int]:
    """Return indices in any order as SparseVector stores them, contiguous values, and the length.

    Raises:
        ValueError: indices are negative or out of range, the sizes differ, or length is negative.
        TypeError: a dtype is not supported, or only one of the arrays is on the GPU.
    """
    length, given, values, name = checked_length(length, kind.length), asarray(indices), asarray(values), kind.indices
    if on_gpu(given) != on_gpu(values):
        where = ["CuPy" if on_gpu(array) else "NumPy" for array in (given, values)]
        raise TypeError(f"{name}, values: expected both on the GPU or neither, got arrays of {' and '.join(where)}")
    if given.size == 0 and given.ndim == 1:
        given = given.astype(np.int64)
    if given.ndim != 1 or values.ndim != kind.ndim or given.size != len(values) or 0 in values.shape[1:]:
        raise ValueError(f"{name}, values: expected {kind.shapes}, got shapes {given.shape} and {values.shape}")
    if given.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integers, got {given.dtype}")
    values = native_values(values)
    if given.dtype.kind == "i" and given.size and int(given.min()) < 0:
        raise ValueError(f"{name}: expected at least 0, got {int(given.min())}")
    if given.size and int(given.max()) >= length:
        raise ValueError(f"{name}: expected below {kind.length} {length}, got {int(given.max())}")
    # a copy of the indices: compiled loops rely on them, and a caller may write into its own
    return contiguous(given.astype(index_dtype(length))), values, length


def checked_length(length: Any, name: str) -> int:
    if isinstance(length, bool) or not isinstance(length, (int, np.integer)):
        raise TypeError(f"{name}: expected an integer, got {type(length).__name__}")
    if not 0 <= length < 2**63:
        raise ValueError(f"{name}: expected 0 <= {name} < 2^63, got {length}")
    return int(length)


def taken(values: Any, positions: Any) -> Any:
    """Return the values, or the rows of values, at some positions, copied."""
    if values.ndim == 1 or not positions.size:
        return values[positions]
    out = empty(int(positions.size) * int(values.shape[1]), values.dtype, values).reshape(positions.size, -1)
    kernels_of(values).take_rows(values, positions, out)
    return out


def stacked(parts: Sequence[Any]) -> Any:
    """Return arrays of values, or of rows of values, of one dtype, one after the other."""
    first = parts[0]
    out = empty(sum(int(part.size) for part in parts), first.dtype, first)
    return np.concatenate(parts, out=out.reshape(-1, *first.shape[1:]))


def not_zero(values: Any) -> Any:
    """Return the positions of values, or of rows, that are not zero, NaN among them."""
    return np.flatnonzero(values if values.ndim == 1 else (values != 0).any(axis=1))


def saturating_cast(values: Array, dtype: np.dtype[Any]) -> Array:
    """Return `values` as native `dtype`; real floats beyond the range of a narrower one become its largest."""
    dtype = dtype.newbyteorder("=")
    if values.dtype == dtype:
        return values
    check_value_dtype(dtype)
    if dtype.name == "bfloat16":
        narrow: Array = kernels_of(values).to_bfloat16(saturating_cast(values, np.dtype(np.float32)).reshape(-1))
        return narrow.view(dtype).reshape(values.shape)
    if values.dtype.name == "bfloat16" and dtype == np.float16:
        values = saturating_cast(values, np.dtype(np.float32))
    if values.ndim == 2 and dtype == np.float32 and values.dtype.itemsize == 2 and is_float(values.dtype):
        flat, half = values.reshape(-1), values.dtype == np.float16
        wide = kernels_of(flat).from_float16(flat) if half else kernels_of(flat).from_bfloat16(flat.view(np.uint16))
        return wide.reshape(values.shape)  # type: ignore[no-any-return]
    if dtype.kind == "f" and values.dtype.kind == "f" and dtype.itemsize < values.dtype.itemsize:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            narrow = values.astype(dtype)
        overflown = np.isinf(narrow) & np.isfinite(values)
        if overflown.any():
            narrow[overflown] = np.copysign(np.finfo(dtype).max, values[overflown]).astype(dtype)
        return narrow
    return values.astype(dtype)


def finite_difference(a: Array, b: Array) -> Array:
    """Return a - b in the dtype of a; zero where both are the same infinity or either is NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        difference: Array = a - b.astype(a.dtype)
    if a.dtype.kind in "fc":
        difference[np.isnan(difference)] = 0
    return difference
