"""Many parameters as one long vector: the layout, the residual behind it, and sparse updates of the parameters."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from sparsecoll.algorithms import Algorithm
from sparsecoll.residual import Residual
from sparsecoll.torch.device import device_of
from sparsecoll.vector import DenseVector, SparseVector


class Memory(NamedTuple):
    """A flat vector, and per parameter a tensor of its shape that is a view into it."""

    whole: Residual
    views: list[torch.Tensor]


class FlatVector:
    """Parameters of one residual dtype on one device, laid end to end, with their residual.

    A step forms acc in memory of its own (`accumulate`, `subtract`), and `commit` makes that the residual: until then
    the step can be given up by doing nothing.

    Attributes:
        params: in the order of the vector.
        algorithm: which sums these vectors over the ranks, with its thresholds and boundaries.
    """

    def __init__(self, params: list[torch.Tensor], dtype: Any, algorithm: Algorithm) -> None:
        self.params = params
        self.algorithm = algorithm
        self.offsets = [0, *itertools.accumulate(p.numel() for p in params)]
        self.device = device_of(params[0])
        with self.device.stream_context():
            self._residual, self._acc = self._memory(dtype), self._memory(dtype)

    def _memory(self, dtype: Any) -> Memory:
        whole = Residual(self.offsets[-1], dtype, self.device.zeros(0, dtype))
        flat = self.device.tensor(whole.array)
        edges = zip(self.params, self.offsets[:-1], self.offsets[1:], strict=True)
        return Memory(whole, [flat[a:b].view(p.shape) for p, a, b in edges])

    @property
    def residuals(self) -> dict[torch.Tensor, torch.Tensor]:
        """Parameter -> its residual."""
        return dict(zip(self.params, self._residual.views, strict=True))

    @property
    def acc(self) -> DenseVector:
        """What `accumulate` has formed."""
        return self._acc.whole.vector

    def accumulate(self, weights: Mapping[torch.Tensor, tuple[float, float]]) -> None:
        """acc = a * residual + b * gradient, with (a, b) for each parameter; one pass over memory where a is 1.

        Raises:
            ValueError: a gradient has another shape than its parameter had when this was made.
        """
        for p, residual, acc in zip(self.params, self._residual.views, self._acc.views, strict=True):
            gradient, (a, b) = p.grad, weights[p]
            if gradient is not None and gradient.shape != acc.shape:
                raise ValueError(f"gradient: expected shape {tuple(acc.shape)}, got {tuple(gradient.shape)}")
            if gradient is not None and a == 1 and not gradient.is_sparse:
                torch.add(residual, gradient, alpha=b, out=acc)
                continue
            torch.mul(residual, a, out=acc)
            if gradient is not None:
                acc.add_(gradient.to(acc.dtype) if gradient.is_sparse else gradient, alpha=b)

    def not_finite(self) -> torch.Tensor | None:
        """The first parameter whose part of acc holds NaN or infinity."""
        for p, acc in zip(self.params, self._acc.views, strict=True):
            if not torch.isfinite(acc).all():
                return p
        return None

    def subtract(self, contributed: SparseVector | DenseVector) -> None:
        """acc -= contributed."""
        if contributed is self.acc:  # all of it
            self._acc.whole.array.fill(0)
        else:
            self._acc.whole.update(contributed)

    def commit(self) -> None:
        """What is left of acc is the residual; the old residual's memory is free for the next acc."""
        self._residual, self._acc = self._acc, self._residual

    def updates(self, value: SparseVector | DenseVector) -> Iterator[tuple[torch.Tensor, Update]]:
        """(parameter, its part of a reduced vector)."""
        if isinstance(value, DenseVector):
            flat = self.device.tensor(value.values)
            for p, a, b in zip(self.params, self.offsets[:-1], self.offsets[1:], strict=True):
                yield p, Update(None, flat[a:b])
            return
        places = value.searchsorted(self.offsets)
        for p, offset, a, b in zip(self.params, self.offsets, places[:-1], places[1:], strict=False):
            inside = value.indices[a:b].astype(np.int64) - offset
            yield p, Update(self.device.tensor(inside), self.device.tensor(value.values[a:b]))


class Update:
    """Values to add to a tensor: at flat positions `index`, or everywhere if `index` is None."""

    def __init__(self, index: torch.Tensor | None, values: torch.Tensor) -> None:
        self.index = index
        self.values = values

    def __bool__(self) -> bool:
        """Whether a value is not zero."""
        return bool(self.values.any())

    def add_to(self, tensor: torch.Tensor, factor: float) -> None:
        """tensor += factor * update, in place, in the tensor's dtype, whatever its memory format."""
        if self.index is None:
            tensor.add_(self.values.view(tensor.shape), alpha=factor)
        elif tensor.is_contiguous():
            tensor.view(-1).index_add_(0, self.index, self.values.to(tensor.dtype), alpha=factor)
        elif self.index.numel():
            places = torch.unravel_index(self.index, tensor.shape)
            tensor.index_put_(places, (self.values * factor).to(tensor.dtype), accumulate=True)
