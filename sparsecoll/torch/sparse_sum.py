"""SparseSGD's compressor, which returns the sum over the ranks as a sparse vector, and updates by parts of this sum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sparsecoll.algorithms import resolve
from sparsecoll.select import Vector
from sparsecoll.torch.compressors import TopK
from sparsecoll.torch.device import CPU, Array
from sparsecoll.torch.layout import Layout, rows_like
from sparsecoll.transport import Transport
from sparsecoll.vector import DenseVector, RowSparse


@dataclass
class SparseSum(TopK):
    """TopK that returns the sum as it is, sparse, instead of writing a dense mean.

    Args:
        k: entries to select instead of `density`.
    """

    name = "SparseSGD"

    k: int | None = None

    def describe(self) -> str:
        return f"{self.name}({resolve(self.algo).describe()})"

    def count(self) -> int:
        return super().count() if self.k is None else self.k

    @property
    def compared(self) -> dict[str, Any]:
        return super().compared if self.k is None else {}

    def compress(self, acc: Vector) -> Vector:
        if self._algorithm.selector is not None:  # which may pass NaN by
            self.check_finite(acc)
        return super().compress(acc)

    def allreduce_sum(self, transport: Transport, acc: Array) -> Vector:
        """Sum acc over the ranks; what remains of acc becomes the trial residual. Called within a CollectiveCall.

        Raises:
            NonFiniteError: acc holds NaN or infinity on some rank; on every rank.
        """
        self.sync(transport)
        self.begin(acc)
        reduction = self.communicate(transport, self.message(self.acc))
        self.contributed(reduction.contributed)
        return reduction.value


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
            positions = torch.unravel_index(self.index, tensor.shape)
            tensor.index_put_(positions, (self.values * factor).to(tensor.dtype), accumulate=True)

    def step(self, p: torch.Tensor, states: Any, group: dict[str, Any], ranks: int) -> None:
        """Take torch.optim.SGD's step on the mean gradient, of which this is the sum over the ranks.

        Args:
            states: the state of an optimizer, by parameter.
            group: options of the parameter; without momentum the update is in units of its learning rate.
        """
        lr, momentum, decay = float(group["lr"]), float(group["momentum"]), float(group["weight_decay"])
        share = (-1 if group["maximize"] else 1) / ranks
        if momentum == 0:  # the update is in units of the learning rate
            if decay:
                p.mul_(1 - lr * decay)
            self.add_to(p, -share)
            return
        state = states[p]
        buffer, damp = state.get("momentum_buffer"), 1 - float(group["dampening"])
        if buffer is None:
            buffer, damp = torch.zeros_like(p), 1.0
            state["momentum_buffer"] = buffer
        buffer.mul_(momentum)
        self.add_to(buffer, damp * share)
        if decay:
            buffer.add_(p, alpha=damp * decay)
        if not group["nesterov"]:
            p.sub_(buffer, alpha=lr)
            return
        if decay:
            p.mul_(1 - lr * decay)
        self.add_to(p, -lr * share)
        p.sub_(buffer, alpha=lr * momentum)


class RowUpdate(Update):
    """Rows of values to add to a tensor."""

    def add_to(self, tensor: torch.Tensor, factor: float) -> None:
        values = self.values.to(tensor.dtype).view(-1, *tensor.shape[1:])
        tensor.index_add_(0, self.index, values, alpha=factor)  # type: ignore[arg-type]

    def step(self, p: torch.Tensor, states: Any, group: dict[str, Any], ranks: int) -> None:
        momentum, state = float(group["momentum"]), states[p] if group["momentum"] else {}
        buffer = state.get("momentum_buffer")
        if momentum == 0 or group["weight_decay"] or not (buffer is None or buffer.is_sparse):
            if buffer is not None and buffer.is_sparse:
                state["momentum_buffer"] = buffer.to_dense()
            super().step(p, states, group, ranks)
            return
        share, damp = (-1 if group["maximize"] else 1) / ranks, 1 - float(group["dampening"])
        assert self.index is not None
        new = rows_like(p, self.index, self.values * share)
        buffer = state["momentum_buffer"] = new if buffer is None else buffer.mul_(momentum).add_(new, alpha=damp)
        lr = float(group["lr"])
        if group["nesterov"]:
            p.add_(new, alpha=-lr)
        p.add_(buffer, alpha=-lr * (momentum if group["nesterov"] else 1.0))


def updates(layout: Layout, value: Vector | RowSparse) -> Iterator[tuple[str, Update]]:
    """Yield the name and the part of a sum for each parameter of a bucket."""
    device, edges = layout.device, layout.offsets
    if isinstance(value, RowSparse):
        rows, values = CPU.tensor(value.rows), CPU.tensor(value.values)
        yield layout.names[0], RowUpdate(device.to(rows), device.to(values))
        return
    if isinstance(value, DenseVector):
        flat = device.tensor(value.values)
        for name, a, b in zip(layout.names, edges[:-1], edges[1:], strict=True):
            yield name, Update(None, flat[a:b])
        return
    bounds = value.searchsorted(edges)
    for name, offset, a, b in zip(layout.names, edges, bounds[:-1], bounds[1:], strict=False):
        inside = value.indices[a:b].astype(np.int64) - offset
        yield name, Update(device.tensor(inside), device.tensor(value.values[a:b]))
