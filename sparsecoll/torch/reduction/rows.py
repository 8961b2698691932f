"""Gradients of few rows of a table, as torch.nn.Embedding(sparse=True) has them: their bucket, and their sum.

Nothing here has the size of the table: a rank holds the rows of its own gradient and those of the mean.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sparsecoll.algorithms import Reduction, RowAuto
from sparsecoll.collectives.allreduce import allreduce_vectors
from sparsecoll.collectives.options import CallOptions
from sparsecoll.errors import NonFiniteError
from sparsecoll.residual import RowResidual
from sparsecoll.torch.compressors import Compressor, StepContext
from sparsecoll.torch.compressors.base import ErrorFeedback, entries_of, overflowed
from sparsecoll.torch.compressors.schedule import Density, as_row_density
from sparsecoll.torch.compressors.versions import ALL, Versioned
from sparsecoll.torch.reduction.bucket import Bucket, NewGrads
from sparsecoll.torch.replica.guards import warn_of_momentum_of_rows
from sparsecoll.torch.tensors.layout import CPU, Layout, has_rows, rows_like
from sparsecoll.torch.tensors.private import indices_of, values_of
from sparsecoll.transport import Transport
from sparsecoll.vector import RowSparse


def accumulated(residual: RowSparse, factor: float, gradient: RowSparse) -> RowSparse:
    """Return factor * residual + gradient."""
    kept = residual if factor == 1 else residual.with_values(residual.values * residual.dtype.type(factor))
    return RowResidual.of(kept).compensate(gradient)


class RowBucket(Bucket):
    """One parameter whose gradients are rows: this rank's gradient, and the mean, `mean_rows`."""

    _own: torch.Tensor | None = None
    _scale = 1.0
    mean_rows: RowSparse | None = None

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

    def accept(self) -> None:
        super().accept()
        self._own = None

    def drop(self) -> None:
        super().drop()
        self._own = self.mean_rows = None

    def has_mean(self, name: str) -> bool:
        return self.mean_rows is not None and self.mean_rows.nnz > 0

    def mean_tensor(self, scale: float = 1.0) -> torch.Tensor:
        """Return scale * mean as a coalesced sparse tensor in the dtype of the parameter, and forget it."""
        mean, self.mean_rows = self.mean_rows, None
        assert mean is not None
        (p,), rows, values = self.params.values(), CPU.tensor(mean.rows), CPU.tensor(mean.values)
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


ROWS = "rows by row_density, which may depend on the step alone"  # what errors call their number if ranks differ


@dataclass
class RowSum(ErrorFeedback):
    """The mean of gradients of rows: of all rows, or of those of largest norm, with error feedback.

    Without `density` nothing stays behind, so that there is no residual, and what rounding takes is lost.

    Args:
        finite: whether NaN and infinity are refused.
        local: whether nothing is sent, as by the compressor "free".
        density: rows that each rank sends, as a fraction of those of the table; None, the default, for all that it has.
        value_dtype: dtype of the values on the wire; None, the default, for their own.
        clip: norm N; a rank's gradient is clipped to a norm of N / sqrt(P). None, the default, for no clipping.
        momentum: that of dense gradients, which rows do not get: rank 0 warns of it (default: 0).
    """

    name = "rows"

    finite: bool = True
    local: bool = False
    density: Density | None = None
    value_dtype: str | None = None
    clip: float | None = None
    momentum: float = 0.0

    @property
    def keeps_gradient(self) -> bool:  # type: ignore[override]
        """Whether there is a residual."""
        return self.density is not None

    @property
    def unscales(self) -> bool:
        return self.keeps_gradient or self.clip is not None

    def bind(self, layout: Layout, transport: Transport, context: StepContext, timeout: float | None = None) -> None:
        super().bind(layout, transport, context, timeout)
        self._acc: Any = None  # in a reduction that leaves a part of it
        # values are divided by P before they are rounded, so that sums do not overflow if no value does
        self._sends_parts = self.value_dtype == "float16" and not self.keeps_gradient
        self._compared: dict[str, int] = {}  # values that ranks compare in a call
        if self.momentum and transport.rank == 0:
            warn_of_momentum_of_rows(layout.names[0], self.momentum, context)

    def _first_residual(self) -> Versioned:
        (name,), (n, *rest) = self.layout.names, self.layout.shapes[0]
        empty = RowSparse.empty(n, math.prod(rest), self.layout.dtype)
        return Versioned(empty, lambda names: [ALL] if name in names else [])

    def compensate(self, gradient: Any, scale: float = 1.0, source: Any = None) -> Any:
        """Return acc, the rows of a gradient plus the residual."""
        return accumulated(self.residual, scale, gradient if self.clip is None else self._clipped(gradient))  # type: ignore[arg-type]

    def _clipped(self, gradient: RowSparse) -> RowSparse:
        assert self.clip is not None
        most, norm = self.clip / self.size**0.5, float(np.linalg.norm(gradient.values.astype(np.float64)))
        return gradient.with_values(gradient.values * gradient.dtype.type(most / norm)) if norm > most else gradient

    def compress(self, acc: Any) -> Any:
        if self.local:
            return acc
        if self.finite and acc.first_not_finite() is not None:
            raise NonFiniteError(f"gradient of {self.layout.names[0]!r}: expected finite values, got NaN or infinity")
        if self.density is None:
            return _overflowed(acc.divide(self.size)) if self._sends_parts else acc
        with as_row_density():
            self._acc, self._compared = acc, {ROWS: entries_of(self.density, acc.n, self.context.step)}
        return acc.topk(self._compared[ROWS])

    def communicate(self, transport: Transport, message: Any) -> Reduction:
        """Sum the message over the ranks, or return it with `local`.

        Raises:
            NonFiniteError: On every rank, if the sum is NaN or infinite.
        """
        if self.local:
            return Reduction(message, message)
        options = CallOptions(value_dtype=self.value_dtype, timeout=self.timeout, nonfinite="pass")
        reduction = allreduce_vectors(transport, message, RowAuto(), options, True, self._compared)
        total: Any = reduction.value
        if self._sends_parts:
            reduction.value = total = total.with_values(_overflowed(total).values * total.dtype.type(self.size))
        if self.finite and total.first_not_finite() is not None:
            raise NonFiniteError(
                f"gradient of {self.layout.names[0]!r}: expected a finite sum over the ranks, got an overflow"
            )
        return reduction

    def update(self, out: Any, message: Any, reduced: Reduction) -> None:
        """Set the mean of RowBucket `out`, of a sum or, with `local`, of this rank's rows."""
        total: Any = reduced.value
        out.mean_rows = total if self.local else total.divide(self.size)
        self._subtract_sent(reduced)

    def _subtract_sent(self, reduced: Reduction) -> None:
        """What remains of acc becomes the trial residual."""
        if self.keeps_gradient:
            kept, self._acc = RowResidual.of(self._acc), None
            kept.update(reduced.contributed)  # type: ignore[arg-type]
            self._residual.trial = kept.rows

    def allreduce_sum(self, transport: Transport, acc: Any) -> RowSparse:
        """Return the sum of what all ranks have sent of acc, which holds the residual already. Collective."""
        with self.reducing(transport):
            reduced = self.communicate(transport, self.compress(acc))
            self._subtract_sent(reduced)
        return reduced.value  # type: ignore[return-value]

    # -- state

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        if not self.keeps_gradient:
            return {}
        (name,), (shape,), kept = self.layout.names, self.layout.shapes, self._residual.base
        rows, values = torch.from_numpy(kept.rows)[None], torch.from_numpy(kept.values).reshape(-1, *shape[1:])
        made = torch.sparse_coo_tensor(rows, values, shape, device="cpu", is_coalesced=True, check_invariants=False)
        return {"residual": {name: made}}

    def load_state(self, saved: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        for t in saved.get("residual", {}).values():
            self._residual.base = self._residual.current = rows_of(t, self.layout.dtype)


def _overflowed(rows: RowSparse) -> RowSparse:
    """Return rows whose values beyond the range of float16 are infinite, see `overflowed`."""
    return rows.with_values(overflowed(rows.values.flatten()).reshape(rows.values.shape))


def rows_of(t: torch.Tensor, dtype: np.dtype[Any]) -> RowSparse:
    """Return a copy of the rows of a tensor, sparse or dense, in `dtype`; of a dense one, those that are not zero."""
    t, d = t.detach().cpu(), math.prod(t.shape[1:])
    if not t.is_sparse:
        return RowSparse.from_dense(CPU.array(t.reshape(-1, d).contiguous())).astype(dtype)
    t = t.coalesce()
    rows, values = t.indices()[0].clone(), t.values().reshape(-1, d).clone()
    return RowSparse.from_pairs(CPU.array(rows), CPU.array(values), t.shape[0]).astype(dtype)
