"""Conversion of callers' types to vectors and back: apart from `torch/`, the only module that knows other libraries.

An n-dimensional array or matrix is one long vector in C order. Values are not copied if the type allows it, and they
stay on the GPU if they are there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from sparsecoll.kernels.keys import index_dtype
from sparsecoll.kernels.memory import asarray_like, contiguous, from_dlpack, on_gpu
from sparsecoll.select import Vector
from sparsecoll.vector import DenseVector, SparseVector

Back = Callable[[SparseVector], Any]

KINDS = (
    "a SparseVector, (indices, values, length), a SciPy sparse array or matrix, a pydata COO, a torch tensor (dense or"
    " sparse_coo), or a dense NumPy, CuPy or DLPack array"
)


def as_vector(x: Any) -> Vector:
    """Convert x to a vector, as the collectives do with their argument.

    Args:
        x: one of the following, with values of float16, float32, float64, int32 or int64. An n-dimensional x becomes
            one vector in C order.

            - SparseVector, DenseVector, or a tuple (indices, values, length);
            - SciPy sparse array or matrix of any format: explicit zeros stay, duplicates are summed;
            - pydata/sparse COO, or an object with `to_coo`, with fill value 0;
            - torch tensor, dense or sparse_coo (of a hybrid tensor, all values of each stored row are entries), on the
              CPU or CUDA;
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
    """
    return to_vector(x)[0]


def like(x: Any, vector: SparseVector) -> Any:
    """Convert a vector to the type and shape of x, as the collectives do with their result.

    Args:
        x: any type that `sparsecoll.as_vector` takes.
        vector: SparseVector of the same length.

    Returns:
        An object of the type of x; for a dense x the SparseVector itself, from which
        `vector.to_dense().reshape(x.shape)` makes the dense array.

    Raises:
        ValueError: x has another length.

    See Also:
        `sparsecoll.as_vector`.
    """
    own, back = to_vector(x)
    if own.length != vector.length:
        raise ValueError(f"vector: expected length {own.length}, got {vector.length}")
    return back(vector)


def shape_of(x: Any) -> dict[str, list[int]]:
    """Return the shape of an array of two and more dimensions, which ranks compare; {} for a vector."""
    shape = [int(size) for size in getattr(x, "shape", ())]
    return {"shape": shape} if len(shape) > 1 else {}


def to_vector(x: Any) -> tuple[Vector, Back]:
    """Return `as_vector(x)`, and a function that converts a result to x's type (a SparseVector for a dense x)."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError("x: expected an array without a mask, got a masked one: use x.filled(0)")
    if isinstance(x, (SparseVector, DenseVector)):
        return x, as_is
    if isinstance(x, tuple) and len(x) == 3:
        return SparseVector(*x), _as_triple
    if isinstance(x, np.ndarray) or on_gpu(x):
        return DenseVector(_flat(x)), as_is
    library = type(x).__module__.partition(".")[0]
    if library == "scipy" and hasattr(x, "tocoo"):
        return _from_scipy(x)
    if library == "sparse" and (hasattr(x, "coords") or hasattr(x, "to_coo")):
        return _from_pydata(x)
    if library == "torch":
        return _from_torch(x)
    if hasattr(x, "__dlpack_device__"):
        return DenseVector(_flat(np.from_dlpack(x) if x.__dlpack_device__()[0] == 1 else from_dlpack(x))), as_is
    raise TypeError(f"x: expected {KINDS}, got {type(x).__module__}.{type(x).__qualname__}")


def _flat(array: Any) -> Any:
    if isinstance(array, np.matrix):
        array = np.asarray(array)
    return array if array.ndim == 1 else contiguous(array).reshape(-1)


def as_is(y: SparseVector) -> SparseVector:
    """Return the vector, which is the result for dense types and vectors."""
    return y


def _as_triple(y: SparseVector) -> tuple[Any, Any, int]:
    return y.indices, y.values, y.length


def _flat_indices(coordinates: Any, shape: tuple[int, ...]) -> Any:
    """Return flat indices in C order; `coordinates` has a row for each dimension."""
    if math.prod(shape) >= 2**63:
        raise ValueError(f"x: expected fewer than 2^63 coordinates, got shape {shape}")
    indices = coordinates[0].astype(np.uint64)
    for row, size in zip(coordinates[1:], shape[1:], strict=True):
        indices = indices * np.uint64(size) + row.astype(np.uint64)
    return indices


def _coordinates(indices: Any, shape: tuple[int, ...]) -> list[Any]:
    """Invert `_flat_indices`; int64."""
    rest, rows = indices.astype(np.uint64), []
    for size in reversed(shape[1:]):
        rows.append((rest % np.uint64(size)).astype(np.int64))
        rest = rest // np.uint64(size)
    return [rest.astype(np.int64), *reversed(rows)]


def _run_starts(indices: Any) -> Any:
    """Return a mask of the elements that differ from the one before."""
    return np.concatenate([asarray_like(np.ones(min(indices.size, 1), bool), indices), indices[1:] != indices[:-1]])


def _merged(indices: Any, values: Any, length: int) -> SparseVector:
    """Return a vector of entries given in any order; those with the same index are summed in the order given."""
    indices = contiguous(indices, index_dtype(length))
    if indices.size and bool((indices[1:] <= indices[:-1]).any()):
        order = np.argsort(indices, kind="stable") if isinstance(indices, np.ndarray) else indices.argsort()
        indices, values = indices[order], values[order]
        first = _run_starts(indices)
        starts = np.flatnonzero(first)
        if starts.size < indices.size:
            sums = DenseVector.zeros(int(starts.size), values.dtype, DenseVector(values))
            sums.scatter_add((np.cumsum(first) - 1).astype(np.uint64), values)
            indices, values = indices[starts], sums.values
    return SparseVector(indices, values, length)


def _from_scipy(x: Any) -> tuple[SparseVector, Back]:
    coo = x.tocoo()
    coordinates = coo.coords if hasattr(coo, "coords") else (coo.row, coo.col)
    vector = _merged(_flat_indices(coordinates, x.shape), coo.data, math.prod(x.shape))
    return vector, partial(_to_scipy, type(coo), x.format, x.shape)


def _to_scipy(coo: Any, format: str, shape: tuple[int, ...], y: SparseVector) -> Any:
    made = coo((y.values, tuple(_coordinates(y.indices, shape))), shape=shape)
    return made.asformat(format)


def _from_pydata(x: Any) -> tuple[SparseVector, Back]:
    coo = x if hasattr(x, "coords") else x.to_coo()
    if coo.fill_value != 0:
        raise ValueError(f"x: expected a fill value of 0, got {coo.fill_value}")
    vector = _merged(_flat_indices(coo.coords, coo.shape), coo.data, math.prod(coo.shape))
    return vector, partial(_to_pydata, type(coo), coo.shape)


def _to_pydata(coo: Any, shape: tuple[int, ...], y: SparseVector) -> Any:
    return coo(np.stack(_coordinates(y.indices, shape)), y.values, shape=shape, has_duplicates=False, sorted=True)


def _torch_array(tensor: Any) -> Any:
    """Return an array that shares the memory of a tensor."""
    if str(tensor.dtype) == "torch.bfloat16":
        raise TypeError("x: expected float16, float32, float64, int32 or int64, got torch.bfloat16: use x.float()")
    return from_dlpack(tensor.detach()) if tensor.device.type == "cuda" else tensor.detach().numpy()


def _from_torch(x: Any) -> tuple[Vector, Back]:
    layout = str(getattr(x, "layout", type(x).__name__))
    if layout not in ("torch.strided", "torch.sparse_coo") or x.device.type not in ("cpu", "cuda"):
        raise TypeError(
            "x: expected a dense or sparse_coo torch tensor on the CPU or CUDA,"
            f" got {layout} on {getattr(x, 'device', '?')}"
        )
    if layout == "torch.strided":
        return DenseVector(_torch_array(x.contiguous().view(-1))), as_is
    x = x.detach().coalesce()
    rows, values = _torch_array(x.indices()), x.values()
    shape, width = tuple(x.shape), math.prod(x.shape[x.sparse_dim() :])
    indices = _flat_indices(rows, shape[: x.sparse_dim()])
    if x.dense_dim():
        row = asarray_like(np.arange(width, dtype=np.uint64), indices)
        indices = (indices[:, None] * np.uint64(width) + row[None, :]).reshape(-1)
    length = math.prod(shape)
    vector = SparseVector(contiguous(indices, index_dtype(length)), _torch_array(values.reshape(-1)), length)
    return vector, partial(_to_torch, type(x), x.sparse_dim(), shape)


def _to_torch(kind: Any, sparse_dim: int, shape: tuple[int, ...], y: SparseVector) -> Any:
    import importlib

    torch = importlib.import_module(kind.__module__.partition(".")[0])

    def tensor(array: Any) -> Any:
        return torch.from_dlpack(array) if on_gpu(array) else torch.from_numpy(array)

    rows, values = y.indices, tensor(y.values)
    if sparse_dim < len(shape):  # a row of values for each index of the sparse dimensions
        width = np.uint64(math.prod(shape[sparse_dim:]))
        row, column = y.indices.astype(np.uint64) // width, y.indices.astype(np.uint64) % width
        first = _run_starts(row)
        rows, position = row[first], np.cumsum(first) - 1
        values = torch.zeros(len(rows), int(width), dtype=values.dtype, device=values.device)
        values[tensor(position), tensor(column.astype(np.int64))] = tensor(y.values)
        values = values.view(-1, *shape[sparse_dim:])
    index = torch.stack([tensor(coordinates) for coordinates in _coordinates(rows, shape[:sparse_dim])])
    return torch.sparse_coo_tensor(index, values, shape, is_coalesced=True, check_invariants=False)
