"""SparseVector and DenseVector: what algorithms compute with. Their arrays are NumPy's or CuPy's.

Both have `length` (coordinates), `nnz` (entries held), `dtype`, `topk`, `threshold` and `to_dense`; an algorithm
calls these methods and the transport, and never touches an array.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sparsecoll.kernels import kernels_of
from sparsecoll.kernels.keys import Array, index_dtype, key_of, magnitude_of, nan_key
from sparsecoll.kernels.memory import asarray_like, contiguous, data_ptr, empty, may_share_memory, on_gpu, to_host
from sparsecoll.telemetry.trace import span

if TYPE_CHECKING:
    from typing_extensions import Self

VALUE_DTYPES = tuple(np.dtype(name) for name in ("float16", "float32", "float64", "int32", "int64"))


MULTIPLIERS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)  # of `hash_slots`; odd, otherwise arbitrary
SMALLEST = 5e-324  # the smallest magnitude above zero


def accumulator_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type in which values of `dtype` are summed: float32 for float16, else `dtype` itself."""
    return np.dtype(np.float32) if dtype == np.float16 else dtype


def check_value_dtype(dtype: np.dtype[Any]) -> None:
    """Raise TypeError unless `dtype` is one of VALUE_DTYPES."""
    if dtype not in VALUE_DTYPES:
        native = dtype.newbyteorder("=")
        cure = f" of the other byte order: use x.astype(np.{native})" if native in VALUE_DTYPES else ""
        raise TypeError(f"values: expected dtype {', '.join(map(str, VALUE_DTYPES))}, got {dtype}{cure}")


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


class SparseVector:
    """A long vector of which few entries are held: ascending unique `indices` and their `values`.

    Args:
        indices: 1-D integers, strictly ascending, in [0, length). Stored as uint32 for length <= 2^32, else uint64.
        values: 1-D, as many as indices; float16/32/64 or int32/64. Not copied. Both NumPy's or both CuPy's.
        length: number of coordinates, up to 2^63 - 1.

    Raises:
        ValueError: indices unsorted, duplicate, negative or out of range; sizes differ; length negative.
        TypeError: a dtype that is not supported; one array on the GPU, the other not.

    >>> x = SparseVector([1, 4], np.array([2.0, -3.0], dtype=np.float32), 6)
    >>> x.nnz, x.density
    (2, 0.3333333333333333)
    >>> x.to_dense()
    array([ 0.,  2.,  0.,  0., -3.,  0.], dtype=float32)
    """

    __slots__ = ("indices", "length", "values")

    indices: NDArray[Any]
    values: NDArray[Any]
    length: int

    def __init__(self, indices: Any, values: Any, length: int) -> None:
        self.length = _checked_length(length)
        self.values = _array(values)
        given = _array(indices)
        if on_gpu(given) != on_gpu(self.values):
            where = ["CuPy" if on_gpu(array) else "NumPy" for array in (given, self.values)]
            raise TypeError(
                f"indices, values: expected both on the GPU or neither, got arrays of {' and '.join(where)}"
            )
        if given.size == 0 and given.ndim == 1:
            given = given.astype(np.int64)
        if given.ndim != 1 or self.values.ndim != 1 or given.size != self.values.size:
            raise ValueError(
                "indices, values: expected two 1-D arrays of one size,"
                f" got shapes {given.shape} and {self.values.shape}"
            )
        if given.dtype.kind not in "iu":
            raise TypeError(f"indices: expected integers, got {given.dtype}")
        check_value_dtype(self.values.dtype)
        if given.dtype.kind == "i" and given.size and int(given.min()) < 0:
            raise ValueError(f"indices: expected at least 0, got {int(given.min())}")
        if given.size and int(given.max()) >= self.length:
            raise ValueError(f"indices: expected below length {self.length}, got {int(given.max())}")
        self.indices = contiguous(given, index_dtype(self.length))
        self.values = contiguous(self.values)
        place = kernels_of(self.values).first_unsorted(self.indices, self.length)
        if place >= 0:
            before, here = int(self.indices[place - 1]), int(self.indices[place])
            what = "duplicate" if before == here else "unsorted"
            raise ValueError(
                f"indices: expected strictly ascending, got {what}: {before} at position {place - 1}, then {here};"
                " order = np.argsort(indices) sorts both arrays, and a SciPy coo_array also sums duplicates"
            )

    @classmethod
    def from_sorted_unchecked(cls, indices: NDArray[Any], values: NDArray[Any], length: int) -> Self:
        """A vector from arrays known to be right (ascending, unique, in range, of the index dtype); nothing checked."""
        vector = object.__new__(cls)
        vector.indices, vector.values, vector.length = indices, values, length
        return vector

    @classmethod
    def empty(cls, length: int, dtype: Any) -> SparseVector:
        """A vector that holds nothing, in host memory."""
        return cls.from_sorted_unchecked(np.empty(0, index_dtype(length)), np.empty(0, dtype), length)

    @classmethod
    def from_dense(cls, array: Any) -> SparseVector:
        """The nonzero entries (NaN among them) of a 1-D array."""
        return DenseVector(array).to_sparse()

    @classmethod
    def concatenate(cls, parts: Sequence[SparseVector]) -> SparseVector:
        """Parts whose index ranges follow each other, joined; one part is returned as it is."""
        if len(parts) == 1:
            return parts[0]
        count, first = sum(p.nnz for p in parts), parts[0]
        indices = np.concatenate([p.indices for p in parts], out=empty(count, first.indices.dtype, first.indices))
        values = np.concatenate([p.values for p in parts], out=empty(count, first.dtype, first.values))
        return cls.from_sorted_unchecked(indices, values, first.length)

    @classmethod
    def sum(cls, parts: Sequence[SparseVector], dtype: np.dtype[Any]) -> SparseVector:
        """Sum in `dtype`, added in the order of `parts` (at least one), starting at +0. Memory: the entries."""
        kernels = kernels_of(parts[0].values)
        with span("merge", sum(p.nnz for p in parts), max(p.span for p in parts)):
            indices, values = kernels.merge_sum([(p.indices, p.values) for p in parts], dtype)
        return cls.from_sorted_unchecked(
            indices.astype(index_dtype(parts[0].length), copy=False), values, parts[0].length
        )

    @property
    def nnz(self) -> int:
        """Entries held (explicit zeros among them)."""
        return int(self.indices.size)

    @property
    def span(self) -> int:
        """Coordinates from the first index held to the last; 0 if nothing is held."""
        return int(self.indices[-1]) - int(self.indices[0]) + 1 if self.indices.size else 0

    @property
    def density(self) -> float:
        """nnz / length; 0.0 for length 0."""
        return self.nnz / self.length if self.length else 0.0

    @property
    def dtype(self) -> np.dtype[Any]:
        """dtype of the values."""
        return self.values.dtype

    @property
    def on_gpu(self) -> bool:
        """Whether the arrays are CuPy's."""
        return on_gpu(self.values)

    def to_dense(self) -> NDArray[Any]:
        """A new array of `length` values."""
        with span("dense", self.length):
            dense = empty(self.length, self.dtype, self.values)
            dense[:] = 0
            dense[self.indices] = self.values
        return dense

    def split(self, boundaries: Sequence[int]) -> list[SparseVector]:
        """The entries between consecutive boundaries, as views; indices and length stay those of the whole vector."""
        places = self.searchsorted(boundaries)
        return [
            SparseVector.from_sorted_unchecked(self.indices[a:b], self.values[a:b], self.length)
            for a, b in pairwise(places)
        ]

    def slice_entries(self, start: int, stop: int) -> SparseVector:
        """Entries number start..stop-1 in index order, as views."""
        return SparseVector.from_sorted_unchecked(self.indices[start:stop], self.values[start:stop], self.length)

    def searchsorted(self, edges: Any) -> NDArray[np.int64]:
        """For each edge (0..length), how many entries have an index below it."""
        limit = int(np.iinfo(self.indices.dtype).max)
        edges = np.asarray(edges, dtype=np.uint64)
        inside = asarray_like(np.minimum(edges, limit).astype(self.indices.dtype), self.indices)
        places = to_host(np.searchsorted(self.indices, inside))
        return np.where(edges > limit, self.nnz, places).astype(np.int64)

    def subdivide(self, edges: Sequence[int], cuts: int) -> list[int]:
        """The regions between edges, each cut into `cuts` with equal numbers of the own entries: edges again."""
        finer: list[int] = []
        for (low, _), (first, beyond) in zip(pairwise(edges), pairwise(self.searchsorted(edges).tolist()), strict=True):
            places = [first + (beyond - first) * cut // cuts for cut in range(1, cuts)]
            finer += [low, *(self.indices[places].tolist() if first < beyond else [low] * (cuts - 1))]
        return [*finer, edges[-1]]

    def magnitude_keys(self) -> NDArray[Any]:
        """Magnitude keys of the values (see kernels.reference), unsigned."""
        return kernels_of(self.values).magnitude_keys(self.values)  # type: ignore[no-any-return]

    def has_nan(self) -> bool:
        """Whether a value is NaN."""
        return self.key_range()[1] >= self.nan_key()

    def has_zeros(self) -> bool:
        """Whether an entry held is zero."""
        return self.nnz > 0 and self.key_range()[0] == 0

    def drop_zeros(self) -> SparseVector:
        """The entries that are not zero; the vector itself if all are."""
        return self.threshold(SMALLEST, self.nnz) if self.has_zeros() else self

    def mask(self) -> NDArray[np.uint8]:
        """One bit for each coordinate, in host memory: whether it is held. See `DenseVector.select_mask`."""
        return _bits([self])

    def first_not_finite(self) -> int | None:
        """The index of the first NaN or infinity."""
        if self.dtype.kind != "f" or self.key_range()[1] < self.nan_key() - 1:
            return None
        return int(self.indices[~np.isfinite(self.values)][0])

    def nan_key(self) -> int:
        """Magnitude keys at or above this one are NaN."""
        return int(nan_key(self.dtype))

    def take(self, positions: NDArray[np.int64]) -> SparseVector:
        """The entries at ascending positions."""
        return SparseVector.from_sorted_unchecked(self.indices[positions], self.values[positions], self.length)

    def _of(self, entries: tuple[NDArray[Any], NDArray[Any]]) -> SparseVector:
        return SparseVector.from_sorted_unchecked(*entries, self.length)

    def topk(self, k: int) -> SparseVector:
        """The k largest magnitudes, ties by lower index; the vector itself if it holds no more than k."""
        if k >= self.nnz:
            return self
        return self._of(kernels_of(self.values).topk(self.values, k, indices=self.indices))

    def topk_by_key(self, key: int, ties: int) -> SparseVector:
        """Entries whose magnitude key is above `key`, and the first `ties` of those equal to it."""
        return self._of(kernels_of(self.values).topk_by_key(self.values, key, ties, indices=self.indices))

    def threshold(self, threshold: float, expected: int = 0) -> SparseVector:
        """Entries with a magnitude >= threshold (NaN counts as above all)."""
        kernels = kernels_of(self.values)
        key = key_of(threshold, self.dtype)
        return self._of(kernels.select_at_least(self.values, key, expected or self.nnz, indices=self.indices))

    def count_at_least(self, threshold: float) -> int:
        """How many entries have a magnitude >= threshold."""
        kernels = kernels_of(self.values)
        return int(kernels.count_at_least(self.values, key_of(threshold, self.dtype)))

    def key_range(self) -> tuple[int, int]:
        """(smallest, largest) magnitude key of the values; (0, 0) if nothing is held."""
        return kernels_of(self.values).key_range(self.values)  # type: ignore[no-any-return]

    def sample(self, stride: int, offset: int) -> SparseVector:
        """Every stride-th value held, from position `offset` on, copied (numbered, not at its index)."""
        return DenseVector(self.values[offset::stride].copy()).to_sparse(keep_zeros=True)

    def magnitude_stats(self, expected_nnz: int) -> tuple[NDArray[np.float64], SparseVector, float]:
        """(sums of x, x^2, |x| and the largest |x|; the entries; a bound below all of them: 0)."""
        return kernels_of(self.values).moments_of(self.values), self, 0.0

    def random_entries(self, k: int, key: int) -> SparseVector:
        """The entries held among k random coordinates that depend on `key` and the length alone."""
        chosen = kernels_of(self.values).random_indices(self.length, k, key)
        return self.intersect(SparseVector.from_sorted_unchecked(chosen, chosen, self.length))

    def kth_magnitude(self, k: int) -> float:
        """The k-th largest magnitude, 1 <= k <= nnz."""
        kernels = kernels_of(self.values)
        return float(magnitude_of(kernels.kth_key(self.values, k)[0], self.dtype))

    def magnitude_of(self, key: int) -> float:
        """The magnitude that a key of these values stands for."""
        return float(magnitude_of(key, self.dtype))

    def count_around_key(self, key: int, factor: float) -> tuple[int, int, int]:
        """How many entries have a key above `key`, equal to it, and a magnitude of at least `factor` times its own."""
        kernels = kernels_of(self.values)
        above = kernels.count_at_least(self.values, key + 1)
        probe = key_of(self.magnitude_of(key) * factor, self.dtype)
        equal = kernels.count_at_least(self.values, key) - above
        return above, equal, kernels.count_at_least(self.values, probe)

    def intersect(self, other: SparseVector) -> SparseVector:
        """The own entries whose index `other` holds too."""
        return self.take(kernels_of(self.values).intersect(self.indices, other.indices))

    def hash_slots(self, slots: int) -> NDArray[np.int64]:
        """A pseudo-random slot in [0, slots) for each index; the same index has the same one everywhere."""
        return kernels_of(self.values).hash_slots(self.indices, slots, MULTIPLIERS)  # type: ignore[no-any-return]

    def mask_of(self, other: SparseVector) -> NDArray[np.uint8]:
        """One bit for each own entry: whether `other` holds its index too. See `select_mask`."""
        held = empty(self.nnz, np.uint8, self.indices)
        held[:] = 0
        held[kernels_of(self.values).intersect(self.indices, other.indices)] = 1
        return np.packbits(held)

    def select_mask(self, bits: NDArray[np.uint8]) -> SparseVector:
        """The entries whose bit is set."""
        return self.take(np.flatnonzero(np.unpackbits(bits)[: self.nnz]))

    def difference(self, other: SparseVector) -> SparseVector:
        """The own entries whose index `other` does not hold."""
        return self.take(kernels_of(self.values).difference(self.indices, other.indices))

    def union_disjoint(self, other: SparseVector) -> SparseVector:
        """The entries of both, which share no index and have one dtype."""
        return SparseVector.sum([self, other], accumulator_dtype(self.dtype)).astype(self.dtype) if other.nnz else self

    def with_values(self, values: NDArray[Any]) -> Self:
        """Other values at the same indices."""
        return self.from_sorted_unchecked(self.indices, values, self.length)

    def rounding_error(self, rounded: SparseVector) -> SparseVector:
        """self - rounded where they differ; `rounded` holds the same indices. Infinities and NaN have no error."""
        if rounded.values is self.values:
            return self.slice_entries(0, 0)
        error = DenseVector(self.values).subtract(DenseVector(rounded.values)).values
        places = np.flatnonzero(error)
        return SparseVector.from_sorted_unchecked(self.indices[places], error[places], self.length)

    def multiply(self, factor: float) -> SparseVector:
        """factor * self, in its own dtype."""
        return self.with_values(np.multiply(self.values, factor).astype(self.dtype, copy=False))

    def divide(self, divisor: int) -> SparseVector:
        """self / divisor, in its own dtype, rounded once."""
        return self.with_values(np.divide(self.values, divisor).astype(self.dtype, copy=False))

    def copy_if_overlapping(self, other: SparseVector | DenseVector) -> SparseVector:
        """The same entries in arrays that share no memory with those of `other`."""
        theirs = [array for array in (getattr(other, "indices", None), other.values) if array is not None]
        own = [a.copy() if any(may_share_memory(a, b) for b in theirs) else a for a in (self.indices, self.values)]
        return SparseVector.from_sorted_unchecked(own[0], own[1], self.length)

    def shifted(self, offset: int, length: int) -> SparseVector:
        """The same entries, `offset` further on, in a vector of `length` coordinates."""
        dtype = index_dtype(length)
        return SparseVector.from_sorted_unchecked(self.indices.astype(dtype) + dtype.type(offset), self.values, length)

    def astype(self, dtype: Any) -> SparseVector:
        """The same entries with values of `dtype` (finite overflow is cut to the largest finite value)."""
        return self.with_values(saturating_cast(self.values, np.dtype(dtype)))

    __array_ufunc__ = None

    def __array_function__(self, function: Any, *_: Any) -> Any:
        raise TypeError(f"SparseVector: expected an array for {function.__name__}: use .to_dense() or .values")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        raise TypeError("SparseVector: expected .to_dense() where NumPy is to take it as an array, or .values")

    def __repr__(self) -> str:
        return f"SparseVector(length={self.length}, nnz={self.nnz}, density={self.density:.3g}, dtype={self.dtype})"


class DenseVector:
    """All `length` values of a vector, with the methods that SparseVector has. `values` is not copied.

    >>> DenseVector(np.array([0.5, -2.0, 1.0])).topk(2).indices
    array([1, 2], dtype=uint32)
    """

    __slots__ = ("values",)

    values: NDArray[Any]

    def __init__(self, values: Any) -> None:
        array = _array(values)
        self.values = contiguous(array) if array.ndim == 1 else array
        if self.values.ndim != 1:
            raise ValueError(f"dense vector: expected a 1-D array, got shape {self.values.shape}")
        check_value_dtype(self.values.dtype)

    @property
    def length(self) -> int:
        """Number of coordinates."""
        return int(self.values.size)

    nnz = length

    @property
    def dtype(self) -> np.dtype[Any]:
        """dtype of the values."""
        return self.values.dtype

    @property
    def on_gpu(self) -> bool:
        """Whether the values are CuPy's."""
        return on_gpu(self.values)

    @classmethod
    def zeros(cls, length: int, dtype: Any, like: SparseVector | DenseVector) -> DenseVector:
        """`length` zeros, where `like` is."""
        zeros = cls.empty(length, dtype, like)
        zeros.values[:] = 0
        return zeros

    @classmethod
    def empty(cls, length: int, dtype: Any, like: SparseVector | DenseVector) -> DenseVector:
        """`length` values that are whatever was there, where `like` is."""
        return cls(empty(length, dtype, like.values))

    def slice(self, start: int, stop: int) -> DenseVector:
        """Values start..stop-1 as a vector of their own, a view."""
        return DenseVector(self.values[start:stop])

    def with_values(self, values: NDArray[Any]) -> Self:
        """A vector of other values."""
        return type(self)(values)

    def add(self, other: DenseVector, dtype: Any, in_place: bool) -> DenseVector:
        """self + other in `dtype`: in place if `in_place`, else as a new vector."""
        out = self.values if in_place else empty(self.length, dtype, self.values)
        with span("dense", self.length), np.errstate(over="ignore", invalid="ignore"):
            return DenseVector(np.add(self.values, other.values, out=out, dtype=dtype))

    def copy_from(self, other: DenseVector) -> None:
        """Copy the values of `other`, unless they are these."""
        if data_ptr(other.values) != data_ptr(self.values):
            with span("dense", self.length):
                self.values[:] = other.values

    def subtract(self, other: DenseVector) -> DenseVector:
        """self - other in self's dtype; zero where both are the same infinity or either is NaN."""
        with np.errstate(over="ignore", invalid="ignore"):
            difference = self.values - other.values.astype(self.dtype)
        if self.dtype.kind == "f":
            difference[np.isnan(difference)] = 0
        return DenseVector(difference)

    def astype(self, dtype: Any) -> DenseVector:
        """The same values as `dtype` (finite overflow is cut to the largest finite value)."""
        return DenseVector(saturating_cast(self.values, np.dtype(dtype)))

    def _of(self, entries: tuple[NDArray[Any], NDArray[Any]]) -> SparseVector:
        return SparseVector.from_sorted_unchecked(*entries, self.length)

    def topk(self, k: int) -> SparseVector:
        """The k largest magnitudes, ties by lower index."""
        return self._of(kernels_of(self.values).topk(self.values, min(k, self.length)))

    def threshold(self, threshold: float, expected: int = 0) -> SparseVector:
        """Entries with a magnitude >= threshold (NaN counts as above all)."""
        kernels = kernels_of(self.values)
        return self._of(kernels.select_at_least(self.values, key_of(threshold, self.dtype), expected))

    def count_at_least(self, threshold: float) -> int:
        """How many values have a magnitude >= threshold."""
        kernels = kernels_of(self.values)
        return int(kernels.count_at_least(self.values, key_of(threshold, self.dtype)))

    def sample(self, stride: int, offset: int) -> SparseVector:
        """Every stride-th value, from index `offset` on, copied (numbered, not at its index)."""
        return DenseVector(self.values[offset::stride].copy()).to_sparse(keep_zeros=True)

    def magnitude_stats(self, expected_nnz: int) -> tuple[NDArray[np.float64], SparseVector, float]:
        """(sums of x, x^2, |x| and the largest |x|; entries above a bound; the bound).

        At least `expected_nnz` entries are likely to be above the bound, and not many more.
        """
        kernels = kernels_of(self.values)
        key, moments = kernels.lower_bound_key(self.values, expected_nnz), np.empty(4)
        entries = kernels.select_at_least(self.values, key, expected_nnz + (expected_nnz >> 2), moments=moments)
        return moments, self._of(entries), float(magnitude_of(key, self.dtype))

    def random_entries(self, k: int, key: int) -> SparseVector:
        """The values at k random coordinates that depend on `key` and the length alone."""
        return self.take(kernels_of(self.values).random_indices(self.length, k, key))

    def to_sparse(self, keep_zeros: bool = False) -> SparseVector:
        """The nonzero entries (NaN among them), or all values, zeros among them."""
        if keep_zeros:
            return self.take(asarray_like(np.arange(self.length, dtype=index_dtype(self.length)), self.values))
        with span("dense", self.length):
            return self._of(kernels_of(self.values).select_at_least(self.values, 1))

    def take(self, indices: NDArray[Any]) -> SparseVector:
        """The values at ascending unique indices (of `index_dtype(length)`), as a sparse vector."""
        return SparseVector.from_sorted_unchecked(indices, self.values[indices], self.length)

    def select_mask(self, bits: NDArray[np.uint8]) -> SparseVector:
        """The values whose bit is set, zeros among them."""
        set_bytes = np.flatnonzero(bits)  # few: unpack these alone
        inside = np.flatnonzero(np.unpackbits(bits[set_bytes]))
        held = set_bytes[inside >> 3]
        held *= 8
        inside &= 7
        held += inside
        del set_bytes, inside
        return self.take(asarray_like(held.astype(index_dtype(self.length)), self.values))

    def select_union(self, parts: Sequence[SparseVector]) -> SparseVector:
        """The values at the indices that some part holds, zeros among them."""
        return self.select_mask(_bits(parts))

    def to_dense(self) -> NDArray[Any]:
        """The values themselves."""
        return self.values

    def first_not_finite(self) -> int | None:
        """The index of the first NaN or infinity."""
        with np.errstate(over="ignore", invalid="ignore"):
            if self.dtype.kind != "f" or np.isfinite(self.values.sum()):  # one pass, no array
                return None
        wrong = np.flatnonzero(~np.isfinite(self.values))
        return int(wrong[0]) if wrong.size else None

    def add_at(self, entries: SparseVector) -> None:
        """self += entries, in place."""
        kernels_of(self.values).scatter_add(self.values, entries.indices, entries.values)

    def scatter_add(self, indices: NDArray[Any], values: NDArray[Any]) -> None:
        """self[index] += value in the order given, in place; indices of `length` and more are passed over."""
        kernels_of(self.values).scatter_add_marked(self.values, indices, values)

    def subtract_at(self, entries: SparseVector) -> None:
        """self -= entries, in place."""
        kernels_of(self.values).scatter_subtract(self.values, entries.indices, entries.values)

    def __repr__(self) -> str:
        return f"DenseVector(length={self.length}, dtype={self.dtype})"


def _array(given: Any) -> Any:
    """A NumPy array of what was given, or CuPy's as it is."""
    if isinstance(given, np.ma.MaskedArray):
        raise TypeError("array: expected one without a mask, got a masked one: use .filled(0) or .compressed()")
    return given if on_gpu(given) else np.asarray(given)


def _bits(parts: Sequence[SparseVector]) -> NDArray[np.uint8]:
    """One bit for each coordinate, in host memory: whether some part holds it."""
    if parts[0].on_gpu:
        marks = empty(parts[0].length, np.uint8, parts[0].values)
        marks[:] = 0
        for part in parts:
            marks[part.indices] = 1
        return to_host(np.packbits(marks))
    bits = np.zeros(-(-parts[0].length // 8), np.uint8)  # without a byte for each coordinate
    for part in parts:
        np.bitwise_or.at(bits, part.indices >> 3, np.uint8(128) >> (part.indices & 7).astype(np.uint8))
    return bits


def _checked_length(length: Any) -> int:
    if isinstance(length, bool) or not isinstance(length, (int, np.integer)):
        raise TypeError(f"length: expected an integer, got {type(length).__name__}")
    if not 0 <= length < 2**63:
        raise ValueError(f"length: expected 0 <= length < 2^63, got {length}")
    return int(length)
