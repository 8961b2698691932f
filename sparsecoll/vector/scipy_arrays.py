"""SciPy's sparse arrays and matrices as vectors, and back; SciPy is imported when it is first needed."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsecoll.vector.coordinates import coordinates, count, flat_indices, flat_of_rows, rows_of_flat
from sparsecoll.vector.pairs import combined
from sparsecoll.vector.values import native_values

if TYPE_CHECKING:
    from numpy.typing import NDArray

BY_ROWS = ("csr", "csc", "bsr", "lil")  # SciPy converts these to CSR without sorting by a comparison


def scipy_entries(x: Any) -> tuple[NDArray[Any], NDArray[Any], int]:
    """Return ascending flat indices, values and length of a SciPy sparse array or matrix; duplicates are summed."""
    length, form = count(x.shape), x.format
    if form in BY_ROWS and x.ndim == 2:
        if form == "csc":  # whose conversion does not check them
            _check(x, x.shape[0])
        rows = x if form == "csr" else x.tocsr()
        (indices, ascending), values = _flat_of_csr(rows), rows.data[: rows.indptr[-1]]
        if ascending:
            return indices, native_values(values), length
    else:
        coo = x.tocoo()
        indices = flat_indices(coo.coords if hasattr(coo, "coords") else (coo.row, coo.col), x.shape)
        values = coo.data
    return *combined(indices, native_values(values), "sum"), length


def _flat_of_csr(x: Any) -> tuple[NDArray[Any], bool]:
    return flat_of_rows(x.indptr, _check(x, x.shape[1]), x.shape)


def _check(x: Any, limit: int) -> NDArray[Any]:
    """Return the indices in use of a compressed matrix; raise ValueError if one is negative, or `limit` or more."""
    indices: NDArray[Any] = x.indices[: x.indptr[-1]]
    if indices.size and int(indices.view(f"u{indices.itemsize}").max()) >= limit:
        raise ValueError(
            f"x: expected indices from 0 to {limit - 1} in {x.format} format, got others: see x.check_format()"
        )
    return indices


@functools.lru_cache(maxsize=16)
def _without_arrays(cls: Any, shape: tuple[int, int], dtype: np.dtype[Any]) -> Any:
    made = cls(shape, dtype=dtype)
    made.data = made.indices = made.indptr = np.empty(0, dtype)
    return made


def to_scipy(
    indices: NDArray[Any],
    values: NDArray[Any],
    shape: tuple[int, ...],
    kind: str,
    index_dtype: str = "int32",
    blocksize: tuple[int, int] | None = None,
) -> Any:
    """Return a sparse array or matrix in canonical form.

    Args:
        indices: ascending, unique flat indices.
        values: as many values, which are not copied.
        shape: of the result.
        kind: name of the class in scipy.sparse, such as "csr_array".
        index_dtype: that of SciPy's index arrays; "int64" is used in any case where they need it.
        blocksize: of BSR; None lets SciPy estimate it.
    """
    sparse = importlib.import_module("scipy.sparse")
    cls, form = getattr(sparse, kind), kind[:3]
    if max((*shape, indices.size)) >= 1 << 31:
        index_dtype = "int64"
    if len(shape) == 2 and form in BY_ROWS:
        starts, columns = rows_of_flat(indices, (shape[0], shape[1]), index_dtype)
        by_rows = cls if form == "csr" else getattr(sparse, f"csr_{kind[4:]}")
        made = object.__new__(by_rows)
        made.__dict__ |= _without_arrays(by_rows, shape, values.dtype).__dict__  # the constructor would validate them
        made.data, made.indices, made.indptr = values, columns, starts
        made.has_canonical_format = True
        if form == "bsr":
            return made.tobsr(blocksize=blocksize)
        made = made.asformat(form)
        if form == "csc":
            made.has_canonical_format = True
        return made
    coo = getattr(sparse, f"coo_{kind[4:]}")
    made = coo((values, tuple(coordinates(indices, shape, index_dtype))), shape=shape)
    made.has_canonical_format = True
    return made.asformat(form)
