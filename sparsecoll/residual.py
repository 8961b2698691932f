"""Error feedback: entries that were not sent stay in a residual, which is added to the next gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from sparsecoll.errors import check_integer
from sparsecoll.kernels.keys import COMPILED_DTYPES, PLAIN, Momentum, Pass
from sparsecoll.kernels.memory import empty, may_share_memory
from sparsecoll.kernels.sampling import sample_of
from sparsecoll.select import Selector
from sparsecoll.select.base import check_selector
from sparsecoll.vector import DenseVector, RowSparse, SparseVector
from sparsecoll.vector.values import can_add


class Residual:
    """Error feedback: acc = residual + gradient, residual = acc - contributed (Ok-Topk, Algorithm 2, lines 4 and 6).

    Both use one array. Nothing is lost: what entered the result and what stays in the array add up to acc. There are
    two ways to use it:

    - `compensate`, then any selection, then `update` with what contributed;
    - `take`, which compensates, selects and clears the selected entries in one pass over memory; then `restore`, if
      less contributed than was taken.

    Args:
        length: number of coordinates.
        dtype: dtype of the array (default: float32, also for float16 gradients).
        like: an array; the residual is on the GPU if this array is.

    >>> residual = Residual(4)
    >>> sent = residual.take(np.array([1, -4, 2, 3], dtype=np.float32), TopK(), 2)
    >>> sent.indices, residual.array
    (array([1, 3], dtype=uint32), array([1., 0., 2., 0.], dtype=float32))
    """

    def __init__(self, length: int, dtype: Any = np.float32, like: Any = None) -> None:
        check_integer("length", length, 0)
        self._acc = LazyAccumulator(empty(length, dtype, like))
        self._acc.values[:] = 0

    def __repr__(self) -> str:
        return f"Residual(length={self._acc.length}, dtype={self._acc.dtype})"

    @property
    def vector(self) -> DenseVector:
        """The residual (or, between `compensate` and `update`, acc)."""
        return self._acc

    @property
    def array(self) -> NDArray[Any]:
        """The values of `vector`, writable."""
        return self._acc.values

    def compensate(self, gradient: NDArray[Any], scale: float = 1.0) -> DenseVector:
        """Form acc = residual + scale * gradient in place, in a pass over memory of its own, which `take` saves.

        Args:
            gradient: 1-D array of `length` values.
            scale: factor of the gradient (default: 1).

        Returns:
            DenseVector acc, a view.

        Raises:
            ValueError: The gradient has another length, or the scale of whole numbers is not one.
            TypeError: The gradient is not an array (a tensor is not), or its dtype would lose more than digits, as
                complex numbers in a real residual.
        """
        self._acc.add_later(gradient, scale)
        return self._acc.flush()

    def update(self, contributed: SparseVector | DenseVector) -> None:
        """Subtract this rank's entries that entered the result.

        Args:
            contributed: `Reduction.contributed` of the call.

        Raises:
            ValueError: It has another length; the residual is as before.
            TypeError: It is no vector, or of a dtype that would lose more than digits, as complex numbers in a real
                residual; the residual is as before.
        """
        check_part("contributed", contributed, self._acc)
        self._subtract(contributed)

    def _subtract(self, sent: SparseVector | DenseVector) -> None:
        """Subtract entries; of an infinity or a NaN that was sent, nothing is left."""
        self._acc.subtract_at(sent)
        if sent.first_not_finite() is not None:
            entries = sent.to_sparse()
            self._acc.values[entries.indices[~np.isfinite(entries.values)]] = 0

    def take(self, gradient: NDArray[Any], selector: Selector, k: int, scale: float = 1.0) -> SparseVector:
        """Add scale * gradient, select about k entries and clear them, in one pass if the selector allows it.

        Args:
            gradient: 1-D array of `length` values.
            selector: a Selector of `sparsecoll.select`.
            k: number of entries.
            scale: factor of the gradient (default: 1).

        Returns:
            SparseVector of the entries to send. If the selector raises, the gradient has been added and nothing taken.

        Raises:
            ValueError: The gradient, or what the selector returns, has another length, or the scale of whole numbers
                is not one.
            TypeError: The gradient is one that `compensate` refuses, or `selector` is none or returns no vector.
            NonFiniteError: There is a NaN among the selected values.
        """
        check_selector(selector)
        if selector is None:
            raise TypeError("selector: expected an object of sparsecoll.select, got None")
        self._acc.add_later(gradient, scale)
        self._acc.clear_selected = True
        chosen: SparseVector | None = None
        try:
            found = selector.select(self._acc, k)
            check_part("selector", found, self._acc)
            chosen = found if isinstance(found, SparseVector) else found.to_sparse()
            if may_share_memory(chosen.values, self._acc._array):  # which is cleared
                chosen = chosen.copy()
        finally:
            self._acc.clear_selected = False
            self._acc.commit(chosen)
        return chosen

    def restore(self, taken: SparseVector, contributed: SparseVector | None = None) -> None:
        """Put back the part of `taken` that did not contribute.

        Args:
            taken: what `take` returned.
            contributed: `Reduction.contributed` of the call; None, the default, if nothing contributed.

        Raises:
            ValueError: One of them has another length; the residual is as before.
            TypeError: One of them is no vector, or of a dtype as `update` refuses it; the residual is as before.
        """
        check_part("taken", taken, self._acc)
        if contributed is not None:
            check_part("contributed", contributed, self._acc)
        self._acc.add_at(taken.to_sparse())
        if contributed is not None:
            self._subtract(contributed)


def check_part(name: str, part: Any, acc: DenseVector | RowSparse) -> None:
    """Raise TypeError or ValueError, which begins with `name`, unless a vector, or rows, can be added to `acc`."""
    if not isinstance(part, RowSparse if acc.width else (SparseVector, DenseVector)):
        expected = "RowSparse" if acc.width else "SparseVector or DenseVector"
        raise TypeError(f"{name}: expected a {expected}, got {type(part).__name__}")
    if (part.length, part.width) != (acc.length, acc.width):
        sizes = [(x.length, x.width) if acc.width else x.length for x in (acc, part)]
        raise ValueError(f"{name}: expected {'shape' if acc.width else 'length'} {sizes[0]}, got {sizes[1]}")
    if not can_add(part.dtype, acc.dtype):
        raise TypeError(f"{name}: expected a dtype that can be added to {acc.dtype}, got {part.dtype}")


def check_scale(scale: float, dtype: np.dtype[Any]) -> None:
    """Raise ValueError if values of this dtype cannot be multiplied by `scale`, which is a fraction."""
    if dtype.kind in "biu" and not float(scale).is_integer():
        raise ValueError(f"scale: expected a whole number for a residual of {dtype}, got {scale}")


class RowResidual:
    """Error feedback for rows: rows that were not sent stay, and are added to the next gradient. Memory: these rows.

    Args:
        n: number of rows of the table.
        d: number of values in a row.
        dtype: dtype of the residual (default: float32, also for float16 gradients).

    Attributes:
        rows: the residual (or, between `compensate` and `update`, acc), a RowSparse.

    >>> residual = sparsecoll.RowResidual(9, 1)
    >>> acc = residual.compensate(sparsecoll.RowSparse([2, 7], np.array([[1.0], [-4.0]], np.float32), 9))
    >>> residual.update(acc.topk(1))
    >>> residual.rows
    RowSparse(shape=(9, 1), nnz=1, density=0.111, dtype=float32, rows=[2])
    """

    def __init__(self, n: int, d: int, dtype: Any = np.float32) -> None:
        self.rows = RowSparse.empty(n, d, dtype)

    @classmethod
    def of(cls, rows: RowSparse) -> RowResidual:
        """Return the residual that holds these rows, whose arrays are shared and do not change."""
        made = cls(rows.n, rows.d, rows.dtype)
        made.rows = rows
        return made

    def __repr__(self) -> str:
        return f"RowResidual({self.rows!r})"

    def compensate(self, gradient: RowSparse, scale: float = 1.0) -> RowSparse:
        """Return acc = residual + scale * gradient, and keep it until `update`; it may share the gradient's arrays.

        Args:
            gradient: rows of a table of the same shape.
            scale: factor of the gradient (default: 1).

        Raises:
            ValueError: The gradient is of a table of another shape, or the scale of whole numbers is not one.
            TypeError: The gradient is no RowSparse, or of a dtype that would lose more than digits, as complex numbers
                in a real residual.
        """
        check_part("gradient", gradient, self.rows)
        check_scale(scale, self.rows.dtype)
        dtype = self.rows.dtype
        own = gradient.astype(dtype)
        scaled = own if scale == 1 else own.with_values(own.values * dtype.type(scale))
        self.rows = RowSparse.merge([self.rows, scaled], dtype) if self.rows.nnz else scaled
        return self.rows

    def update(self, contributed: RowSparse) -> None:
        """Subtract this rank's rows that entered the result; rows that become zero are dropped.

        Args:
            contributed: `Reduction.contributed` of the call.

        Raises:
            ValueError: It is of a table of another shape.
            TypeError: It is no RowSparse, or of a dtype that would lose more than digits.
        """
        check_part("contributed", contributed, self.rows)
        acc, dtype = self.rows, self.rows.dtype
        rest = RowSparse.merge([acc.intersect(contributed), -contributed.astype(dtype)], dtype)
        if contributed.first_not_finite() is not None:  # of an infinity or a NaN that was sent, nothing is left
            rest = rest.with_values(np.where(np.isfinite(rest.values), rest.values, dtype.type(0)))
        self.rows = RowSparse.join([acc.difference(contributed), rest.drop_zeros()])


class LazyAccumulator(DenseVector):
    """A DenseVector with deferred work: the next pass over it does the work, and may also clear the entries it selects.

    `topk`, `threshold` and `magnitude_stats` do the work in the pass that they make anyway, and `sample` does it to the
    sample. Whatever else needs the values does it first.

    Args:
        values: as of DenseVector.
        source: array of the same length and dtype, of which `values` becomes a copy in that pass, before the addend is
            added; None, the default, if `values` are there already.

    Attributes:
        clear_selected: whether the entries that a pass selects are removed from the vector, until `commit`.
    """

    __slots__ = ("_removed", "_work", "clear_selected")

    def __init__(self, values: Any, source: Any = None) -> None:
        self._work = PLAIN if source is None else Pass(source)
        self._removed: SparseVector | None = None
        self.clear_selected = False
        super().__init__(values)

    @property
    def values(self) -> NDArray[Any]:
        """The values, after the deferred work, with removed entries put back."""
        return self.flush()._array

    def flush(self) -> LazyAccumulator:
        """Do the deferred work and put removed entries back; returns the vector itself."""
        self.form()
        self._put_back()
        return self

    def form(self) -> None:
        """Do the deferred work; removed entries stay removed."""
        if self._work is not PLAIN:
            self._kernels.form(self._array, self._taken())

    def _taken(self, clear: bool = False) -> Pass:
        """Return the deferred work and forget it, so that it is not done twice if a pass fails."""
        work, self._work = self._work._replace(clear=clear), PLAIN
        return work

    def momentum_later(self, momentum: Momentum) -> None:
        """Replace the values, a gradient, by those with momentum in the next pass over memory, before the addition."""
        self._work = self._work._replace(momentum=momentum)

    def add_later(self, gradient: NDArray[Any], scale: float) -> None:
        """Add scale * gradient in the next pass over memory."""
        array, given = type(self._array), type(gradient)
        if not issubclass(given, array) or issubclass(given, np.ma.MaskedArray):
            raise TypeError(f"gradient: expected a {array.__module__}.ndarray, got {given.__module__}.{given.__name__}")
        if gradient.shape != self._array.shape:
            raise ValueError(f"gradient: expected shape {self._array.shape}, got {gradient.shape}")
        if gradient.dtype != self.dtype:
            if not can_add(gradient.dtype, self.dtype):
                raise TypeError(f"gradient: expected a dtype that can be added to {self.dtype}, got {gradient.dtype}")
            if gradient.dtype not in COMPILED_DTYPES:  # bfloat16 and other byte orders among them
                gradient = gradient.astype(self.dtype)
        check_scale(scale, self.dtype)
        if self._work.add is not None:
            self.flush()
        self._work = self._work._replace(add=(gradient, scale))

    def commit(self, selected: SparseVector | None) -> None:
        """Make the removal of `selected` final, and put back the other entries that were removed.

        Args:
            selected: entries of this vector, usually those that the last pass selected; None puts those back.
        """
        if selected is None:
            self.flush()
        elif self._removed is None:  # the selector read values without removing them
            self.values[selected.indices] = 0
        elif (own := selected.indices) is not (gone := self._removed.indices) and (  # most often they are one array
            own.size != gone.size or bool((own != gone).any())
        ):
            self._put_back()
            self._array[own] = 0
        self._removed = None

    def has_removed(self, entries: SparseVector | DenseVector) -> TypeGuard[SparseVector]:
        """Return whether `entries` are those that the last pass removed, by identity of the arrays."""
        gone = self._removed
        if gone is None or not isinstance(entries, SparseVector) or entries.length != gone.length:
            return False
        return entries.indices is gone.indices and entries.values is gone.values

    def _put_back(self) -> None:
        if self._removed is not None:
            self._array[self._removed.indices] = self._removed.values
            self._removed = None

    def _select(self, kernel: Callable[..., Any], *arguments: Any, **options: Any) -> SparseVector:
        self._put_back()
        selected = self._of(kernel(self._array, *arguments, work=self._taken(self.clear_selected), **options))
        self._removed = selected if self.clear_selected else None
        return selected

    def _lower_bound_key(self, expected_nnz: int) -> int:
        self._put_back()
        return int(self._kernels.lower_bound_key(self._array, expected_nnz, self._work))

    def sample(self, stride: int, offset: int) -> SparseVector:
        """Return every stride-th value from index `offset` on, as after the deferred work, which remains deferred."""
        self._put_back()
        part = sample_of(self._array, self._work, slice(offset, None, stride), self._kernels.form)
        return DenseVector(part).to_sparse(keep_zeros=True)
