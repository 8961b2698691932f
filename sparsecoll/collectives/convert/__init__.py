"""Conversion of callers' types to vectors and back.

An n-dimensional array or matrix is one long vector in C order. Values are not copied if the type allows it, and they
stay on the GPU if they are there. A type's library is found by its module's name; none is imported early.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from sparsecoll.collectives.convert.back import Back, ToTriple
from sparsecoll.collectives.convert.mappings import ToMapping, from_mapping
from sparsecoll.collectives.convert.matrices import ToPydata, ToScipy, from_pydata, from_scipy
from sparsecoll.collectives.convert.tensors import ToArray, ToTorch, from_torch, rows_of_hybrid
from sparsecoll.kernels.memory import asarray_like, contiguous, from_dlpack, on_gpu
from sparsecoll.select import Vector
from sparsecoll.vector import DenseVector, RowSparse, SparseVector

BACKS = {kind.__name__: kind for kind in (Back, ToTriple, ToScipy, ToPydata, ToTorch, ToMapping, ToArray)}
TYPES = "a SparseVector, an array, a sparse array of SciPy or pydata, a tensor, (indices, values, length), or a mapping"
CURES = {
    "RowSparse": "allreduce, reduce_scatter, one that only moves data (scatter: a list), or x.to_dense().reshape(-1)",
    "list": "np.asarray(x) of a dense one, SparseVector.from_pairs of pairs",
    "set": "dict.fromkeys(x, 1)",
    "DataFrame": "x.to_numpy(), or x.sparse.to_coo()",
    "Series": "x.to_dict() of labels and values, or x.to_numpy()",
    "MultiIndex": "integers",
    "Histogram": "SparseVector.from_dense(x.view(flow=True).reshape(-1))",
    "Hist": "SparseVector.from_dense(x.view(flow=True).reshape(-1))",
}


def as_vector(x: Any) -> Vector:
    """Convert x to a vector, as the collectives do with their argument.

    Args:
        x: one of the following, with values of bool, int8 to int64, uint8 to uint64, float16 to float64, complex64,
            complex128 or ml_dtypes.bfloat16, in either byte order. An n-dimensional
            x becomes one vector in C order.

            - SparseVector, DenseVector, or a tuple (indices, values, length);
            - SciPy sparse array or matrix of any format: explicit zeros stay (but in DIA), duplicates are summed;
            - pydata/sparse COO, GCXS or DOK, with fill value 0;
            - torch tensor, dense or sparse_coo (of a hybrid tensor, all values of each stored row are entries), on the
              CPU or CUDA; of bfloat16, on the CPU where ml_dtypes is installed;
            - dict, Counter, OrderedDict or defaultdict from integers of at least 0 to numbers, in any order: the length
              is the largest key plus one, on which ranks agree in a collective; or from str, bytes, or tuples of int
              and str: an index is the position of a key among the sorted keys (tuples as JSON), in a collective that in
              a table of the keys of all ranks;
            - dense NumPy or CuPy array, or any array with `__dlpack__`.

    Returns:
        SparseVector for a sparse x, DenseVector for a dense one.

    Raises:
        TypeError: x has another type, or its dtype is not supported.
        ValueError: Its indices are invalid, or its fill value is not 0.

    See Also:
        `sparsecoll.like`, which converts back.

    >>> as_vector(np.array([[0.0, 2.0], [0.0, 3.0]])).topk(2).indices
    array([1, 3], dtype=uint32)
    >>> as_vector({7: 1, 2: 5}).indices
    array([2, 7], dtype=uint32)
    """
    return _ordered(x)[0]


def like(x: Any, vector: SparseVector) -> Any:
    """Convert a vector to the type and shape of x, as the collectives do with their result.

    Args:
        x: any type that `sparsecoll.as_vector` takes.
        vector: SparseVector of the same length (of any length if the keys of x are integers).

    Returns:
        An object of the type of x; for a dense x the SparseVector itself, from which
        `vector.to_dense().reshape(x.shape)` makes the dense array.

    Raises:
        ValueError: x has another length.
    """
    own, back = _ordered(x)
    if own.length != vector.length and not (isinstance(back, ToMapping) and back.keys == "integers"):
        raise ValueError(f"vector: expected length {own.length}, got {vector.length}")
    return back(vector)


def to_array(x: Any) -> ToArray:
    """Return the Back of a dense x: its results are tensors of torch, DenseVectors or arrays of the shape of x."""
    if isinstance(x, DenseVector):
        return ToArray("", (x.length,))
    return ToArray(_library(x), tuple(map(int, x.shape if hasattr(x, "shape") else np.from_dlpack(x).shape)))


def _library(x: Any) -> str:
    """Return the package of a type, "torch" for a subclass of its tensors."""
    packages = [base.__module__.partition(".")[0] for base in type(x).__mro__]
    return "torch" if "torch" in packages else packages[0]


def shape_of(x: Any) -> dict[str, list[int]]:
    """Return the shape of an array of two and more dimensions, which ranks compare; {} for a vector."""
    shape = [int(size) for size in getattr(x, "shape", ())]
    return {"shape": shape} if len(shape) > 1 else {}


def has_keys(x: Any) -> bool:
    """Return whether x is a mapping, which has keys and no length; matrices of DOK have one."""
    return isinstance(x, Mapping) and _library(x) not in ("scipy", "sparse")


def to_vector(x: Any) -> tuple[Vector, Back]:
    """Return `as_vector(x)`, and the Back that converts a result to x's type (a SparseVector for a dense x)."""
    if isinstance(x, (SparseVector, DenseVector)):
        return x, Back()
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError("x: expected an array without a mask, got a masked one: use x.filled(0)")
    if isinstance(x, tuple) and len(x) == 3:
        return SparseVector(*x), ToTriple()
    if isinstance(x, np.ndarray) or on_gpu(x):
        return DenseVector(_flat(x)), Back()
    if has_keys(x):
        return from_mapping(x)
    library, name = _library(x), type(x).__name__
    if library == "scipy" and hasattr(x, "tocoo"):
        return from_scipy(x)
    if library == "sparse" and name in ("COO", "GCXS", "DOK"):
        return from_pydata(x)
    if library == "torch":
        return from_torch(x)
    if hasattr(x, "__dlpack_device__"):
        return DenseVector(_flat(np.from_dlpack(x) if x.__dlpack_device__()[0] == 1 else from_dlpack(x))), Back()
    cure = f": use {CURES[name]}" if name in CURES else ""
    raise TypeError(f"x: expected {TYPES}, got {type(x).__module__}.{type(x).__qualname__}{cure}")


def to_rows(x: Any) -> tuple[RowSparse, Back] | None:
    """Return x as rows, and the Back of its type; None if x does not consist of rows."""
    if isinstance(x, RowSparse):
        return x, Back()
    if _library(x) == "torch" and str(getattr(x, "layout", "")) == "torch.sparse_coo" and x.device.type == "cpu":
        return rows_of_hybrid(x)
    return None


def to_block(x: Any) -> tuple[RowSparse, Back] | None:
    """Return a dense array as a table of one row, and the Back that returns an equal array; None for other types."""
    strided = str(getattr(x, "layout", "torch.strided")) == "torch.strided" and hasattr(x, "__dlpack_device__")
    if not isinstance(x, (DenseVector, np.ndarray)) and not on_gpu(x) and not strided:
        return None
    vector, _ = to_vector(x)
    if not isinstance(vector, DenseVector):
        return None
    if vector.length >> 32:
        raise ValueError(f"x: expected fewer than 2^32 values in an array, got {vector.length}: send it in parts")
    row = asarray_like(np.zeros(min(vector.length, 1), np.uint32), vector.values)
    values = vector.values.reshape(row.size, max(vector.length, 1))
    return RowSparse.from_sorted_unchecked(row, values, 1), to_array(x)


def _ordered(x: Any) -> tuple[Vector, Back]:
    """Return `to_vector(x)` with ascending keys, so that an index stands for the same key in equal mappings."""
    vector, back = to_vector(x)
    if isinstance(back, ToMapping) and isinstance(vector, SparseVector):
        return back.ordered(vector)
    return vector, back


def _flat(array: Any) -> Any:
    if isinstance(array, np.matrix):
        array = np.asarray(array)
    return array if array.ndim == 1 else contiguous(array).reshape(-1)


def to_text(back: Back) -> str:
    """Return a Back as a text that another rank can read."""
    return json.dumps([type(back).__name__, back.fields()], ensure_ascii=False)


def from_text(text: str) -> Back:
    """Invert `to_text`."""
    kind, fields = json.loads(text)
    return BACKS[kind].of_fields(fields)
