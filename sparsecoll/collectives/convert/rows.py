"""Types that consist of rows: hybrid tensors of torch, and BSR matrices of SciPy, whose blocks are the rows."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsecoll.collectives.convert.back import Back
from sparsecoll.collectives.convert.tensors import tensor_of, torch_array
from sparsecoll.vector import DenseVector, RowSparse
from sparsecoll.vector.coordinates import coordinates, count, flat_indices
from sparsecoll.vector.row_arrays import blocks_of


def to_rows(x: Any) -> tuple[RowSparse, Back] | None:
    """Return x as rows, and what converts a result to its type; None if x does not consist of rows."""
    if isinstance(x, RowSparse):
        return x, Back()
    library = type(x).__module__.partition(".")[0]
    if library == "scipy" and getattr(x, "format", None) == "bsr" and math.prod(x.blocksize) and x.shape[1]:
        numbers, values = blocks_of(x)
        blocks = count(x.shape) // math.prod(x.blocksize)
        back = ToBsr(type(x).__name__, tuple(map(int, x.shape)), x.indices.dtype.name, tuple(map(int, x.blocksize)))
        return RowSparse.from_pairs(numbers, values, blocks), back
    if library == "torch" and str(getattr(x, "layout", "")) == "torch.sparse_coo" and x.device.type == "cpu":
        return _from_hybrid(x.detach())
    return None


def _from_hybrid(x: Any) -> tuple[RowSparse, Back] | None:
    """Return a tensor with sparse and dense dimensions as rows; the ids that it holds twice are summed."""
    shape = tuple(map(int, x.shape))
    outer = shape[: x.sparse_dim()]
    d = math.prod(shape[len(outer) :])
    if not x.dense_dim() or not outer or not d:
        return None
    numbers = flat_indices(torch_array(x._indices()), outer)
    values = torch_array(x._values().reshape(-1, d))
    return RowSparse.from_pairs(numbers, values, count(outer)), ToHybrid(len(outer), shape)


@dataclass(frozen=True)
class ToHybrid(Back):
    """Returns a coalesced torch.sparse_coo tensor with sparse and dense dimensions."""

    sparse_dim: int
    shape: Sequence[int]

    def __call__(self, y: Any) -> Any:
        torch, shape = importlib.import_module("torch"), tuple(self.shape)
        outer = coordinates(y.rows, shape[: self.sparse_dim], "int64")
        index = torch.stack([tensor_of(np.ascontiguousarray(numbers)) for numbers in outer])
        values = tensor_of(y.values).view(-1, *shape[self.sparse_dim :])
        return torch.sparse_coo_tensor(
            index, values, shape, device=values.device, is_coalesced=True, check_invariants=False
        )


@dataclass(frozen=True)
class ToBsr(Back):
    """Returns a BSR array or matrix of scipy.sparse in canonical form."""

    kind: str
    shape: Sequence[int]
    index_dtype: str
    blocksize: Sequence[int]

    def __call__(self, y: Any) -> Any:
        height, width = self.blocksize
        wide = self.shape[1] // width
        starts = np.searchsorted(y.rows, np.arange(self.shape[0] // height + 1) * wide).astype(self.index_dtype)
        columns = (y.rows % wide).astype(self.index_dtype)
        made = getattr(importlib.import_module("scipy.sparse"), self.kind)(
            (y.values.reshape(-1, height, width), columns, starts), shape=tuple(self.shape)
        )
        made.has_canonical_format = True
        return made


@dataclass(frozen=True)
class ToArray(Back):
    """Returns a dense array: a tensor of torch, a DenseVector for library "", or else an array of NumPy or CuPy."""

    library: str
    shape: Sequence[int]

    def __call__(self, y: Any) -> Any:
        values = y.values.reshape(tuple(self.shape))
        return tensor_of(values) if self.library == "torch" else values if self.library else DenseVector(values)
