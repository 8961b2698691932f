"""Error feedback: what was not sent is kept in a residual and added to the next gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsecoll.kernels import kernels_of
from sparsecoll.kernels.keys import key_of, magnitude_of
from sparsecoll.kernels.memory import empty, on_gpu
from sparsecoll.select import Selector
from sparsecoll.vector import DenseVector, SparseVector


class Residual:
    """Error feedback: acc = residual + gradient, residual = acc - contributed (Ok-Topk, Algorithm 2, lines 4 and 6).

    Both are kept in one array. Nothing is lost: what entered the result plus what stays is what was there before. There
    are two ways to use it:

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
        self._acc = LazyAccumulator(np.zeros(length, dtype) if like is None else empty(length, dtype, like))
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
        """acc = residual + scale * gradient, in place; a pass over memory of its own, which `take` saves.

        Raises:
            ValueError: the gradient has another length.
        """
        self._acc.add_later(gradient, scale)
        return self._acc.flush()

    def update(self, contributed: SparseVector | DenseVector) -> None:
        """Subtract this rank's entries that entered the result.

        Args:
            contributed: `Reduction.contributed` of the call.
        """
        if isinstance(contributed, SparseVector):
            self._acc.subtract_at(contributed)
        else:
            self.array[:] -= contributed.values

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
            ValueError: The gradient has another length.
            NonFiniteError: There is a NaN among the selected values.
        """
        self._acc.add_later(gradient, scale)
        self._acc.clear_selected = True
        chosen: SparseVector | None = None
        try:
            chosen = selector.select(self._acc, k)
        finally:
            self._acc.clear_selected = False
            self._acc.commit(chosen)
        return chosen

    def restore(self, taken: SparseVector, contributed: SparseVector | None = None) -> None:
        """Put back the part of `taken` that did not contribute.

        Args:
            taken: what `take` returned.
            contributed: `Reduction.contributed` of the call; None, the default, if nothing contributed.
        """
        self._acc.add_at(taken)
        if contributed is not None:
            self._acc.subtract_at(contributed)


class LazyAccumulator(DenseVector):
    """A DenseVector to which an addend is added in the next pass over it, which may also clear what it selects.

    `topk`, `threshold`, `sample` and `magnitude_stats` do what is pending in their own pass; all other methods flush
    first. Whoever reads `values` itself has to call `flush` before.

    Attributes:
        clear_selected: whether what a pass selects is removed from the vector, until `commit`.
    """

    __slots__ = ("_array", "_pending", "_removed", "clear_selected")

    def __init__(self, values: Any) -> None:
        self._pending: tuple[NDArray[Any], float] | None = None
        self._removed: SparseVector | None = None
        self.clear_selected = False
        super().__init__(values)

    @property
    def values(self) -> NDArray[Any]:  # type: ignore[override]
        """The values.

        Raises:
            RuntimeError: something is pending.
        """
        if self._pending is not None or self._removed is not None:
            raise RuntimeError("values: expected flush() before they are read, got an addition that is pending")
        return self._array

    @values.setter
    def values(self, values: NDArray[Any]) -> None:
        self._array = values

    @property
    def length(self) -> int:
        """Number of coordinates."""
        return int(self._array.size)

    nnz = length

    @property
    def dtype(self) -> np.dtype[Any]:
        """dtype of the values."""
        return self._array.dtype

    @property
    def on_gpu(self) -> bool:
        """Whether the values are CuPy's."""
        return on_gpu(self._array)

    def flush(self) -> LazyAccumulator:
        """Add what is pending and put back what was removed; returns the vector itself."""
        if self._pending is not None:
            kernels_of(self._array).accumulate(self._array, self._pending)
            self._pending = None
        self._put_back()
        return self

    def add_later(self, gradient: NDArray[Any], scale: float) -> None:
        """Add scale * gradient in the next pass over memory."""
        if gradient.shape != self._array.shape:
            raise ValueError(f"gradient: expected shape {self._array.shape}, got {gradient.shape}")
        if self._pending is not None:
            self.flush()
        self._pending = (gradient, scale)

    def commit(self, selected: SparseVector | None) -> None:
        """Remove `selected`, a part of what was last removed, for good and put the rest back; None: put all back."""
        if selected is None:
            self.flush()
        elif self._removed is None:  # the selector read values without removing them
            self.flush().values[selected.indices] = 0
        elif self._removed.nnz != selected.nnz:
            self._put_back()
            self._array[selected.indices] = 0
        self._removed = None

    def _put_back(self) -> None:
        if self._removed is not None:
            self._array[self._removed.indices] = self._removed.values
            self._removed = None

    def _pass(self) -> dict[str, Any]:
        """Arguments with which a kernel's pass does what is pending."""
        self._put_back()
        add, self._pending = self._pending, None
        return {"add": add, "clear": self.clear_selected}

    def _selected(self, entries: tuple[NDArray[Any], NDArray[Any]]) -> SparseVector:
        selected = self._of(entries)
        self._removed = selected if self.clear_selected else None
        return selected

    def topk(self, k: int) -> SparseVector:
        """The k largest magnitudes, ties by lower index."""
        return self._selected(kernels_of(self._array).topk(self._array, min(k, self.length), **self._pass()))

    def threshold(self, threshold: float, expected: int = 0) -> SparseVector:
        """Entries with a magnitude >= threshold (NaN counts as above all)."""
        kernels = kernels_of(self._array)
        key = key_of(threshold, self.dtype)
        return self._selected(kernels.select_at_least(self._array, key, expected, **self._pass()))

    def sample(self, stride: int, offset: int) -> SparseVector:
        """Every stride-th value, from index `offset` on, with the pending addend; no pass over the vector is made."""
        self._put_back()
        part = self._array[offset::stride].copy()
        if self._pending is not None:
            kernels_of(part).accumulate(part, (self._pending[0][offset::stride], self._pending[1]))
        return DenseVector(part).to_sparse(keep_zeros=True)

    def magnitude_stats(self, expected_nnz: int) -> tuple[NDArray[np.float64], SparseVector, float]:
        """As in DenseVector, in the pass that adds and clears."""
        kernels = kernels_of(self._array)
        self._put_back()
        key, moments = kernels.lower_bound_key(self._array, expected_nnz, self._pending), np.empty(4)
        entries = kernels.select_at_least(
            self._array, key, expected_nnz + (expected_nnz >> 2), moments=moments, **self._pass()
        )
        return moments, self._selected(entries), float(magnitude_of(key, self.dtype))


def _flushed(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of DenseVector that reads all values, as one of LazyAccumulator."""

    @functools.wraps(method)
    def flush_first(self: LazyAccumulator, *args: Any, **options: Any) -> Any:
        return method(self.flush(), *args, **options)

    return flush_first


for _name, _method in vars(DenseVector).items():
    if callable(_method) and not _name.startswith("_") and _name not in vars(LazyAccumulator):
        setattr(LazyAccumulator, _name, _flushed(_method))
