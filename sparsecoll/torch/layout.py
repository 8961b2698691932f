"""Buckets: parameters fused into flat vectors of a chosen size, in the order in which their gradients come."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sparsecoll.residual import Residual
from sparsecoll.torch.device import HOST, Array, Host, device_of


def residual_dtype(dtype: torch.dtype) -> Any:
    """float64 for float64 parameters, else float32 (float16 and bfloat16 gradients accumulate in float32)."""
    if not dtype.is_floating_point:
        raise TypeError(f"params: expected floating-point tensors, got {dtype}")
    return np.dtype(np.float64 if dtype == torch.float64 else np.float32)


@dataclass(frozen=True)
class Layout:
    """What a compressor knows of its bucket; the same on every rank.

    Attributes:
        index: of the bucket.
        lengths: of all buckets.
        names, shapes: of the parameters in it, in order.
        dtype: of the flat vector, float32 or float64.
        device: where it is.
    """

    index: int
    lengths: tuple[int, ...]
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: np.dtype[Any]
    device: Host = HOST

    @property
    def length(self) -> int:
        """Values in the bucket."""
        return self.lengths[self.index]

    @property
    def offsets(self) -> list[int]:
        """Where each parameter begins, and the end."""
        return [0, *itertools.accumulate(int(np.prod(shape)) for shape in self.shapes)]

    def zeros(self) -> Array:
        """A flat vector of zeros."""
        return self.device.zeros(self.length, self.dtype)

    def residual(self) -> Residual:
        """Error feedback for it."""
        return Residual(self.length, self.dtype, self.device.zeros(0, self.dtype))

    def views(self, flat: Array) -> list[torch.Tensor]:
        """The parameters' parts of a flat vector, in their shapes; they share its memory."""
        whole, edges = self.device.tensor(flat), self.offsets
        return [whole[a:b].view(shape) for a, b, shape in zip(edges[:-1], edges[1:], self.shapes, strict=True)]

    def by_name(self, flat: Array) -> dict[str, torch.Tensor]:
        """`views` by name."""
        return dict(zip(self.names, self.views(flat), strict=True))


class Bucket:
    """Some parameters and the flat vector of their gradients.

    Attributes:
        params: name -> parameter.
        flat: their gradients, end to end, in `layout.dtype`.
        small: whether these are the parameters that are too small to be compressed.
    """

    def __init__(self, params: dict[str, torch.Tensor], layout: Layout, small: bool) -> None:
        self.params = params
        self.layout = layout
        self.small = small
        self.flat: Array = layout.zeros()
        self.views = layout.by_name(self.flat)

    @torch.no_grad()
    def take(self, name: str) -> None:
        """Bring a parameter's gradient into the flat vector: zeros if it has none."""
        gradient, view = self.params[name].grad, self.views[name]
        if gradient is None:
            view.zero_()
        elif gradient.is_sparse:
            view.copy_(gradient.to_dense())
        elif gradient.data_ptr() != view.data_ptr() or gradient.dtype != view.dtype:
            view.copy_(gradient)

    @torch.no_grad()
    def give(self, name: str) -> None:
        """Let the flat vector's values be the parameter's gradient, in its own dtype, sparse if it was."""
        p, view = self.params[name], self.views[name]
        if p.grad is not None and p.grad.is_sparse:
            rows = view.flatten(1).any(1).nonzero().view(1, -1)
            values = view[rows[0]].to(p.dtype)
            p.grad = torch.sparse_coo_tensor(rows, values, view.shape, is_coalesced=True, check_invariants=False)
        elif p.dtype == view.dtype:
            p.grad = view
        elif p.grad is not None:
            p.grad.copy_(view)
        else:
            p.grad = view.to(p.dtype)


def fuse(
    params: dict[str, torch.Tensor], order: Sequence[str], bucket_bytes: int | None, dense_below: int
) -> list[Bucket]:
    """Buckets of up to `bucket_bytes` (None: no limit) in the order given, one flat dtype and device each.

    A parameter larger than that has a bucket of its own. Parameters of fewer than `dense_below` values come last, in
    buckets of their own.
    """
    groups: list[tuple[bool, Any, Host, list[str]]] = []
    sizes: dict[tuple[bool, Any, Host], int] = {}
    open_: dict[tuple[bool, Any, Host], list[str]] = {}
    for small in (False, True):
        for name in order:
            p = params[name]
            if (p.numel() < dense_below) != small:
                continue
            key = (small, residual_dtype(p.dtype), device_of(p))
            size = p.numel() * key[1].itemsize
            if key not in open_ or (bucket_bytes is not None and sizes[key] + size > bucket_bytes):
                open_[key] = []
                sizes[key] = 0
                groups.append((*key, open_[key]))
            open_[key].append(name)
            sizes[key] += size
    lengths = tuple(sum(params[name].numel() for name in names) for *_, names in groups)
    buckets = []
    for index, (small, dtype, device, names) in enumerate(groups):
        shapes = tuple(tuple(params[name].shape) for name in names)
        layout = Layout(index, lengths, tuple(names), shapes, dtype, device)
        buckets.append(Bucket({name: params[name] for name in names}, layout, small))
    return buckets
