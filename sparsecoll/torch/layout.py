"""Buckets: parameters fused into flat vectors of a chosen size, in the order in which their gradients come."""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sparsecoll.torch.device import CPU, Array, CpuDevice, device_of


def residual_dtype(dtype: torch.dtype) -> Any:
    """float64 for float64 parameters, else float32 (float16 and bfloat16 gradients accumulate in float32)."""
    if not dtype.is_floating_point:
        raise TypeError(f"params: expected floating-point tensors, got {dtype}")
    return np.dtype(np.float64 if dtype == torch.float64 else np.float32)


def takes_part(p: torch.Tensor) -> bool:
    """Whether a parameter wants a gradient, or has one still: optimizers step on that of a frozen parameter, too."""
    return p.requires_grad or p.grad is not None


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
    device: CpuDevice = CPU

    @property
    def length(self) -> int:
        """Values in the bucket."""
        return self.lengths[self.index]

    @functools.cached_property
    def offsets(self) -> list[int]:
        """Where each parameter begins, and the end."""
        return [0, *itertools.accumulate(int(np.prod(shape)) for shape in self.shapes)]

    @functools.cached_property
    def positions(self) -> dict[str, int]:
        """The number of each parameter in the bucket."""
        return {name: i for i, name in enumerate(self.names)}

    def zeros(self) -> Array:
        """A flat vector of zeros."""
        return self.device.zeros(self.length, self.dtype)

    def name_at(self, index: int) -> str:
        """The parameter that a coordinate of the bucket belongs to."""
        return self.names[bisect_right(self.offsets, index) - 1]

    def views(self, flat: Array) -> list[torch.Tensor]:
        """The parameters' parts of a flat vector, in their shapes; they share its memory."""
        return list(self.by_name(flat).values())

    def by_name(self, flat: Array) -> dict[str, torch.Tensor]:
        """`views` by name."""
        return self.split(self.device.tensor(flat))

    def split(self, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parameters' parts of a flat tensor, in their shapes, by name."""
        edges = self.offsets
        parts = zip(self.names, edges[:-1], edges[1:], self.shapes, strict=True)
        return {name: whole[a:b].view(shape) for name, a, b, shape in parts}

    def part(self, whole: torch.Tensor, name: str) -> torch.Tensor:
        """One parameter's part of a flat tensor."""
        i, edges = self.positions[name], self.offsets
        return whole[edges[i] : edges[i + 1]].view(self.shapes[i])


class Buffer:
    """A flat vector, as an array and as a tensor over the same memory."""

    def __init__(self, array: Array, layout: Layout) -> None:
        self.array = array
        self.tensor = layout.device.tensor(array)
        self.views = layout.split(self.tensor)
        self._users = self._count()

    def _count(self) -> int:
        return int(torch._C._storage_Use_Count(self.tensor.untyped_storage()._cdata))  # type: ignore[attr-defined]

    @property
    def lent(self) -> bool:
        """Whether tensors that were given away (gradients) still use this memory."""
        return self._count() > self._users


class Bucket:
    """Some parameters and the memory for their gradients and means.

    Memory goes in circles: a gradient is copied into a buffer, a compressor with error feedback makes that buffer its
    residual and gives the old residual's memory back once the step is taken. Means become gradients without a copy, so
    their buffer is free again when nobody holds those tensors any more.

    Attributes:
        params: name -> parameter.
        gradient: this rank's gradients, end to end, in `layout.dtype`.
        mean: the means, after the reduction.
        small: whether these are the parameters that are too small to be compressed.
    """

    def __init__(self, params: dict[str, torch.Tensor], layout: Layout, small: bool) -> None:
        self.params = params
        self.layout = layout
        self.small = small
        self._known: dict[int, Buffer] = {}
        self._free: list[Buffer] = []
        self.gradient: Buffer | None = None
        self.mean: Buffer | None = None

    def _buffer(self) -> Buffer:
        """Memory that nobody uses."""
        for position, buffer in enumerate(self._free):
            if not buffer.lent:
                return self._free.pop(position)
        return self._wrapped(self.layout.zeros())

    def _wrapped(self, array: Array) -> Buffer:
        buffer = self._known.get(id(array))
        if buffer is None:
            buffer = self._known[id(array)] = Buffer(array, self.layout)
        return buffer

    def recycle(self, arrays: Iterable[Array]) -> None:
        """Take back memory that a compressor does not need any more."""
        self._free += [self._wrapped(array) for array in arrays]

    def whole(self) -> Buffer:
        """The gradient buffer."""
        if self.gradient is None:
            self.gradient = self._buffer()
        return self.gradient

    @torch.no_grad()
    def take(self, name: str, scale: float = 1.0) -> None:
        """Copy a parameter's gradient, divided by `scale`, into the gradient buffer: zeros if it has none."""
        gradient, view = self.params[name].grad, self.whole().views[name]
        if gradient is None:
            view.zero_()
            return
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if scale == 1.0:
            view.copy_(gradient)
        else:
            torch.mul(gradient.to(view.dtype), 1 / scale, out=view)

    def means(self, keeps_gradient: bool) -> Array:
        """Memory for the means: the gradient's own unless a compressor keeps that."""
        assert self.gradient is not None
        self.mean = self._buffer() if keeps_gradient else self.gradient
        return self.mean.array

    def finish(self, keeps_gradient: bool) -> None:
        """The reduction is accepted: the gradient buffer is the compressor's now, or the means' own."""
        assert self.mean is not None
        self.gradient = None
        self._free.append(self.mean)  # free again when the gradients made of it are

    def reset(self) -> None:
        """The reduction is dropped: its buffers are free."""
        held = {id(buffer): buffer for buffer in (self.gradient, self.mean) if buffer is not None}
        self._free += [buffer for buffer in held.values() if buffer not in self._free]
        self.gradient = self.mean = None

    @torch.no_grad()
    def give(self, name: str, sparse: bool = False, scale: float = 1.0) -> None:
        """Let the mean, times `scale`, be the parameter's gradient, in its own dtype and memory format."""
        assert self.mean is not None
        p = self.params[name]
        view = self.layout.part(self.mean.tensor, name)
        if scale != 1.0:
            view.mul_(scale)
        if sparse:
            rows = view.flatten(1).any(1).nonzero().view(1, -1)
            values = view[rows[0]].to(p.dtype)
            p.grad = torch.sparse_coo_tensor(rows, values, view.shape, is_coalesced=True, check_invariants=False)
        elif p.dtype == view.dtype and p.is_contiguous():
            p.grad = view.data  # with a count of changes of its own, which views share
        else:
            old = p.grad
            fits = old is not None and not old.is_sparse and old.stride() == p.stride()
            p.grad = (old if fits else torch.empty_like(p, requires_grad=False)).copy_(view)  # type: ignore[union-attr]


def fuse(
    params: dict[str, torch.Tensor], order: Sequence[str], bucket_bytes: int | None, dense_below: int
) -> list[Bucket]:
    """Buckets of up to `bucket_bytes` (None: no limit) in the order given, one flat dtype and device each.

    A parameter larger than that has a bucket of its own. Parameters of fewer than `dense_below` values come last, in
    buckets of their own.
    """
    groups: list[tuple[bool, Any, CpuDevice, list[str]]] = []
    sizes: dict[tuple[bool, Any, CpuDevice], int] = {}
    open_: dict[tuple[bool, Any, CpuDevice], list[str]] = {}
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
