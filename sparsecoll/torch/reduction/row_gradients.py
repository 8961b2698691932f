"""Gradients of few rows of a table, as torch.nn.Embedding(sparse=True) has them: they are reduced as rows.

Nothing here has the size of the table: a rank holds the rows of its own gradient and those of the mean.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from sparsecoll.residual import RowResidual
from sparsecoll.torch.compressors import Compressor
from sparsecoll.torch.compressors.versions import Versions
from sparsecoll.torch.reduction.bucket import Bucket, NewGrads
from sparsecoll.torch.tensors.device import CPU
from sparsecoll.torch.tensors.layout import Layout, has_rows, rows_like
from sparsecoll.torch.tensors.private import indices_of, values_of
from sparsecoll.transport import Transport
from sparsecoll.vector import RowSparse


def accumulated(residual: RowSparse, factor: float, gradient: RowSparse) -> RowSparse:
    """Return factor * residual + gradient."""
    kept = residual if factor == 1 else residual.with_values(residual.values * residual.dtype.type(factor))
    return RowResidual.of(kept).compensate(gradient)


class RowBucket(Bucket):
    """One parameter whose gradients are rows: this rank's gradient, and the mean."""

    def __init__(
        self, params: Mapping[str, torch.Tensor], layout: Layout, versions: Versions, as_view: bool = False
    ) -> None:
        super().__init__(params, layout, versions)
        self._own: torch.Tensor | None = None
        self._scale = 1.0
        self._mean: RowSparse | None = None

    def take_grad(self, name: str, scale: float = 1.0) -> None:
        """Take a parameter's gradient; a dense one counts as none: all ranks learn of it later."""
        gradient = self.params[name].grad
        self.take(gradient if has_rows(gradient) else None, scale)

    def take(self, gradient: torch.Tensor | None, scale: float = 1.0) -> None:
        """Take a sparse gradient, divided by `scale`, whose arrays are shared; None: no rows."""
        self._own, self._scale = None if gradient is None else gradient.detach(), scale

    def rows(self, factor: float = 1.0) -> RowSparse:
        """Return factor * gradient, with one entry for each row, in the dtype of the layout."""
        n, *rest = self.layout.shapes[0]
        d, dtype = math.prod(rest), self.layout.dtype
        if self._own is None:
            return RowSparse.empty(n, d, dtype)
        if tuple(self._own.shape) != (n, *rest):
            raise ValueError(f"gradient: expected shape {(n, *rest)}, got {tuple(self._own.shape)}")
        values = values_of(self._own).reshape(-1, d).cpu()  # rows are sent from host memory
        values = values.to(torch.float64 if dtype == np.float64 else torch.float32)
        if factor != self._scale:
            values = values * (factor / self._scale)
        indices = indices_of(self._own)[0].cpu()
        return RowSparse.from_pairs(CPU.array(indices.contiguous()), CPU.array(values.contiguous()), n)

    def accumulate(self, residual: Any, weights: Mapping[str, tuple[float, float]]) -> Any:
        """Return a * residual + b * gradient, all of them rows, see `Bucket.accumulate`."""
        (name,) = self.params
        a, b = weights[name]
        self.take_grad(name)
        return accumulated(residual, a, self.rows(b))

    def reduce(self, transport: Transport, compressor: Compressor) -> None:
        compressor.allreduce_mean(transport, self.rows(), self)  # type: ignore[arg-type]

    def set_mean(self, mean: RowSparse) -> None:
        """Set the mean over the ranks."""
        self._mean = mean

    def accept(self) -> None:
        super().accept()
        self._own = None

    def drop(self) -> None:
        super().drop()
        self._own = self._mean = None

    def has_mean(self, name: str) -> bool:
        return self._mean is not None and self._mean.nnz > 0

    def mean_tensor(self, scale: float = 1.0) -> torch.Tensor:
        """Return scale * mean as a coalesced sparse tensor in the dtype of the parameter, and forget it."""
        mean, self._mean = self._mean, None
        assert mean is not None
        (p,), rows, values = self.params.values(), CPU.tensor(mean.rows), CPU.tensor(mean.values)
        if not mean.nnz:  # autograd resizes what it adds rows to if there are none, which NumPy's memory does not allow
            rows, values = rows.clone(), values.clone()
        return rows_like(p, rows, values if scale == 1.0 else values * scale)

    def new_grads(self, names: Collection[str], scale: float = 1.0) -> NewGrads:
        return {name: (self.mean_tensor(scale), None) for name in names}

    def assign_grads(self, made: NewGrads) -> None:
        for name, (new, _) in made.items():
            self.params[name].grad = new

    def nan(self, name: str) -> torch.Tensor:
        return nan_rows(self.params[name])


def nan_rows(p: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient of a parameter whose first row is NaN."""
    return rows_like(p, torch.zeros(1, dtype=torch.int64, device=p.device), torch.full_like(p.detach()[:1], torch.nan))
