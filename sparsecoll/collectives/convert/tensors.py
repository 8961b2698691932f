"""Tensors of torch, which is reached through the caller's tensors and never imported at the start."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsecoll.collectives.convert.back import Back
from sparsecoll.kernels.keys import index_dtype
from sparsecoll.kernels.memory import asarray_like, contiguous, data_ptr, from_dlpack, on_gpu
from sparsecoll.select import Vector
from sparsecoll.vector import DenseVector, RowSparse, SparseVector
from sparsecoll.vector.coordinates import coordinates, count, flat_indices
from sparsecoll.vector.pairs import run_starts
from sparsecoll.vector.values import dtype_of


def torch_array(tensor: Any) -> Any:
    """Return an array that shares the memory of a tensor; bfloat16 is that of ml_dtypes."""
    if str(tensor.dtype) != "torch.bfloat16":
        tensor = tensor.detach().resolve_conj().resolve_neg()  # copies only what these bits defer
        return from_dlpack(tensor) if tensor.device.type == "cuda" else tensor.numpy()
    if tensor.device.type == "cuda":
        raise TypeError("x: expected another dtype on the GPU, got torch.bfloat16: use x.float()")
    try:
        dtype = dtype_of("bfloat16")
    except ImportError:
        raise TypeError("x: torch.bfloat16 needs ml_dtypes (pip install ml_dtypes): or use x.float()") from None
    return tensor.detach().view(importlib.import_module("torch").int16).numpy().view(dtype)


def tensor_of(array: Any) -> Any:
    """Return a tensor that shares the memory of an array where torch can use it; invert `torch_array`."""
    torch = importlib.import_module("torch")
    if on_gpu(array):
        return torch.from_dlpack(array)
    if data_ptr(array) % array.itemsize:  # complex128 of a message: NumPy needs 8 bytes, torch crashes without 16
        array = array.copy()
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def from_torch(x: Any) -> tuple[Vector, Back]:
    """Return a tensor as a vector, and its Back."""
    layout = str(getattr(x, "layout", type(x).__name__))
    if layout not in ("torch.strided", "torch.sparse_coo") or x.device.type not in ("cpu", "cuda"):
        found = f"{layout} on {getattr(x, 'device', '?')}"
        raise TypeError(f"x: expected a dense or sparse_coo torch tensor on the CPU or CUDA, got {found}")
    if layout == "torch.strided":
        return DenseVector(torch_array(x.contiguous().view(-1))), Back()
    if not x.sparse_dim():
        raise ValueError(f"x: expected a tensor with a sparse dimension, got shape {list(x.shape)} without one")
    x = x.detach().coalesce()
    rows, values = torch_array(x.indices()), x.values()
    shape, width = tuple(x.shape), math.prod(x.shape[x.sparse_dim() :])
    length, indices = count(shape), flat_indices(rows, shape[: x.sparse_dim()])
    if x.dense_dim():
        row = asarray_like(np.arange(width, dtype=np.uint64), indices)
        indices = (indices.astype(np.uint64)[:, None] * np.uint64(width) + row[None, :]).reshape(-1)
    vector = SparseVector(contiguous(indices, index_dtype(length)), torch_array(values.reshape(-1)), length)
    return vector, ToTorch(x.sparse_dim(), shape)


@dataclass(frozen=True)
class ToTorch(Back):
    """Returns a coalesced torch.sparse_coo tensor, of entries or of rows of values."""

    sparse_dim: int
    shape: Sequence[int]

    def __call__(self, y: Any) -> Any:
        torch, shape = importlib.import_module("torch"), tuple(self.shape)
        rows, values = y.indices, tensor_of(y.values)
        if self.sparse_dim < len(shape) and not y.width:  # a row of values for each index of the sparse dimensions
            width = np.uint64(math.prod(shape[self.sparse_dim :]))
            row, column = y.indices.astype(np.uint64) // width, y.indices.astype(np.uint64) % width
            first = run_starts(row)
            rows, position = row[first], np.cumsum(first) - 1
            values = torch.zeros(len(rows), int(width), dtype=values.dtype, device=values.device)
            values[tensor_of(position), tensor_of(column.astype(np.int64))] = tensor_of(y.values)
        values = values.view(len(rows), *shape[self.sparse_dim :])
        index = torch.stack([tensor_of(row) for row in coordinates(rows, shape[: self.sparse_dim])])
        return torch.sparse_coo_tensor(
            index, values, shape, device=values.device, is_coalesced=True, check_invariants=False
        )


def rows_of_hybrid(x: Any) -> tuple[RowSparse, Back] | None:
    """Return a tensor with sparse and dense dimensions as rows, summing repeated ids; None for other tensors."""
    x = x.detach()
    shape = tuple(map(int, x.shape))
    outer = shape[: x.sparse_dim()]
    d = math.prod(shape[len(outer) :])
    if not x.dense_dim() or not outer or not d:
        return None
    numbers = flat_indices(torch_array(x._indices()), outer)
    values = torch_array(x._values().reshape(-1, d))
    return RowSparse.from_pairs(numbers, values, count(outer)), ToTorch(len(outer), shape)


@dataclass(frozen=True)
class ToArray(Back):
    """Returns a dense array: a tensor of torch, a DenseVector for library "", or else an array of NumPy or CuPy."""

    library: str
    shape: Sequence[int]

    def __call__(self, y: Any) -> Any:
        values = y.values.reshape(tuple(self.shape))
        return tensor_of(values) if self.library == "torch" else values if self.library else DenseVector(values)
