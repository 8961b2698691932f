"""Entries: the common part of SparseVector and RowSparse, with the names of NumPy and SciPy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from sparsecoll.kernels import kernels_of, kernels_of_values
from sparsecoll.kernels.keys import index_dtype
from sparsecoll.kernels.memory import asarray_like, empty, may_share_memory, to_host
from sparsecoll.telemetry.trace import listening, span
from sparsecoll.vector.operation import SUM, Operation
from sparsecoll.vector.pairs import combined, sorted_order
from sparsecoll.vector.values import (
    ENTRIES,
    Values,
    accumulator_dtype,
    checked_length,
    dense_values,
    finite_difference,
    native_values,
    not_zero,
    pairs,
    saturating_cast,
    stacked,
    taken,
)

SHOWN = 4  # entries, or rows, in a repr


class Entries(Values):
    """Ascending, unique `indices` below `length`, and a value, or a row of `width` values, for each of them."""

    __slots__ = ("indices", "length")

    indices: NDArray[Any]
    length: int
    _kind = ENTRIES

    def __init__(self, indices: Any, values: Any, length: int) -> None:
        self.indices, self._array, self.length = pairs(indices, values, length, self._kind)
        position = kernels_of(self._array).first_unsorted(self.indices, self.length)
        if position >= 0:
            before, index = int(self.indices[position - 1]), int(self.indices[position])
            what = "repeated" if before == index else "unsorted"
            found = f"{what}: {before} at position {position - 1}, then {index}"
            cure = f"{self._kind.name}.from_pairs takes them in any order"
            raise ValueError(f"{self._kind.indices}: expected strictly ascending, got {found}; {cure}")

    @classmethod
    def from_sorted_unchecked(cls, indices: NDArray[Any], values: NDArray[Any], length: int) -> Self:
        """Return a vector of arrays that are valid: ascending, unique, in range, indices of `index_dtype(length)`."""
        vector = object.__new__(cls)
        vector.indices, vector._array, vector.length = indices, values, length
        return vector

    @classmethod
    def empty(cls, length: int, dtype: Any) -> Self:
        """Return a vector without stored entries, in host memory.

        Args:
            length: number of coordinates, at most 2^63 - 1.
            dtype: NumPy dtype of the values, or its name.
        """
        length = checked_length(length, "length")
        return cls.from_sorted_unchecked(np.empty(0, index_dtype(length)), empty(0, dtype), length)

    @classmethod
    def from_dense(cls, array: Any) -> Self:
        """Return the nonzero entries (NaN among them) of a 1-D array.

        Args:
            array: 1-D array of NumPy or CuPy, or what `np.asarray` converts to one.
        """
        values = dense_values(array)
        with span("dense", values.size):
            indices, nonzeros = kernels_of(values).select_at_least(values, 1)
        return cls.from_sorted_unchecked(indices, nonzeros, values.size)

    @classmethod
    def from_pairs(cls, indices: Any, values: Any, length: int, op: str | None = "sum") -> Self:
        """Return a vector of (index, value) pairs in any order, in which indices may be repeated.

        Args:
            indices: 1-D integer array, each index in [0, length). It is sorted only if it is not ascending.
            values: 1-D array of a dtype that SparseVector supports, as many as indices.
            length: number of coordinates, at most 2^63 - 1.
            op: how the values of a repeated index are combined: "sum" (the default; in the order given, float16 and
                bfloat16 in float32 and rounded once), "min", "max", or "replace" (the last one is kept). None raises
                ValueError for a repeated index.

        Raises:
            ValueError: An index is out of range, the sizes differ, or `op` is not one of these.
            TypeError: A dtype is not supported.

        >>> sparsecoll.SparseVector.from_pairs([4, 1, 4], np.array([2.0, 3.0, 5.0]), 6)
        SparseVector(length=6, nnz=2, density=0.333, dtype=float64, entries={1: 3, 4: 7})
        >>> sparsecoll.SparseVector.from_pairs([4, 1, 4], np.array([2.0, 3.0, 5.0]), 6, op="min").values
        array([3., 2.])
        """
        stored, values, length = pairs(indices, values, length, cls._kind)
        return cls.from_sorted_unchecked(*combined(stored, values, op), length)

    @classmethod
    def merge(cls, parts: Sequence[Self], dtype: np.dtype[Any], op: Operation = SUM) -> Self:
        """Return the entries of one or more vectors; values of the same index are combined in the order of `parts`.

        Args:
            parts: vectors of one length.
            dtype: of the result; values of float16 and bfloat16 are combined in float32 and rounded once.
            op: the Operation (default: the sum, which starts at +0).
        """
        result, dtype = dtype, accumulator_dtype(dtype)
        length, fold = parts[0].length, op.fold(dtype)
        amounts = (sum(p.nnz for p in parts), max(p.extent for p in parts)) if listening() else ()
        with span("merge", *amounts):
            if fold is not None:
                folded = [(p.indices, p.values.astype(dtype, copy=False)) for p in parts]
                merge_fold = kernels_of(parts[0].indices).merge_fold
                indices, values = merge_fold(folded, fold, op.zeros and fold != "last")
            else:
                indices, values = _merge_sum([(p.indices, p._array) for p in parts], dtype)
        merged = cls.from_sorted_unchecked(indices.astype(index_dtype(length), copy=False), values, length)
        return merged if dtype == result else merged.astype(result)

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Return the entries of all parts, whose index ranges follow each other. A single part is returned as it is."""
        if len(parts) == 1:
            return parts[0]
        indices, values = (stacked(arrays) for arrays in ([p.indices for p in parts], [p.values for p in parts]))
        return cls.from_sorted_unchecked(indices, values, parts[0].length)

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Return the entries of parts that share no index, in the dtype of the first."""
        joined = cls.concatenate([part for part in parts if part.nnz] or parts[:1])
        if bool((joined.indices[1:] > joined.indices[:-1]).all()):
            return joined
        ascending, order = sorted_order(joined.indices)
        return joined._of((ascending, taken(joined.values, order)))

    def _of(self, entries: tuple[NDArray[Any], NDArray[Any]]) -> Self:
        return self.from_sorted_unchecked(*entries, self.length)

    @property
    def nnz(self) -> int:
        """Number of stored entries, explicit zeros among them."""
        return int(self.indices.size)

    @property
    def extent(self) -> int:
        """Number of coordinates from the first stored index to the last; 0 without stored entries."""
        return int(self.indices[-1]) - int(self.indices[0]) + 1 if self.indices.size else 0

    @property
    def density(self) -> float:
        """nnz / length; 0.0 for length 0."""
        return self.nnz / self.length if self.length else 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """(length,)."""
        return (self.length,)

    @property
    def size(self) -> int:
        """Number of coordinates, as of a NumPy array; `nnz` is the number of stored entries."""
        return math.prod(self.shape)

    ndim = 1

    # Conversions

    def to_sparse(self, keep_zeros: bool = True) -> Self:
        """Return the vector itself.

        Args:
            keep_zeros: as in `DenseVector.to_sparse`; it has no effect, since a sparse vector keeps the zeros that it
                stores.
        """
        return self

    def to_dense(self, fill: Any = 0) -> NDArray[Any]:
        """Return a new array of this shape.

        Args:
            fill: value of the coordinates without a stored entry (default: 0).
        """
        with span("dense", self.size):
            dense = empty(self.size, self.dtype, self.values).reshape(self.shape)
            if isinstance(fill, int) and fill == 0 and not self.width:
                kernels_of_values(dense).write_dense(dense, self.indices, self.values)
            else:
                dense[:] = fill
                dense[self.indices] = self.values
        return dense

    def astype(self, dtype: Any) -> Self:
        """Return the entries as `dtype`, as NumPy casts them; where real floats become narrower ones, finite values
        beyond their range become the largest finite one. What stays the same shares memory with this vector.
        """
        return self.with_values(saturating_cast(self.values, np.dtype(dtype)))

    def copy(self) -> Self:
        """Return a vector whose arrays share no memory with this one's."""
        return self.from_sorted_unchecked(self.indices.copy(), self.values.copy(), self.length)

    def with_values(self, values: NDArray[Any]) -> Self:
        """Return a vector of other values, of the same shape, at the same indices."""
        values = native_values(values)
        if values.shape != self.values.shape:
            raise ValueError(f"values: expected shape {self.values.shape}, got {values.shape}")
        return self.from_sorted_unchecked(self.indices, values, self.length)

    # Parts

    def take(self, positions: NDArray[np.int64]) -> Self:
        """Return the entries at ascending positions, copied."""
        return self._of((self.indices[positions], taken(self.values, positions)))

    def slice_entries(self, start: int, stop: int) -> Self:
        """Return the entries at positions start..stop-1, as views."""
        return self._of((self.indices[start:stop], self.values[start:stop]))

    def searchsorted(self, edges: Any) -> NDArray[np.int64]:
        """Return np.searchsorted(indices, edges): for each edge (0..length) the number of entries below it."""
        limit = int(np.iinfo(self.indices.dtype).max)
        edges = np.asarray(edges, dtype=np.uint64)
        inside = asarray_like(np.minimum(edges, limit).astype(self.indices.dtype), self.indices)
        positions = to_host(np.searchsorted(self.indices, inside))
        return np.where(edges > limit, self.nnz, positions).astype(np.int64)

    def split(self, boundaries: Sequence[int]) -> list[Self]:
        """Return the entries between consecutive boundaries, as views; indices and length are those of the vector."""
        return [self.slice_entries(a, b) for a, b in pairwise(self.searchsorted(boundaries))]

    def intersect(self, other: Entries) -> Self:
        """Return the entries of this vector whose index `other` stores, too."""
        return self.take(kernels_of(self.indices).where_in(self.indices, other.indices))

    def difference(self, other: Entries) -> Self:
        """Return the entries of this vector whose index `other` does not store."""
        return self.take(kernels_of(self.indices).where_in(self.indices, other.indices, invert=True))

    def __len__(self) -> int:
        return self.length

    __iter__ = __reversed__ = None  # a loop over `length` coordinates is never meant

    def __bool__(self) -> bool:
        raise ValueError(f"The truth value of a {type(self).__name__} is ambiguous: use x.nnz or len(x).")

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            start, stop, step = key.indices(self.length)
            if step != 1:
                raise IndexError(f"index: expected an integer or a slice of step 1, got step {step}")
            a, b, length = self._position(start), self._position(max(start, stop)), max(0, stop - start)
            indices = self.indices[a:b] - self.indices.dtype.type(start) if start and a < b else self.indices[a:b]
            return self.from_sorted_unchecked(indices.astype(index_dtype(length), copy=False), self.values[a:b], length)
        if isinstance(key, (bool, np.bool_)) or not isinstance(key, (int, np.integer)):
            raise TypeError(f"index: expected an integer or a slice of step 1, got {key!r}")
        index = int(key) + (self.length if key < 0 else 0)
        if not 0 <= index < self.length:
            raise IndexError(f"index: expected from {-self.length} to {self.length - 1}, got {key}")
        position = self._position(index)
        if position < self.nnz and int(self.indices[position]) == index:
            return self.values[position]
        return np.zeros_like(self.values, shape=self.values.shape[1:])[()]

    def _position(self, index: int) -> int:
        """Return the number of entries below an index, 0 <= index <= length."""
        if index > np.iinfo(self.indices.dtype).max:
            return self.nnz
        return int(np.searchsorted(self.indices, self.indices.dtype.type(index)))

    def divide(self, divisor: int) -> Self:
        """Return self / divisor, in its own dtype, rounded once."""
        return self.with_values(np.divide(self.values, divisor).astype(self.dtype, copy=False))

    def rounding_error(self, rounded: Self) -> Self:
        """Return self - rounded, which has the same indices, where they differ; infinities and NaN have no error."""
        if rounded.values is self.values:
            return self.slice_entries(0, 0)
        positions = not_zero(error := finite_difference(self.values, rounded.values))
        return self._of((self.indices[positions], error[positions]))

    def _copy_if_overlapping(self, other: Values) -> Self:
        """Return the same entries in arrays that share no memory with those of `other`."""
        theirs = (other.indices, other.values) if isinstance(other, Entries) else (other.values,)
        own = [a.copy() if any(may_share_memory(a, b) for b in theirs) else a for a in (self.indices, self._array)]
        return self._of((own[0], own[1]))

    def __repr__(self) -> str:
        first = zip(to_host(self.indices[:SHOWN]).tolist(), to_host(self.values[:SHOWN]).tolist(), strict=True)
        shown = [f"{index}: {value:.6g}" for index, value in first] + ["..."] * (self.nnz > SHOWN)
        size = f"length={self.length}, nnz={self.nnz}, density={self.density:.3g}, dtype={self.dtype}"
        return f"{type(self).__name__}({size}, entries={{{', '.join(shown)}}})"


def _merge_sum(parts: list[tuple[NDArray[Any], NDArray[Any]]], dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """Return the sum of (indices, values) by kernels for real floats and signed integers."""
    merge_sum = kernels_of(parts[0][0]).merge_sum
    if dtype.kind == "u":  # the same bits as signed integers
        signed = np.dtype(f"i{dtype.itemsize}")
        indices, values = merge_sum([(i, v.astype(dtype, copy=False).view(signed)) for i, v in parts], signed)
        return indices, values.view(dtype)
    if dtype.kind != "c":
        return merge_sum(parts, dtype)  # type: ignore[no-any-return]
    real = np.dtype(f"f{dtype.itemsize // 2}")
    indices, reals = merge_sum([(i, v.real) for i, v in parts], real)
    values = empty(int(indices.size), dtype)
    values.real, values.imag = reals, merge_sum([(i, v.imag) for i, v in parts], real)[1]
    return indices, values
