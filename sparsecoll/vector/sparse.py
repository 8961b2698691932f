"""SparseVector: the stored entries of a long vector, with ascending unique indices."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsecoll.errors import check_choice, check_integer
from sparsecoll.kernels import kernels_of
from sparsecoll.kernels.keys import index_dtype, key_of, magnitude_of, nan_key
from sparsecoll.kernels.memory import asarray_like, empty, grown, on_gpu, to_host
from sparsecoll.vector.arithmetic import Arithmetic
from sparsecoll.vector.scipy_arrays import FORMATS, scipy_entries, to_scipy
from sparsecoll.vector.values import SMALLEST

FEW = 4096  # values of which NumPy tells sooner than a kernel whether they are finite
MULTIPLIERS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)  # of `hash_slots`; odd, otherwise arbitrary


class SparseVector(Arithmetic):
    """A long vector of which only some entries are stored: their ascending, unique `indices` and their `values`.

    Coordinates without a stored entry are zero. Stored zeros are allowed and count in `nnz`.

    Args:
        indices: 1-D integer array, strictly ascending, in [0, length). It is converted to uint32 for length <= 2^32,
            else to uint64, and copied. Differences below 0 wrap around: compute with `x.indices.astype(np.int64)`.
        values: 1-D array of bool, integers, floats or complex numbers, as many as indices. It is not copied.
            Both arrays are NumPy's or both CuPy's.
        length: number of coordinates, at most 2^63 - 1.

    Raises:
        ValueError: indices are unsorted, duplicate, negative or out of range, the sizes differ, or length is negative.
        TypeError: a dtype is not supported, or only one of the arrays is on the GPU.

    >>> x = SparseVector([1, 4], np.array([2.0, -3.0], dtype=np.float32), 6)
    >>> x
    SparseVector(length=6, nnz=2, density=0.333, dtype=float32, entries={1: 2, 4: -3})
    >>> x.to_dense()
    array([ 0.,  2.,  0.,  0., -3.,  0.], dtype=float32)

    From a dense array, and from pairs of indices and values in any order, in which indices may be repeated:

    >>> SparseVector.from_dense(np.array([0, 7, 0, 5])).indices
    array([1, 3], dtype=uint32)
    >>> SparseVector.from_pairs([4, 1, 4], np.array([-3.0, 2.0, 0.5]), 6).values
    array([ 2. , -2.5])

    Indexing, slicing and arithmetic are those of NumPy arrays, except that `==` returns one bool: whether the lengths
    and the stored entries are equal (a stored zero counts). `np.asarray(x)` is `x.to_dense()`:

    >>> x[4], x[0], x[1:5].indices
    (np.float32(-3.0), np.float32(0.0), array([0, 3], dtype=uint32))
    >>> (x + x) / 2 == x, np.asarray(2 * x)
    (True, array([ 0.,  4.,  0.,  0., -6.,  0.], dtype=float32))

    The largest magnitudes, the entries above a threshold, a sum:

    >>> x.topk(1).values, x.threshold(2.5).indices
    (array([-3.], dtype=float32), array([4], dtype=uint32))
    >>> SparseVector.merge([x, x.topk(1)], x.dtype).values
    array([ 2., -6.], dtype=float32)
    """

    __slots__ = ()

    @classmethod
    def collect(cls, parts: Iterable[SparseVector], room: int) -> SparseVector:
        """Return what `concatenate` returns; on the host, entries are copied as parts come, while they are in a cache.

        Args:
            parts: one or more vectors.
            room: number of entries for which memory is reserved at first; pages that are not filled take none.
        """
        first = next(iterator := iter(parts))
        if on_gpu(first.indices):
            return cls.concatenate([first, *iterator])
        indices, values, count = empty(room, first.indices.dtype), empty(room, first.dtype), 0
        for part in chain([first], iterator):
            stop = count + part.nnz
            if stop > indices.size:
                room = max(stop, 2 * indices.size)
                indices, values = (grown(array, count, room) for array in (indices, values))
            indices[count:stop], values[count:stop] = part.indices, part.values
            count = stop
        return cls.from_sorted_unchecked(indices[:count], values[:count], first.length)

    @classmethod
    def from_scipy(cls, x: Any) -> SparseVector:
        """Return the stored entries of a SciPy sparse array or matrix of any format, one row after the other.

        Explicit zeros stay, and duplicates are summed.

        Raises:
            TypeError: x is something else.

        >>> import scipy.sparse
        >>> sparsecoll.SparseVector.from_scipy(scipy.sparse.csr_array([[0.0, 2.0], [3.0, 0.0]])).indices
        array([1, 2], dtype=uint32)
        """
        return cls.from_sorted_unchecked(*scipy_entries(x))

    def to_scipy(self, shape: tuple[int, ...] | None = None, format: str = "coo") -> Any:
        """Return a SciPy sparse array in canonical form, which shares the memory of the values where it can.

        Args:
            shape: of as many coordinates as the vector has; None, the default, for (length,).
            format: "coo" (the default), "csr", "csc" or another of SciPy's.

        Raises:
            ValueError: The shape has another number of coordinates, or SciPy has no such format.

        >>> sparsecoll.SparseVector([1, 4], np.array([2.0, -3.0]), 6).to_scipy((2, 3), "csr").toarray()
        array([[ 0.,  2.,  0.],
               [ 0., -3.,  0.]])
        """
        check_choice("format", format, FORMATS)
        shape = (self.length,) if shape is None else tuple(np.ravel(shape).tolist())
        if math.prod(map(int, shape)) != self.length:
            raise ValueError(f"shape: expected {self.length} coordinates, got shape {shape}")
        return to_scipy(to_host(self.indices), to_host(self.values), shape, f"{format}_array")

    # Parts of the entries

    def sample(self, stride: int, offset: int) -> SparseVector:
        """Return every stride-th stored value from position `offset` on, copied, as a vector without gaps."""
        values = self.values[offset::stride].copy()
        indices = asarray_like(np.arange(values.size, dtype=index_dtype(values.size)), values)
        return SparseVector.from_sorted_unchecked(indices, values, values.size)

    def random_entries(self, k: int, key: int) -> SparseVector:
        """Return the stored entries among k random coordinates, which depend on `key` and `length` only."""
        chosen = kernels_of(self.values).random_indices(self.length, k, key)
        return self.take(kernels_of(self.indices).where_in(self.indices, chosen))

    # Magnitudes

    def topk(self, k: int) -> SparseVector:
        """Return the k entries of largest magnitude, ties by lower index; the vector itself if nnz <= k."""
        k = check_integer("k", k, 0)
        return self if k >= self.nnz else self._of(self._kernels.topk(self.values, k, indices=self.indices))

    def topk_by_key(self, key: int, ties: int) -> SparseVector:
        """Return the entries whose magnitude key exceeds `key`, and the first `ties` of those that have this key."""
        return self._of(self._kernels.topk_by_key(self.values, key, ties, indices=self.indices))

    def threshold(self, threshold: float, expected: int = 0) -> SparseVector:
        """Return the entries with a magnitude >= threshold, NaN among them; `expected` is a guess of their number."""
        key = key_of(threshold, self.dtype)
        return self._of(self._kernels.select_at_least(self.values, key, expected or self.nnz, indices=self.indices))

    def count_around_key(self, key: int, factor: float) -> tuple[int, int, int]:
        """Return the numbers of entries above `key`, with that key, and with at least `factor` times its magnitude."""
        count = self._kernels.count_at_least
        above = count(self.values, key + 1)
        equal = count(self.values, key) - above
        return above, equal, count(self.values, key_of(self.magnitude_of(key) * factor, self.dtype))

    def kth_magnitude(self, k: int) -> float:
        """Return the k-th largest magnitude, 1 <= k <= nnz."""
        return self.magnitude_of(self._kernels.kth_key(self.values, k)[0])

    def magnitude_stats(self, expected_nnz: int) -> tuple[NDArray[np.float64], SparseVector, float]:
        """Return (moments, the vector itself, 0.0); see DenseVector.

        Args:
            expected_nnz: as in `DenseVector.magnitude_stats`; it has no effect, since all entries are candidates.
        """
        return self._kernels.moments_of(self.values), self, 0.0

    def magnitude_keys(self) -> NDArray[Any]:
        """Return the magnitude keys of the values, unsigned integers (see kernels/keys.py)."""
        return self._kernels.magnitude_keys(self.values)  # type: ignore[no-any-return]

    def key_range(self) -> tuple[int, int]:
        """Return the smallest and the largest magnitude key of the values; (0, 0) without stored entries."""
        return self._kernels.key_range(self.values)  # type: ignore[no-any-return]

    def magnitude_of(self, key: int) -> float:
        """Return the magnitude of values of this dtype that have the given key."""
        return magnitude_of(key, self.dtype)

    def nan_key(self) -> int:
        """Return the smallest magnitude key of a NaN."""
        return nan_key(self.dtype)

    def has_zeros(self) -> bool:
        """Return whether a stored entry is zero."""
        return self.nnz > 0 and self.key_range()[0] == 0

    def drop_zeros(self) -> SparseVector:
        """Return the entries that are not zero; the vector itself if none is."""
        return self.threshold(SMALLEST, self.nnz) if self.has_zeros() else self

    def first_not_finite(self) -> int | None:
        """Return the index of the first NaN or infinity."""
        kind = self._array.dtype.kind
        if kind in "biu":
            return None
        if kind == "f" and self.nnz <= FEW and not self.on_gpu and b"\0" not in np.isfinite(self._array).tobytes():
            return None
        if self.key_range()[1] < self.nan_key() - 1:
            return None
        wrong = self.indices[~np.isfinite(self.values)]
        return int(wrong[0]) if wrong.size else None  # |z| of finite numbers may be infinite

    # Indices of two vectors

    def mask(self) -> NDArray[np.uint8]:
        """Return one bit for each coordinate, set where an entry is stored; as np.packbits, in host memory."""
        marks = empty(self.length, np.uint8, self.values)
        marks[:] = 0
        marks[self.indices] = 1
        return to_host(np.packbits(marks))

    def mask_of(self, other: SparseVector) -> NDArray[np.uint8]:
        """Return one bit for each entry of this vector, set where `other` stores its index; as np.packbits."""
        stored = empty(self.nnz, np.uint8, self.indices)
        stored[:] = 0
        stored[kernels_of(self.indices).where_in(self.indices, other.indices)] = 1
        return np.packbits(stored)

    def select_mask(self, mask: NDArray[np.uint8]) -> SparseVector:
        """Return the entries whose bit is set in a mask that `mask_of` returned."""
        return self.take(np.flatnonzero(np.unpackbits(mask)[: self.nnz]))

    def shifted(self, offset: int, length: int) -> SparseVector:
        """Return the entries of this vector in one of `length` coordinates, at index + offset."""
        dtype, step = index_dtype(max(length, self.length)), abs(offset)
        indices = self.indices.astype(dtype)
        indices = indices + dtype.type(step) if offset >= 0 else indices - dtype.type(step)
        return SparseVector.from_sorted_unchecked(indices.astype(index_dtype(length), copy=False), self.values, length)
