"""RowSparse: some rows of a long table, as the gradient of an embedding has them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sparsecoll.kernels import kernels_of, kernels_of_values
from sparsecoll.kernels.keys import index_dtype, is_float
from sparsecoll.kernels.memory import asarray_like, empty, to_host
from sparsecoll.telemetry.trace import span
from sparsecoll.vector.arithmetic import Arithmetic
from sparsecoll.vector.dense import DenseVector
from sparsecoll.vector.operation import SUM, Operation
from sparsecoll.vector.pairs import run_starts, sorted_order
from sparsecoll.vector.row_arrays import blocks_of, cast, checked, combined, folded, stacked, sums, taken
from sparsecoll.vector.sparse import MULTIPLIERS, SparseVector
from sparsecoll.vector.values import accumulator_dtype, finite_difference, native_values

if TYPE_CHECKING:
    from typing_extensions import Self

SHOWN = 4  # rows in a repr


class RowSparse(Arithmetic):
    """Some rows of a table of shape (n, d): their ascending, unique numbers `rows` and their `values`.

    Rows that are not stored are zero. Stored rows may consist of zeros, and sums that cancel stay stored. A message has
    one coded index for each row, where a SparseVector of the same values has one for each value.

    Args:
        rows: 1-D integer array, strictly ascending, in [0, n). It is converted to int64, and not copied if it has that
            dtype.
        values: 2-D array of shape (len(rows), d), d at least 1, of any dtype that SparseVector supports. It is not
            copied if it is contiguous. Both arrays are NumPy's or both CuPy's.
        n: number of rows of the table, at most 2^63 - 1.

    Raises:
        ValueError: Rows are unsorted, repeated or out of range, or the shapes do not fit.
        TypeError: A dtype is not supported, or only one of the arrays is on the GPU.

    >>> x = sparsecoll.RowSparse([1, 4], np.array([[2.0, 1.0], [0.0, -3.0]], np.float32), 6)
    >>> x
    RowSparse(shape=(6, 2), nnz=2, density=0.333, dtype=float32, rows=[1, 4])
    >>> (x + x).values
    array([[ 4.,  2.],
           [ 0., -6.]], dtype=float32)

    The pairs of ids and gradients of a batch, in which ids may be repeated (TensorFlow's IndexedSlices):

    >>> sparsecoll.RowSparse.from_pairs([4, 1, 4], np.array([[1.0], [2.0], [5.0]]), 6).values
    array([[2.],
           [6.]])
    """

    __slots__ = ("n", "rows")

    rows: NDArray[np.int64]
    n: int

    def __init__(self, rows: Any, values: Any, n: int) -> None:
        self.rows, self._array, self.n = checked(rows, values, n)
        position = kernels_of(self.rows).first_unsorted(self.rows.view(np.uint64), self.n)
        if position >= 0:
            before, row = int(self.rows[position - 1]), int(self.rows[position])
            what = "repeated" if before == row else "unsorted"
            raise ValueError(
                f"rows: expected strictly ascending, got {what}: {before} at position {position - 1}, then {row};"
                " RowSparse.from_pairs takes them in any order"
            )

    @classmethod
    def from_sorted_unchecked(cls, rows: NDArray[np.int64], values: NDArray[Any], n: int) -> Self:
        """Return the rows of arrays that are valid: int64, ascending, unique, in range; values 2-D and contiguous."""
        made = object.__new__(cls)
        made.rows, made._array, made.n = rows, values, n
        return made

    @classmethod
    def empty(cls, n: int, d: int, dtype: Any) -> Self:
        """Return a table of shape (n, d) without stored rows, in host memory."""
        return cls.from_sorted_unchecked(np.empty(0, np.int64), np.empty((0, d), dtype), n)

    @classmethod
    def from_pairs(cls, rows: Any, values: Any, n: int, op: str | None = "sum") -> Self:
        """Return the rows of (row, values) pairs in any order, in which rows may be repeated.

        Args:
            rows: 1-D integer array, each in [0, n). It is sorted only if it is not ascending.
            values: array of shape (len(rows), d).
            n: number of rows of the table.
            op: how the values of a repeated row are combined: "sum" (the default; in the order given, float16 and
                bfloat16 in float32), "min", "max", or "replace" (the last ones are kept). None raises ValueError for a
                repeated row.

        Raises:
            ValueError: A row is out of range, the shapes do not fit, or `op` is not one of these.
            TypeError: A dtype is not supported.
        """
        numbers, values, n = checked(rows, values, n)
        return cls.from_sorted_unchecked(*combined(numbers, values, op), n)

    @classmethod
    def from_dense(cls, table: Any) -> Self:
        """Return the rows of a table that have a nonzero value (NaN among them).

        Args:
            table: 2-D array of shape (n, d), of NumPy or CuPy, with d of at least 1.

        Raises:
            ValueError: The table has another shape.
        """
        table = native_values(table)
        if table.ndim != 2 or table.shape[1] < 1:
            raise ValueError(f"table: expected shape (n, d) with d of at least 1, got {table.shape}")
        rows = np.flatnonzero((table != 0).any(axis=1)).astype(np.int64, copy=False)
        return cls.from_sorted_unchecked(rows, table[rows], int(table.shape[0]))

    @classmethod
    def from_scipy(cls, x: Any) -> Self:
        """Return the rows of a SciPy BSR array or matrix whose blocks are as wide as it is.

        A block of several rows counts as one row of as many values. Blocks of zeros stay, duplicates are summed.

        Raises:
            ValueError: The blocks are narrower than the matrix.
            TypeError: x is of another format.

        >>> import scipy.sparse
        >>> x = scipy.sparse.bsr_array(np.diag([0.0, 2.0, 3.0]), blocksize=(1, 3))
        >>> sparsecoll.RowSparse.from_scipy(x).rows
        array([1, 2])
        """
        if getattr(x, "format", None) != "bsr":
            raise TypeError(f"x: expected a BSR array or matrix of SciPy, got {type(x).__name__}: use x.tobsr()")
        if x.blocksize[1] != x.shape[1]:
            raise ValueError(
                f"x: expected blocks as wide as the matrix, got {x.blocksize} of shape {x.shape}:"
                f" use x.tobsr((1, {x.shape[1]}))"
            )
        numbers, values = blocks_of(x)
        return cls.from_pairs(numbers, values, x.shape[0] // x.blocksize[0])

    @classmethod
    def merge(cls, parts: Sequence[Self], dtype: np.dtype[Any], op: Operation = SUM) -> Self:
        """Return the rows of one or more parts; values of the same row are combined in the order of `parts`.

        Args:
            parts: rows of tables of one shape.
            dtype: in which values are combined and returned.
            op: the Operation (default: the sum, which starts at +0).
        """
        n, d = parts[0].shape
        with span("merge", sum(part.nnz for part in parts) * d):
            numbers = np.concatenate([part.rows for part in parts])
            ascending, order = sorted_order(numbers)
            starts = np.flatnonzero(run_starts(ascending))
            if op.fold(dtype) is None:
                values = sums([part.values for part in parts], order, starts, dtype)
            else:
                values = folded([part.values for part in parts], order, starts, dtype, op)
        return cls.from_sorted_unchecked(ascending[starts], values, n)

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Return the rows of parts that share none, in the dtype of the first."""
        filled = [part for part in parts if part.nnz] or list(parts[:1])
        if len(filled) == 1:
            return filled[0]
        numbers = np.concatenate([part.rows for part in filled])
        values = stacked([part.values for part in filled])
        if bool((numbers[1:] > numbers[:-1]).all()):
            return cls.from_sorted_unchecked(numbers, values, filled[0].n)
        ascending, order = sorted_order(numbers)
        return cls.from_sorted_unchecked(ascending, taken(values, order), filled[0].n)

    # What it holds

    @property
    def d(self) -> int:
        """Number of values in a row."""
        return int(self._array.shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        """(n, d)."""
        return (self.n, self.d)

    ndim = 2

    @property
    def nnz(self) -> int:
        """Number of stored rows, those of zeros among them."""
        return int(self.rows.size)

    @property
    def density(self) -> float:
        """nnz / n; 0.0 for n = 0."""
        return self.nnz / self.n if self.n else 0.0

    def __len__(self) -> int:
        return self.n

    __iter__ = None  # a loop over n rows is never meant

    def __bool__(self) -> bool:
        raise ValueError("RowSparse: expected .nnz or .n where a truth value is asked for")

    @property
    def _stored_at(self) -> NDArray[np.int64]:
        return self.rows

    @property
    def _indices(self) -> Any:
        """The rows as a SparseVector of length n stores them."""
        return self.rows.astype(index_dtype(self.n))

    def owners(self, ranks: int) -> NDArray[np.int64]:
        """Return the rank that owns each stored row with owner="hash" of `sparsecoll.reduce_scatter`.

        It depends on the row's number and on the number of ranks alone.

        Args:
            ranks: number of ranks of the communicator.
        """
        return hash_owners(self.rows, self.n, ranks)

    # Conversions

    def to_dense(self) -> NDArray[Any]:
        """Return a new array of shape (n, d)."""
        with span("dense", self.n * self.d):
            dense = empty(self.n * self.d, self.dtype, self.values).reshape(self.n, self.d)
            dense[:] = 0
            dense[self.rows] = self.values
        return dense

    toarray = to_dense

    def add_to(self, table: NDArray[Any]) -> None:
        """Add the rows to a contiguous array of shape (n, d), in place: table[rows] += values.

        Raises:
            ValueError: The table has another shape, is not contiguous, or cannot be written to.
            TypeError: The table is of a dtype that would lose more than digits, as integers of floats.
        """
        if table.shape != self.shape or not table.flags.c_contiguous:
            raise ValueError(f"table: expected a contiguous array of shape {self.shape}, got shape {table.shape}")
        if not getattr(table.flags, "writeable", True):  # CuPy's arrays have no such flag
            raise ValueError("table: expected an array that can be written to, got a read-only one")
        if not np.can_cast(self.dtype, table.dtype, "same_kind"):
            raise TypeError(f"table: expected a dtype to which {self.dtype} can be added, got {table.dtype}")
        kernels_of_values(table).scatter_add_rows(table, self.rows, cast(self.values, table.dtype))

    def to_scipy(self) -> Any:
        """Return a SciPy BSR array of shape (n, d) with blocks of one row, which shares the memory of the values."""
        sparse = importlib.import_module("scipy.sparse")
        starts = np.searchsorted(to_host(self.rows), np.arange(self.n + 1))
        columns = np.zeros(self.nnz, np.int64)
        values = to_host(self.values).reshape(self.nnz, 1, self.d)
        return sparse.bsr_array((values, columns, starts), shape=self.shape, blocksize=(1, self.d))

    def astype(self, dtype: Any) -> Self:
        """Return the rows as `dtype`, as NumPy casts them; where real floats become narrower ones, finite values beyond
        their range become the largest finite one.
        """
        return self.with_values(cast(self.values, np.dtype(dtype)))

    def copy(self) -> Self:
        """Return rows whose arrays share no memory with these."""
        return self.from_sorted_unchecked(self.rows.copy(), self.values.copy(), self.n)

    def with_values(self, values: NDArray[Any]) -> Self:
        """Return other values of the same rows."""
        return self.from_sorted_unchecked(self.rows, values, self.n)

    # Parts

    def take(self, positions: NDArray[np.int64]) -> Self:
        """Return the stored rows at ascending positions, copied."""
        positions = asarray_like(positions, self.values)
        return self.from_sorted_unchecked(self.rows[positions], taken(self.values, positions), self.n)

    def slice_rows(self, start: int, stop: int) -> Self:
        """Return the stored rows at positions start..stop-1, as views."""
        return self.from_sorted_unchecked(self.rows[start:stop], self.values[start:stop], self.n)

    def topk(self, k: int) -> Self:
        """Return the k stored rows of largest Euclidean norm, ties by lower row; the rows themselves if nnz <= k."""
        if k >= self.nnz:
            return self
        squares = _squares(self.values)
        positions = asarray_like(np.arange(self.nnz, dtype=np.uint32), squares)
        ordered = SparseVector.from_sorted_unchecked(positions, squares, self.nnz)
        return self.take(ordered.topk(k).indices.astype(np.int64))

    def __getitem__(self, row: Any) -> NDArray[Any]:
        if isinstance(row, (bool, np.bool_)) or not isinstance(row, (int, np.integer)):
            raise TypeError(f"row: expected an integer, got {row!r}")
        number = int(row) + (self.n if row < 0 else 0)
        if not 0 <= number < self.n:
            raise IndexError(f"row: expected from {-self.n} to {self.n - 1}, got {row}")
        position = int(np.searchsorted(self.rows, number))
        if position < self.nnz and int(self.rows[position]) == number:
            return self.values[position]  # type: ignore[no-any-return]
        none = empty(self.d, self.dtype, self.values)
        none[:] = 0
        return none

    def _divide(self, divisor: int) -> Self:
        """Return self / divisor, in its own dtype, rounded once."""
        return self.with_values(np.divide(self.values, divisor).astype(self.dtype, copy=False))

    def __repr__(self) -> str:
        shown = [str(row) for row in to_host(self.rows[:SHOWN]).tolist()] + ["..."] * (self.nnz > SHOWN)
        return (
            f"RowSparse(shape={self.shape}, nnz={self.nnz}, density={self.density:.3g}, dtype={self.dtype},"
            f" rows=[{', '.join(shown)}])"
        )

    # What collectives ask for

    def _rounding_error(self, rounded: Self) -> Self:
        """Return self - rounded, which has the same rows, where they differ; infinities and NaN have no error."""
        error = finite_difference(self.values, cast(rounded.values, self.dtype))
        positions = np.flatnonzero((error != 0).any(axis=1))
        return self.from_sorted_unchecked(self.rows[positions], error[positions], self.n)

    def _first_not_finite(self) -> int | None:
        """Return the row of the first NaN or infinity."""
        position = DenseVector(self.values.reshape(-1))._first_not_finite()
        return None if position is None else int(self.rows[position // self.d])


def hash_owners(rows: NDArray[np.int64], n: int, ranks: int) -> NDArray[np.int64]:
    """Return the rank to which each of some rows of a table of n rows belongs by a hash of its number."""
    indices = rows.astype(index_dtype(n))
    return kernels_of(indices).hash_slots(indices, ranks, MULTIPLIERS)  # type: ignore[no-any-return]


def _squares(values: NDArray[Any]) -> NDArray[Any]:
    """Return the sum of the squares of each row, in float64 where float32 overflows; of NaN it is NaN."""
    if values.dtype.kind == "c":
        return _squares(values.real) + _squares(values.imag)  # type: ignore[no-any-return]
    floats = cast(values, accumulator_dtype(values.dtype)) if is_float(values.dtype) else values.astype(np.float64)
    with np.errstate(over="ignore"):
        on_host = isinstance(floats, np.ndarray)
        squares: NDArray[Any] = np.einsum("ij,ij->i", floats, floats) if on_host else (floats * floats).sum(axis=1)
    if squares.dtype == np.float32 and not bool(np.isfinite(squares).all()):
        return _squares(floats.astype(np.float64))
    return squares
