"""RowSparse: some rows of a long table, as the gradient of an embedding has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from sparsecoll.errors import check_integer
from sparsecoll.kernels import kernels_of, kernels_of_values
from sparsecoll.kernels.keys import index_dtype, is_float
from sparsecoll.kernels.memory import asarray_like, to_host
from sparsecoll.telemetry.trace import span
from sparsecoll.vector.arithmetic import Arithmetic
from sparsecoll.vector.dense import DenseVector
from sparsecoll.vector.entries import SHOWN
from sparsecoll.vector.operation import SUM, Operation
from sparsecoll.vector.pairs import run_starts, run_sums, sorted_order
from sparsecoll.vector.sparse import MULTIPLIERS, SparseVector
from sparsecoll.vector.values import ROWS, accumulator_dtype, checked_length, native_values, not_zero, saturating_cast

SMALL = 1e-30  # below this, a sum of squares in float32 may have lost digits


class RowSparse(Arithmetic):
    """Some rows of a table of shape (n, d): their ascending, unique numbers `rows` and their `values`.

    Rows that are not stored are zero. Stored rows may consist of zeros, and sums that cancel stay stored. A message has
    one coded index for each row, where a SparseVector of the same values has one for each value.

    Args:
        rows: 1-D integer array, strictly ascending, in [0, n). It is copied, as the indices of a SparseVector are.
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

    __slots__ = ()

    _kind = ROWS

    def __init__(self, rows: Any, values: Any, n: int) -> None:
        super().__init__(rows, values, n)

    @classmethod
    def empty(cls, n: int, d: int, dtype: Any) -> Self:  # type: ignore[override]
        """Return a table of shape (n, d) without stored rows, in host memory."""
        n, values = checked_length(n, "n"), np.empty((0, d), np.dtype(dtype).newbyteorder("="))
        return cls.from_sorted_unchecked(np.empty(0, index_dtype(n)), values, n)

    @classmethod
    def from_pairs(cls, rows: Any, values: Any, n: int, op: str | None = "sum") -> Self:
        """Return the rows of (row, values) pairs in any order, in which rows may be repeated.

        Args:
            rows: 1-D integer array, each in [0, n). It is sorted only if it is not ascending.
            values: array of shape (len(rows), d).
            n: number of rows of the table.
            op: how the values of a repeated row are combined: "sum" (the default; in the order given, float16 and
                bfloat16 in float32), "min", "max", or "replace" (the last ones are kept). None refuses a repeated row.

        Raises:
            ValueError: A row is out of range, the shapes do not fit, or `op` is not one of these.
            TypeError: A dtype is not supported.
        """
        return super().from_pairs(rows, values, n, op)

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
        rows, n = not_zero(table), int(table.shape[0])
        return cls.from_sorted_unchecked(rows.astype(index_dtype(n)), table[rows], n)

    @classmethod
    def merge(cls, parts: Sequence[Self], dtype: np.dtype[Any], op: Operation = SUM) -> Self:
        """Return the rows of one or more parts; values of the same row are combined in the order of `parts`.

        Args:
            parts: rows of tables of one shape.
            dtype: of the result, as of `SparseVector.merge`.
            op: the Operation (default: the sum, which starts at +0).
        """
        n, d = parts[0].shape
        with span("merge", sum(part.nnz for part in parts) * d):
            ascending, order = sorted_order(np.concatenate([part.indices for part in parts]))
            starts = np.flatnonzero(run_starts(ascending))
            values = run_sums([part.values for part in parts], order, starts, accumulator_dtype(dtype), op)
        return cls.from_sorted_unchecked(ascending[starts], saturating_cast(values, dtype), n)

    # What it holds

    @property
    def rows(self) -> NDArray[np.int64]:
        """The numbers of the stored rows, ascending: a new int64 array; `indices` has them as they are stored."""
        return self.indices.astype(np.int64)

    @property
    def n(self) -> int:
        """Number of rows of the table, the same as `length`."""
        return self.length

    @property
    def d(self) -> int:
        """Number of values in a row."""
        return int(self._array.shape[1])

    width = d

    @property
    def shape(self) -> tuple[int, int]:
        """(n, d)."""
        return (self.n, self.d)

    ndim = 2

    def owners(self, ranks: int) -> NDArray[np.int64]:
        """Return the rank that owns each stored row with owner="hash" of `sparsecoll.reduce_scatter`.

        It depends on the row's number and on the number of ranks alone.

        Args:
            ranks: number of ranks of the communicator.
        """
        return hash_owners(self.indices, ranks)

    # Conversions

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
        kernels_of_values(table).scatter_add_rows(table, self.rows, saturating_cast(self.values, table.dtype))

    # Parts

    def take(self, positions: NDArray[np.int64]) -> Self:
        """Return the stored rows at ascending positions, copied."""
        return super().take(asarray_like(positions, self.values))

    def topk(self, k: int) -> Self:
        """Return the k stored rows of largest Euclidean norm, ties by lower row; the rows themselves if nnz <= k."""
        k = check_integer("k", k, 0)
        if k >= self.nnz:
            return self
        squares = _squares(self.values)
        positions = asarray_like(np.arange(self.nnz, dtype=np.uint32), squares)
        ordered = SparseVector.from_sorted_unchecked(positions, squares, self.nnz)
        return self.take(ordered.topk(k).indices.astype(np.int64))

    def __repr__(self) -> str:
        shown = [str(row) for row in to_host(self.rows[:SHOWN]).tolist()] + ["..."] * (self.nnz > SHOWN)
        size = f"shape={self.shape}, nnz={self.nnz}, density={self.density:.3g}, dtype={self.dtype}"
        return f"RowSparse({size}, rows=[{', '.join(shown)}])"

    def drop_zeros(self) -> Self:
        """Return the rows that have a value other than zero."""
        return self.take(not_zero(self.values))

    def first_not_finite(self) -> int | None:
        """Return the row of the first NaN or infinity."""
        position = DenseVector(self.values.reshape(-1)).first_not_finite()
        return None if position is None else int(self.indices[position // self.d])


def hash_owners(indices: NDArray[Any], ranks: int) -> NDArray[np.int64]:
    """Return the rank to which each row belongs by a hash of its number, uint32 or uint64."""
    return kernels_of(indices).hash_slots(indices, ranks, MULTIPLIERS)  # type: ignore[no-any-return]


def _squares(values: NDArray[Any]) -> NDArray[Any]:
    """Return the sum of the squares of each row, NaN if it has one; in float64 where float32 over- or underflows."""
    if values.dtype.kind == "c":
        return _squares(values.real) + _squares(values.imag)  # type: ignore[no-any-return]
    wide = accumulator_dtype(values.dtype) if is_float(values.dtype) else np.dtype(np.float64)
    floats = saturating_cast(values, wide)
    with np.errstate(over="ignore"):
        on_host = isinstance(floats, np.ndarray)
        squares: NDArray[Any] = np.einsum("ij,ij->i", floats, floats) if on_host else (floats * floats).sum(axis=1)
    if squares.dtype == np.float32:
        odd = ~((squares > SMALL) & (squares < np.inf))
        if bool(odd.any()):
            squares = squares.astype(np.float64)
            squares[odd] = _squares(floats[odd].astype(np.float64))
    return squares
