"""SciPy's sparse arrays and matrices as vectors, and back; SciPy is imported when it is first needed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsecoll.vector.coordinates import coordinates, count, flat_indices, flat_of_rows, rows_of_flat, used_indices
from sparsecoll.vector.pairs import combined
from sparsecoll.vector.values import native_values

if TYPE_CHECKING:
    from numpy.typing import NDArray

BY_ROWS = ("csr", "csc", "bsr", "lil")  # SciPy converts these to CSR without sorting by a comparison
FORMATS = (*BY_ROWS, "coo", "dia", "dok")


def scipy_entries(x: Any) -> tuple[NDArray[Any], NDArray[Any], int]:
    """Return ascending flat indices, values and length of a SciPy sparse array or matrix; duplicates are summed.

    Raises:
        TypeError: x is something else.
        ValueError: The arrays of x are not those of a matrix of its shape. SciPy's own code, which is compiled, would
            read and write outside of them.
    """
    if not hasattr(x, "format"):
        raise TypeError(f"x: expected a SciPy sparse array or matrix, got {type(x).__name__}")
    length, form = count(x.shape), x.format
    if form in BY_ROWS and not is_tall(form, x.shape, x.nnz):
        shape = (*(1,) * (2 - x.ndim), *x.shape)  # a vector in CSR format is a matrix of one row
        _check_before_conversion(x)
        rows = x if form == "csr" else x.tocsr()
        (indices, ascending), values = flat_of_rows(rows, shape), rows.data[: rows.indptr[-1]]
        if ascending:
            return indices, native_values(values), length
    elif form == "csc":
        _check_before_conversion(x)
        columns, stop = np.repeat(np.arange(x.shape[1]), np.diff(x.indptr)), x.indptr[-1]  # there may be room behind
        indices, values = flat_indices((x.indices[:stop], columns), x.shape), x.data[:stop]
    else:
        coo = x.tocoo()
        indices = flat_indices(coo.coords if hasattr(coo, "coords") else (coo.row, coo.col), x.shape)
        values = coo.data
    return *combined(indices, native_values(values), "sum"), length


def is_tall(form: str, shape: tuple[int, ...], nnz: int) -> bool:
    """Return whether a matrix in CSC format has more rows than entries, so that CSR would take more memory than it."""
    return form == "csc" and shape[0] > nnz


def _check_before_conversion(x: Any) -> None:
    """Raise ValueError if a matrix cannot be converted to CSR: SciPy does not check it."""
    height, width = x.shape if x.ndim == 2 else (1, *x.shape)
    if x.format == "csc":
        used_indices(x, width, height)
    elif x.format == "bsr":
        used_indices(x, *(-(-size // max(block, 1)) for size, block in zip(x.shape, x.blocksize, strict=True)))
    elif x.format == "lil" and list(map(len, x.rows)) != list(map(len, x.data)):
        raise ValueError("x: expected as many values as indices in each row in lil format, got others")


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
        kind: name of the class in scipy.sparse, such as "csr_array".
        index_dtype: that of SciPy's index arrays; "int64" is used in any case where they need it.
        blocksize: of BSR; None lets SciPy estimate it.
    """
    sparse = importlib.import_module("scipy.sparse")
    cls, form = getattr(sparse, kind), kind[:3]
    if max((*shape, indices.size)) >= 1 << 31:
        index_dtype = "int64"
    if len(shape) == 2 and form in BY_ROWS and not is_tall(form, shape, indices.size):
        starts, columns = rows_of_flat(indices, (shape[0], shape[1]), index_dtype)
        by_rows = cls if form == "csr" else getattr(sparse, f"csr_{kind[4:]}")
        made = by_rows(shape, dtype=values.dtype)
        made.data, made.indices, made.indptr = values, columns, starts  # which the constructor would validate
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
