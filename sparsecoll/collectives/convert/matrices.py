"""Sparse arrays and matrices of SciPy and pydata."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsecoll.collectives.convert.back import Back
from sparsecoll.vector import SparseVector
from sparsecoll.vector.coordinates import coordinates, count, flat_indices, used_indices
from sparsecoll.vector.pairs import combined
from sparsecoll.vector.scipy_arrays import to_scipy
from sparsecoll.vector.values import native_values


def from_scipy(x: Any) -> tuple[SparseVector, Back]:
    """Return a SciPy sparse array or matrix as a vector, and its Back."""
    index = next((a for a in (getattr(x, "indices", None), getattr(x, "row", None)) if a is not None), None)
    dtype = "int64" if index is not None and index.dtype == np.int64 else "int32"
    back = ToScipy(type(x).__name__, tuple(map(int, x.shape)), dtype, getattr(x, "blocksize", None))
    return SparseVector.from_scipy(x), back


@dataclass(frozen=True)
class ToScipy(Back):
    """Returns a sparse array or matrix of scipy.sparse; see `vector.scipy_arrays.to_scipy`."""

    kind: str
    shape: Sequence[int]
    index_dtype: str
    blocksize: Sequence[int] | None

    def __call__(self, y: SparseVector) -> Any:
        block = None if self.blocksize is None else (self.blocksize[0], self.blocksize[1])
        return to_scipy(y.indices, y.values, tuple(self.shape), self.kind, self.index_dtype, block)


def from_pydata(x: Any) -> tuple[SparseVector, Back]:
    """Return a pydata COO, GCXS or DOK as a vector, and its Back."""
    if not x.ndim:
        raise ValueError("x: expected at least one dimension, got a number: use x.todense()")
    if x.fill_value != 0:
        raise ValueError(f"x: expected a fill value of 0, got {x.fill_value}")
    form = type(x).__name__.lower()
    axes = tuple(int(axis) for axis in getattr(x, "compressed_axes", None) or ())
    if form == "gcxs" and x.ndim > 1:  # whose conversion does not check them
        rows = math.prod(x.shape[axis] for axis in axes)
        used_indices(x, rows, math.prod(size for axis, size in enumerate(x.shape) if axis not in axes))
    coo = x if form == "coo" else x.tocoo() if form == "gcxs" else x.to_coo()
    entries = combined(flat_indices(coo.coords, coo.shape), native_values(coo.data), "sum")
    return SparseVector.from_sorted_unchecked(*entries, count(x.shape)), ToPydata(form, tuple(map(int, x.shape)), axes)


@dataclass(frozen=True)
class ToPydata(Back):
    """Returns a COO, GCXS or DOK of pydata's package `sparse`."""

    form: str
    shape: Sequence[int]
    compressed_axes: Sequence[int]

    def __call__(self, y: SparseVector) -> Any:
        sparse, shape = importlib.import_module("sparse"), tuple(self.shape)
        rows = np.stack(coordinates(y.indices, shape))
        coo = sparse.COO(rows, y.values, shape=shape, has_duplicates=False, sorted=True)
        if self.form == "coo":
            return coo
        axes = {"compressed_axes": tuple(self.compressed_axes)} if self.compressed_axes else {}  # none in one dimension
        return coo.asformat(self.form, **axes)
