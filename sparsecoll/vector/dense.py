"""DenseVector: all values of a vector, with the methods that algorithms and selectors use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from sparsecoll.errors import check_integer
from sparsecoll.kernels import kernels_of, kernels_of_values
from sparsecoll.kernels.keys import index_dtype, key_of, magnitude_of
from sparsecoll.kernels.memory import asarray_like, data_ptr, empty
from sparsecoll.telemetry.trace import span
from sparsecoll.vector.operation import SUM, Operation
from sparsecoll.vector.sparse import SparseVector
from sparsecoll.vector.values import Values, dense_values, finite_difference, saturating_cast


class DenseVector(Values):
    """A vector all of whose values are stored.

    Args:
        values: 1-D NumPy or CuPy array of bool, integers, floats or complex numbers. It is not copied if contiguous.

    >>> x = DenseVector(np.array([0.5, -2.0, 1.0]))
    >>> x.topk(2).indices
    array([1, 2], dtype=uint32)
    >>> x.threshold(1.0).values
    array([-2.,  1.])
    """

    __slots__ = ()

    def __init__(self, values: Any) -> None:
        self._array = dense_values(values)

    @classmethod
    def _unchecked(cls, values: NDArray[Any]) -> DenseVector:
        """Return a vector of an array that is valid: 1-D, contiguous, of a supported dtype."""
        vector = object.__new__(cls)
        vector._array = values
        return vector

    @classmethod
    def zeros(cls, length: int, dtype: Any, like: SparseVector | DenseVector) -> DenseVector:
        """Return a vector of zeros.

        Args:
            length: number of coordinates.
            dtype: NumPy dtype of the values, or its name.
            like: vector; the new one is on the GPU if this one is.
        """
        zeros = cls.empty(length, dtype, like)
        zeros.values[:] = 0
        return zeros

    @classmethod
    def empty(cls, length: int, dtype: Any, like: SparseVector | DenseVector) -> DenseVector:
        """Return a vector of uninitialised values; arguments as of `zeros`."""
        try:
            return cls._unchecked(empty(length, dtype, like.values))
        except (MemoryError, ValueError) as error:
            raise MemoryError(f"{length} dense values: no memory for all ({error}): send sparse ones") from None

    @classmethod
    def marked(cls, entries: SparseVector) -> DenseVector:
        """Return float32 or float64 entries as a vector whose coordinates are -0.0 where no entry is stored.

        Sums of these vectors are +0.0 or another number where some of them store an entry, since -0.0 is the sum of
        nothing but -0.0: `stored` returns the entries of the sum.
        """
        vector = cls.empty(entries.length, entries.dtype, entries)
        with span("dense", entries.length):
            bits = vector.values.view(f"i{entries.dtype.itemsize}")
            bits[:] = np.iinfo(bits.dtype).min  # -0.0; filled with the number, CuPy's arrays would be +0.0
            vector.add_at(entries.with_values(entries.values + entries.dtype.type(0)))
        return vector

    @property
    def length(self) -> int:
        """Number of coordinates."""
        return int(self._array.size)

    nnz = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.values[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        array = np.asarray(self.values, dtype)
        if copy is False and array is not self.values:
            raise ValueError(f"DenseVector: expected copy=None where {self.dtype} becomes {array.dtype}, got False")
        return array.copy() if copy and array is self.values else array

    def _of(self, entries: tuple[NDArray[Any], NDArray[Any]]) -> SparseVector:
        return SparseVector.from_sorted_unchecked(*entries, self.length)

    def _select(self, kernel: Callable[..., Any], *arguments: Any, **options: Any) -> SparseVector:
        return self._of(kernel(self.values, *arguments, **options))

    def _lower_bound_key(self, expected_nnz: int) -> int:
        return int(self._kernels.lower_bound_key(self.values, expected_nnz))

    def to_dense(self) -> NDArray[Any]:
        """Return the values themselves."""
        return self.values

    def to_sparse(self, keep_zeros: bool = False) -> SparseVector:
        """Return the nonzero entries (NaN among them).

        Args:
            keep_zeros: whether to return an entry for every coordinate instead (default: False).
        """
        if keep_zeros:
            return self.take(asarray_like(np.arange(self.length, dtype=index_dtype(self.length)), self.values))
        with span("dense", self.length):
            return self._of(self._kernels.select_at_least(self.values, 1))

    # Parts of the vector

    def slice(self, start: int, stop: int) -> DenseVector:
        """Return coordinates start..stop-1 as a vector of their own, a view."""
        return DenseVector._unchecked(self.values[start:stop])

    def take(self, indices: NDArray[Any]) -> SparseVector:
        """Return the values at ascending unique indices (of `index_dtype(length)`), zeros among them."""
        return self._of((indices, self.values[indices]))

    def select_mask(self, mask: NDArray[np.uint8]) -> SparseVector:
        """Return the values whose bit is set in a mask as of `SparseVector.mask`, zeros among them."""
        indices = np.flatnonzero(np.unpackbits(mask, count=self.length)).astype(index_dtype(self.length))
        return self.take(asarray_like(indices, self.values))

    def stored(self) -> SparseVector:
        """Return the entries of a sum of `marked` vectors, zeros among them; the values of this one are lost."""
        with span("dense", self.length):
            bits = self.values.view(f"i{self.dtype.itemsize}")
            sign = np.iinfo(bits.dtype).min
            np.bitwise_xor(bits, sign, out=bits)  # 0 where nothing is stored
            indices, stored = kernels_of(bits).select_at_least(bits, 1)
            np.bitwise_xor(stored, sign, out=stored)
        return self._of((indices, stored.view(self.dtype)))

    def sample(self, stride: int, offset: int) -> SparseVector:
        """Return every stride-th value from index `offset` on, copied, as a vector without gaps."""
        return DenseVector(self.values[offset::stride].copy()).to_sparse(keep_zeros=True)

    def random_entries(self, k: int, key: int) -> SparseVector:
        """Return the values at k random coordinates, which depend on `key` and `length` only, zeros among them."""
        return self.take(kernels_of(self.values).random_indices(self.length, k, key))

    # Magnitudes

    def topk(self, k: int) -> SparseVector:
        """Return the k entries of largest magnitude, ties by lower index."""
        return self._select(self._kernels.topk, min(check_integer("k", k, 0), self.length))

    def threshold(self, threshold: float, expected: int = 0) -> SparseVector:
        """Return the entries with a magnitude >= threshold, NaN among them; `expected` is a guess of their number."""
        return self._select(self._kernels.select_at_least, key_of(threshold, self.dtype), expected)

    def magnitude_stats(self, expected_nnz: int) -> tuple[NDArray[np.float64], SparseVector, float]:
        """Return moments and the candidates for a threshold, in one pass.

        Args:
            expected_nnz: number of entries that should reach the bound.

        Returns:
            (moments, candidates, bound): float64[4] with the sums of x, x^2 and |x|, and the largest |x|; the nonzeros
            with |x| >= bound; the bound, estimated on a sample so that at least `expected_nnz` entries are likely to
            reach it, and not many more.
        """
        key, moments, room = self._lower_bound_key(expected_nnz), np.empty(4), expected_nnz + (expected_nnz >> 2)
        candidates = self._select(self._kernels.select_at_least, max(key, 1), room, moments=moments)
        return moments, candidates, magnitude_of(key, self.dtype)

    def first_not_finite(self) -> int | None:
        """Return the index of the first NaN or infinity."""
        with np.errstate(over="ignore", invalid="ignore"):
            if self.dtype.kind in "biu" or np.isfinite(self.values.sum()):  # one pass, no array
                return None
        wrong = np.flatnonzero(~np.isfinite(self.values))
        return int(wrong[0]) if wrong.size else None

    # Arithmetic

    def with_values(self, values: NDArray[Any]) -> Self:
        """Return a vector of other values."""
        return type(self)(values)

    def astype(self, dtype: Any) -> DenseVector:
        """Return the values as `dtype`; see `SparseVector.astype`."""
        return DenseVector(saturating_cast(self.values, np.dtype(dtype)))

    def combine(self, other: DenseVector, dtype: Any, into: DenseVector | None, op: Operation = SUM) -> DenseVector:
        """Return self and other combined by an operation.

        Args:
            other: vector of the same length.
            dtype: dtype in which values are combined, and of the result.
            into: vector of this dtype for the result, which may be self; None for a new one.
            op: operation (default: the sum).
        """
        fold, out = op.fold(np.dtype(dtype)), empty(self.length, dtype, self.values) if into is None else into.values
        with span("dense", self.length), np.errstate(over="ignore", invalid="ignore"):
            if fold is None:
                return DenseVector(np.add(self.values, other.values, out=out, dtype=dtype))
            if into is not self:
                out[:] = self.values
            kernels_of(out).fold_into(out, other.values.astype(dtype, copy=False), fold)
        return DenseVector(out)

    def subtract(self, other: DenseVector) -> DenseVector:
        """Return self - other in self's dtype; zero where both are the same infinity or either is NaN."""
        return DenseVector(finite_difference(self.values, other.values))

    def copy_from(self, other: DenseVector) -> None:
        """Copy the values of `other` into this vector, unless they are in the same memory."""
        if data_ptr(other.values) != data_ptr(self.values):
            with span("dense", self.length):
                self.values[:] = other.values

    def copy_entries(self, entries: SparseVector, divisor: int) -> None:
        """Copy entries / divisor, floats, into this vector, and zeros where no entry is stored."""
        kernels_of_values(self.values).write_dense(self.values, entries.indices, entries.values, divisor)

    def copy_sum(self, parts: Sequence[Sequence[SparseVector]], divisor: int) -> None:
        """Copy (sum of vectors) / divisor into this vector, of float32 or float64, without forming the sum as entries.

        Args:
            parts: groups of as many vectors each; the indices of a group are below those of the next one.
            divisor: at least 1.
        """
        entries = [(part.indices, part.values) for group in parts for part in group]
        kernels_of_values(self.values).write_sum(self.values, entries, divisor, len(parts[0]))

    def add_at(self, entries: SparseVector) -> None:
        """self += entries, in place."""
        kernels_of_values(self.values).scatter_add(self.values, entries.indices, entries.values)

    def subtract_at(self, entries: SparseVector | DenseVector) -> None:
        """self -= entries, in place."""
        if isinstance(entries, DenseVector):
            np.subtract(self.values, entries.values, out=self.values)
            return
        kernels_of_values(self.values).scatter_add(self.values, entries.indices, entries.values, subtract=True)

    def scatter_add(self, indices: NDArray[Any], values: NDArray[Any]) -> None:
        """self[index] += value in the order given, in place; indices of `length` or more are skipped."""
        kernels_of_values(self.values).scatter_add_marked(self.values, indices, values)

    def __repr__(self) -> str:
        return f"DenseVector(length={self.length}, dtype={self.dtype})"
