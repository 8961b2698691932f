"""Gradients of few rows of a table, as torch.nn.Embedding(sparse=True) has them: they are reduced as rows.

Nothing here has the size of the table: a rank holds the rows of its own gradient and those of the mean.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sparsecoll.collectives.convert.back import Back
from sparsecoll.collectives.options import CallOptions
from sparsecoll.collectives.rows import allreduce_rows
from sparsecoll.errors import NonFiniteError
from sparsecoll.telemetry.trace import span
from sparsecoll.torch.bucket import Bucket
from sparsecoll.torch.compressors import Compressor
from sparsecoll.torch.device import CPU
from sparsecoll.torch.layout import Layout, has_rows, rows_like
from sparsecoll.transport import Transport
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.vector import RowSparse


class RowParameters:
    """The names of the parameters whose gradients are reduced as rows; the same on every rank.

    A parameter is one of them if some rank has had a gradient of rows for it, or its module says so, and no rank has
    ever had a dense one. A table that is also the weight of a linear layer has dense gradients.
    """

    def __init__(self) -> None:
        self._rows: set[str] = set()
        self._dense: set[str] = set()

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def learn(self, rows: Collection[str], dense: Collection[str]) -> set[str]:
        """Note for which parameters a rank has gradients of each kind; return those that are reduced otherwise now."""
        before = set(self._rows)
        self._dense |= set(dense)
        self._rows = (self._rows | set(rows)) - self._dense
        return before ^ self._rows

    def state(self) -> dict[str, list[str]]:
        """Return what `load` takes."""
        return {"rows": sorted(self._rows), "dense": sorted(self._dense)}

    def load(self, state: Mapping[str, Collection[str]], names: Collection[str]) -> None:
        """Restore what `state` returned, for those parameters that are among `names`."""
        self._rows, self._dense = (set(state.get(kind, ())) & set(names) for kind in ("rows", "dense"))


class RowBucket(Bucket):
    """One parameter whose gradients are rows: this rank's gradient, and the mean."""

    def __init__(self, params: Mapping[str, torch.Tensor], layout: Layout, as_view: bool = False) -> None:
        super().__init__(params, layout)
        self._own: torch.Tensor | None = None
        self._mean: RowSparse | None = None

    def take_grad(self, name: str, scale: float = 1.0) -> None:
        """Take a parameter's gradient; a dense one counts as none, since all ranks will learn of it at the end."""
        gradient = self.params[name].grad
        self.take(gradient if has_rows(gradient) else None)

    def take(self, gradient: torch.Tensor | None) -> None:
        """Take a sparse gradient, whose arrays are shared; None: no rows."""
        self._own = None if gradient is None else gradient.detach()

    def rows(self, factor: float = 1.0) -> RowSparse:
        """Return factor * gradient, with one entry for each row, in the dtype of the layout."""
        n, *rest = self.layout.shapes[0]
        d, dtype = math.prod(rest), self.layout.dtype
        if self._own is None:
            return RowSparse.empty(n, d, dtype)
        if tuple(self._own.shape) != (n, *rest):
            raise ValueError(f"gradient: expected shape {(n, *rest)}, got {tuple(self._own.shape)}")
        values = self._own._values().reshape(-1, d).cpu()  # rows are sent from host memory
        values = values.to(torch.float64 if dtype == np.float64 else torch.float32)
        if factor != 1.0:
            values = values * factor
        indices = self._own._indices()[0].cpu()
        return RowSparse.from_pairs(CPU.array(indices.contiguous()), CPU.array(values.contiguous()), n)

    def accumulate(self, residual: Any, weights: Mapping[str, tuple[float, float]]) -> Any:
        """Return b * gradient as rows, see `Bucket.accumulate`; they have no residual."""
        (name,) = self.params
        self.take_grad(name)
        return self.rows(weights[name][1])

    def reduce(self, transport: Transport, compressor: Compressor) -> None:
        compressor.allreduce_mean(transport, self, self)  # type: ignore[arg-type]

    def set_mean(self, mean: RowSparse) -> None:
        """Set the mean over the ranks."""
        self._mean = mean

    def accept(self) -> None:
        self._own = None

    def reset(self) -> None:
        self._own = self._mean = None

    def has_mean(self, name: str) -> bool:
        return False  # nothing waits in a residual

    def mean_tensor(self) -> torch.Tensor:
        """Return the mean as a coalesced sparse tensor in the dtype of the parameter, and forget it."""
        mean, self._mean = self._mean, None
        assert mean is not None
        (p,) = self.params.values()
        return rows_like(p, CPU.tensor(mean.rows), CPU.tensor(mean.values))

    def assign_grad(self, name: str, scale: float = 1.0) -> None:
        self.params[name].grad = self.mean_tensor()

    def nan(self, name: str) -> torch.Tensor:
        return nan_rows(self.params[name])


def nan_rows(p: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient of a parameter whose first row is NaN."""
    return rows_like(p, torch.zeros(1, dtype=torch.int64), torch.full_like(p.detach()[:1], torch.nan))


@dataclass
class RowSum(Compressor):
    """The exact mean of gradients of rows; nothing is dropped, so that there is no residual.

    Args:
        finite: whether NaN and infinity are refused.
        local: whether nothing is sent, as by the compressor "free".
    """

    name = "rows"

    finite: bool = True
    local: bool = False

    residual = np.zeros(0)  # as compressors with error feedback have one

    def compress(self, acc: RowSparse) -> RowSparse:
        if self.finite and acc._first_not_finite() is not None:
            raise NonFiniteError(f"gradient of {self.layout.names[0]!r}: expected finite values, got NaN or infinity")
        return acc

    def communicate(self, transport: Transport, message: RowSparse) -> RowSparse:
        with CollectiveCall(transport, "allreduce", self.timeout) as call:
            options = CallOptions(timeout=self.timeout, nonfinite="pass")
            total: RowSparse = allreduce_rows(call, message, Back(), "auto", options, False)
        return total

    def update(self, out: Any, message: RowSparse, reduced: RowSparse) -> None:
        out.set_mean(reduced)

    def allreduce_sum(self, transport: Transport, acc: RowSparse) -> RowSparse:
        """Return the sum over the ranks. Called within a CollectiveCall.

        Raises:
            NonFiniteError: a value on some rank, or in the sum, is NaN or infinite; on every rank.
        """
        self.sync(transport)
        if self.local:
            return acc
        total = self.communicate(transport, self.compress(acc))
        if self.finite and total._first_not_finite() is not None:
            raise NonFiniteError(
                f"gradient of {self.layout.names[0]!r}: expected a finite sum over the ranks, got an overflow"
            )
        return total

    def allreduce_mean(self, transport: Transport, gradient: Any, out: Any, source: Any = None) -> None:
        """Set the mean of RowBucket `out` to that of all ranks' RowBucket `gradient`. Collective."""
        with CollectiveCall(transport, f"bucket {self.layout.index}", self.timeout):
            with span("select"):
                rows = gradient.rows()
            total = self.allreduce_sum(transport, rows)
            out.set_mean(total if self.local else total._divide(self.size))
