"""Flat vectors of parameters, on a device: all that the adapter knows of CUDA is here, and the layout of buckets."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from bisect import bisect_right
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparsecoll.kernels.memory import empty, from_dlpack

Array = NDArray[Any]  # or CuPy's


class CpuDevice:
    """CPU tensors, and NumPy arrays over their memory. There are no streams: work is done when it is called."""

    def array(self, tensor: torch.Tensor) -> Array:
        """An array over the memory of a contiguous tensor."""
        return tensor.detach().numpy()

    def tensor(self, array: Array) -> torch.Tensor:
        """A tensor over the memory of an array."""
        return torch.from_numpy(array)

    def zeros_tensor(self, size: int, dtype: Any) -> torch.Tensor:
        """A 1-D tensor of `size` zeros; `dtype` is a NumPy dtype."""
        return torch.zeros(size, dtype=torch.from_numpy(np.empty(0, dtype)).dtype, device="cpu")

    def zeros(self, size: int, dtype: Any) -> Array:
        """A 1-D array of `size` zeros."""
        return self.array(self.zeros_tensor(size, dtype))

    def empty(self, size: int, dtype: Any) -> Array:
        """A 1-D array of `size` items whose values are not set."""
        return empty(size, dtype)

    def to(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a CPU tensor to this device; on the CPU the tensor itself."""
        return tensor

    def stream_context(self, event: Any = None) -> contextlib.AbstractContextManager[Any]:
        """Context manager that chooses the stream of the work inside.

        Args:
            event: of `record_event`: the work runs on the compression stream once the event has occurred, concurrently
                with what the caller launches meanwhile. None: it runs on the caller's current stream.
        """
        return contextlib.nullcontext()

    def record_event(self) -> Any:
        """An event that occurs when all work launched so far on the caller's current stream is done."""
        return None

    def wait_stream(self) -> None:
        """Make the caller's current stream wait for the compression stream."""

    def synchronize(self) -> None:
        """Block until all work on the caller's current stream is done."""


class CudaDevice(CpuDevice):
    """Tensors of one CUDA device, and CuPy arrays over their memory. Compression has a stream of its own."""

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        self._stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self.array(torch.zeros(0, device=self._device))  # raises now where CuPy is missing

    def array(self, tensor: torch.Tensor) -> Array:
        return from_dlpack(tensor.detach())  # type: ignore[no-any-return]

    def tensor(self, array: Array) -> torch.Tensor:
        return torch.from_dlpack(array)  # type: ignore[no-any-return, attr-defined]

    def zeros_tensor(self, size: int, dtype: Any) -> torch.Tensor:
        return super().zeros_tensor(size, dtype).to(self._device)

    def empty(self, size: int, dtype: Any) -> Array:
        return self.array(torch.empty(size, dtype=super().zeros_tensor(0, dtype).dtype, device=self._device))

    def to(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device)

    @contextlib.contextmanager
    def stream_context(self, event: Any = None) -> Iterator[None]:
        from sparsecoll.kernels.gpu import device

        with contextlib.ExitStack() as stack:
            if event is not None:
                self._stream.wait_event(event)
                stack.enter_context(torch.cuda.stream(self._stream))
            stack.enter_context(device.using(self._device.index, torch.cuda.current_stream(self._device).cuda_stream))
            yield

    def record_event(self) -> Any:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait_stream(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def synchronize(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()


CPU = CpuDevice()
_cuda = functools.cache(CudaDevice)


def device_of(tensor: torch.Tensor) -> CpuDevice:
    """The device that holds a tensor.

    Raises:
        TypeError: the tensor is neither on the CPU nor on a CUDA device, or it is on one and CuPy is missing.
    """
    if tensor.device.type == "cpu":
        return CPU
    if tensor.device.type == "cuda":
        return _cuda(tensor.device.index)
    raise TypeError(f"params: expected tensors on the CPU or a CUDA device, got one on {tensor.device}")


def residual_dtype(dtype: torch.dtype) -> Any:
    """Return the dtype in which gradients of a parameter accumulate.

    Args:
        dtype: of the parameter.

    Returns:
        float64 for float64, else float32 (also for float16 and bfloat16).
    """
    if not dtype.is_floating_point:
        cure = ": keep real numbers, and use torch.view_as_complex(p) in forward()" if dtype.is_complex else ""
        raise TypeError(f"params: expected floating-point tensors, got {dtype}{cure}")
    return np.dtype(np.float64 if dtype == torch.float64 else np.float32)


def takes_part(p: torch.Tensor) -> bool:
    """Return whether a parameter requires a gradient, or has one that moves it while frozen (of shards, any)."""
    return p.requires_grad or ((g := p.grad) is not None and (g.is_sparse or hasattr(g, "to_local") or bool(g.any())))


def has_rows(gradient: torch.Tensor | None) -> bool:
    """Return whether a gradient is a sparse tensor of whole rows, as torch.nn.Embedding(sparse=True) makes it."""
    return gradient is not None and gradient.is_sparse and gradient.sparse_dim() == 1 and gradient.numel() > 0


def all_zero(gradient: torch.Tensor) -> bool:
    """Return whether a gradient is zero everywhere, as DDP passes those of parameters that were not used."""
    values = gradient.view(-1)
    return not values[:1024].any() and not values.any()  # one that was used is rarely read to the end


def in_memory_order(
    tensors: Mapping[str, Mapping[str, torch.Tensor]], params: Mapping[str, torch.Tensor], back: bool
) -> dict[str, dict[str, torch.Tensor]]:
    """Return tensors by kind and parameter name with their values in the order of the parameter's memory.

    DDP's buckets have this order, except for parameters with gaps in their memory. Others stay as they are.

    Args:
        back: undo it.
    """
    return {
        kind: {name: _in_memory_order(t, params.get(name), back) for name, t in entries.items()}
        for kind, entries in tensors.items()
    }


def _in_memory_order(t: torch.Tensor, p: torch.Tensor | None, back: bool) -> torch.Tensor:
    if p is None or p.is_contiguous() or p.stride() != torch.empty_like(p, device="meta").stride():
        return t
    if t.is_sparse or t.shape != p.shape:
        return t
    usual = torch.empty(p.shape, device="meta").stride()
    before, after = (usual, p.stride()) if back else (p.stride(), usual)
    return torch.empty_strided(p.shape, before, dtype=t.dtype, device=t.device).copy_(t).as_strided(p.shape, after)


def rows_like(p: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return a coalesced sparse tensor of the shape and dtype of a parameter.

    Args:
        rows: ascending, unique.
        values: of these rows, in the shape (len(rows), d).
    """
    values = values.reshape(-1, *p.shape[1:]).to(p.device, p.dtype)
    if not rows.numel():  # torch resizes what it adds rows to if there are none, which NumPy's memory does not allow
        rows, values = rows.clone(), values.clone()
    return torch.sparse_coo_tensor(
        rows.view(1, -1).to(p.device), values, p.shape, device=p.device, is_coalesced=True, check_invariants=False
    )


@dataclass(frozen=True)
class Layout:
    """The parameters of one bucket and their offsets in its flat vector; the same on every rank.

    Attributes:
        index: of the bucket.
        lengths: of all buckets.
        names, shapes: of the parameters in the bucket, in order.
        dtype: of the flat vector, float32 or float64.
        device: that holds it.
        small: whether these parameters are too small to be compressed.
        rows: whether gradients are rows of the only parameter; the length is then 0.
    """

    index: int
    lengths: tuple[int, ...]
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: np.dtype[Any]
    device: CpuDevice = CPU
    small: bool = False
    rows: bool = False

    @property
    def length(self) -> int:
        """Values in the bucket."""
        return self.lengths[self.index]

    @functools.cached_property
    def offsets(self) -> list[int]:
        """The offset of each parameter, and the length."""
        return [0, *itertools.accumulate(math.prod(shape) for shape in self.shapes)]

    @functools.cached_property
    def positions(self) -> dict[str, int]:
        """The number of each parameter in the bucket."""
        return {name: i for i, name in enumerate(self.names)}

    def zeros(self) -> Array:
        """A flat vector of zeros."""
        return self.device.zeros(self.length, self.dtype)

    def empty(self) -> Array:
        """A flat vector whose values are not set, in memory that is used again when it is freed."""
        return self.device.empty(self.length, self.dtype)

    def name_at(self, index: int) -> str:
        """Return the name of the parameter at an index of the flat vector."""
        return self.names[bisect_right(self.offsets, index) - 1]

    def by_name(self, flat: Array) -> dict[str, torch.Tensor]:
        """Return the parts of a flat vector that belong to the parameters, as views in their shapes."""
        return self.split(self.device.tensor(flat))

    def split(self, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return views of a flat tensor in the shapes of the parameters, by name."""
        parts = torch.split(whole, [math.prod(shape) for shape in self.shapes])
        return {name: part.view(shape) for name, part, shape in zip(self.names, parts, self.shapes, strict=True)}

    def part(self, whole: torch.Tensor, name: str) -> torch.Tensor:
        """Return a view of a flat tensor in the shape of one parameter."""
        i = self.positions[name]
        return whole[self.offsets[i] : self.offsets[i + 1]].view(self.shapes[i])

    def of_shapes(self, shapes: Sequence[tuple[int, ...]]) -> Layout:
        """Return the layout of arrays of other shapes, in this dtype and on this device."""
        length = sum(math.prod(shape) for shape in shapes)
        names = tuple(map(str, range(len(shapes))))
        return replace(self, index=0, lengths=(length,), names=names, shapes=tuple(shapes))

    def join(self, parts: Sequence[torch.Tensor]) -> Array:
        """Return a new flat vector of arrays that have these shapes."""
        whole = self.zeros()
        for view, part in zip(self.by_name(whole).values(), parts, strict=True):
            view.copy_(part)
        return whole

    def slices(self, names: Collection[str]) -> list[slice]:
        """Return the slices of the named parameters that are in the bucket."""
        return [slice(self.offsets[i], self.offsets[i + 1]) for i, name in enumerate(self.names) if name in names]


def cut(
    params: dict[str, torch.Tensor],
    order: Sequence[str],
    bucket_bytes: int | None = None,
    small: Container[str] = (),
    rows: Container[str] = (),
    parts: Mapping[str, Any] = MappingProxyType({}),
) -> list[Layout]:
    """Lay parameters out in buckets, each of one dtype on one device; buckets are in the order in which they fill.

    A parameter that does not fit into the open bucket closes it and opens the next one.

    Args:
        params: by name.
        order: names of the parameters that are to be laid out, in this order.
        bucket_bytes: most bytes of gradient in a bucket of several parameters; None: no limit.
        small: parameters that come last, in buckets of their own (`Layout.small`).
        rows: parameters whose gradients are rows; each is in a bucket of its own.
        parts: by name; parameters of different parts are in different buckets.
    """
    last = {name: (name in small, i) for i, name in enumerate(order)}
    groups: list[list[str]] = []
    open_: dict[tuple[Any, ...], list[str]] = {}
    sizes: dict[tuple[Any, ...], int] = {}
    for name in order:
        dtype, device = residual_dtype(params[name].dtype), device_of(params[name])
        key = (last[name][0], dtype, device, parts.get(name))
        size = params[name].numel() * dtype.itemsize
        full = bucket_bytes is not None and key in open_ and sizes[key] + size > bucket_bytes
        if name in rows:
            groups.append([name])
            continue
        if full or key not in open_:
            open_[key], sizes[key] = [], 0
            groups.append(open_[key])
        open_[key].append(name)
        sizes[key] += size
    groups.sort(key=lambda names: last[names[-1]])
    lengths = tuple(sum(params[name].numel() for name in names if name not in rows) for names in groups)
    made = []
    for index, names in enumerate(groups):
        first, shapes = params[names[0]], tuple(tuple(params[n].shape) for n in names)
        own = residual_dtype(first.dtype), device_of(first), last[names[0]][0], names[0] in rows
        made.append(Layout(index, lengths, tuple(names), shapes, *own))
    return made
