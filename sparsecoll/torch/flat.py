"""Many parameters as one long vector: the layout, the residual behind it, and sparse updates of the parameters."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from sparsecoll.residual import Residual
from sparsecoll.torch.device import device_of
from sparsecoll.vector import DenseVector, SparseVector


class FlatVector:
    """Parameters of one residual dtype on one device, laid end to end, with their residual.

    Attributes:
        params: in the order of the vector.
        residuals: per parameter a tensor of its shape, a view into the one flat residual.
        residual: see sparsecoll.Residual.
    """

    def __init__(self, params: list[torch.Tensor], dtype: Any) -> None:
        self.params = params
        self.offsets = [0, *itertools.accumulate(p.numel() for p in params)]
        self.device = device_of(params[0])
        self.residual = Residual(self.offsets[-1], dtype, self.device.zeros(0, dtype))
        flat = self.device.tensor(self.residual.array)
        self.residuals = [
            flat[a:b].view(p.shape) for p, a, b in zip(params, self.offsets[:-1], self.offsets[1:], strict=True)
        ]

    def updates(self, value: SparseVector | DenseVector) -> Iterator[tuple[torch.Tensor, Update]]:
        """(parameter, its part of a reduced vector)."""
        if isinstance(value, DenseVector):
            flat = self.device.tensor(value.values)
            for p, a, b in zip(self.params, self.offsets[:-1], self.offsets[1:], strict=True):
                yield p, Update(None, flat[a:b])
            return
        places = value.count_below(self.offsets)
        for p, offset, a, b in zip(self.params, self.offsets, places[:-1], places[1:], strict=False):
            inside = value.indices[a:b].astype(np.int64) - offset
            yield p, Update(self.device.tensor(inside), self.device.tensor(value.values[a:b]))


class Update:
    """Values to add to a tensor: at flat positions `index`, or everywhere if `index` is None."""

    def __init__(self, index: torch.Tensor | None, values: torch.Tensor) -> None:
        self.index = index
        self.values = values

    def add_to(self, tensor: torch.Tensor, factor: float) -> None:
        """tensor += factor * update, in place, in the tensor's dtype."""
        if self.index is None:
            tensor.add_(self.values.view(tensor.shape), alpha=factor)
        elif tensor.is_contiguous():
            tensor.view(-1).index_add_(0, self.index, self.values.to(tensor.dtype), alpha=factor)
        else:
            dense = torch.zeros(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
            dense.index_add_(0, self.index, self.values.to(tensor.dtype), alpha=factor)
            tensor.add_(dense.view(tensor.shape))
