"""Arithmetic: sums, multiples and comparison of entries, with the operators of NumPy and SciPy."""

from __future__ import annotations

from numbers import Number
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from sparsecoll.vector.entries import Entries
from sparsecoll.vector.values import accumulator_dtype, check_value_dtype, common_dtype

# Python's numbers have no width, so that products with bfloat16 stay in 16 bits; those of NumPy have one
PYTHON = {bool: np.dtype(np.bool_), int: np.dtype(np.int64), float: np.dtype(np.int64), complex: np.dtype(np.complex64)}


class Arithmetic(Entries):
    """The operators of SparseVector and RowSparse; sums store what either operand stores."""

    __slots__ = ()

    def toarray(self) -> NDArray[Any]:
        """Return a new array of this shape: SciPy's name of `to_dense`."""
        return self.to_dense()

    def _is_same_type(self, other: object) -> bool:
        """Return whether `other` is of this type; raise TypeError if it is an array or a matrix."""
        if isinstance(other, type(self)) or (isinstance(other, Arithmetic) and isinstance(self, type(other))):
            return True
        if hasattr(other, "shape"):
            name, theirs = type(self).__name__, type(other).__name__
            raise TypeError(f"{name}: expected another {name}, got {theirs}: use x.to_dense(), or {name}.from_dense")
        return False

    def __add__(self, other: Any) -> Self:
        if isinstance(other, (int, float)) and other == 0:  # where the built-in sum() starts
            return self.copy()
        if not self._is_same_type(other):
            return NotImplemented
        if self.shape != other.shape:
            raise ValueError(f"{type(self).__name__}: expected two of one shape, got {self.shape} and {other.shape}")
        dtype = common_dtype(self.dtype, other.dtype)
        return self.merge([self.astype(dtype), other.astype(dtype)], dtype)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Self:
        if not self._is_same_type(other):
            return NotImplemented
        negated: Self = -other.astype(common_dtype(self.dtype, other.dtype))  # its own may wrap
        return self + negated

    def __neg__(self) -> Self:
        if self.dtype == np.bool_:
            raise TypeError(f"{type(self).__name__}: expected numbers for -, got bool: use x.astype(np.int8)")
        return self.with_values(-self.values)

    def __pos__(self) -> Self:
        return self.copy()

    def __abs__(self) -> Self:
        return self.with_values(np.abs(self.values))

    def __mul__(self, factor: Any) -> Any:
        return self._scaled(np.multiply, factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Any:
        return self._scaled(np.true_divide, divisor)

    def _scaled(self, operation: np.ufunc, factor: Any) -> Any:
        if not isinstance(factor, (Number, np.generic)) and not (isinstance(factor, np.ndarray) and factor.ndim == 0):
            return NotImplemented
        if "bfloat16" not in (self.dtype.name, getattr(factor, "dtype", self.dtype).name):
            return self.with_values(operation(self.values, factor))
        dtype = common_dtype(self.dtype, PYTHON.get(type(factor)) or np.asarray(factor).dtype)
        check_value_dtype(dtype)
        wide = accumulator_dtype(dtype)
        return self.with_values(operation(self.values.astype(wide), wide.type(factor)).astype(dtype, copy=False))

    def __eq__(self, other: Any) -> Any:
        if not self._is_same_type(other):
            return NotImplemented
        same = (self.shape, self.nnz, self.on_gpu) == (other.shape, other.nnz, other.on_gpu)
        return same and bool((self.indices == other.indices).all()) and bool((self.values == other.values).all())

    __hash__ = None  # type: ignore[assignment]  # the arrays may be changed in place

    # NumPy

    __array_ufunc__ = None  # np.float32(2) * x comes here, too

    def __array_function__(self, function: Any, *_: Any) -> Any:
        raise TypeError(f"{type(self).__name__}: expected an array for {function.__name__}: use .to_dense() or .values")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        name = type(self).__name__
        if self.on_gpu:
            raise TypeError(f"NumPy cannot convert a {name} on the GPU: use x.to_dense().get().")
        if copy is False:
            raise ValueError(f"{name}: expected copy=None or True, for to_dense() makes a new array; got copy=False")
        return self.to_dense().astype(dtype or self.dtype, copy=False)
