"""The memory of a bucket: its gradients and their means as flat vectors."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparsecoll.telemetry.trace import span
from sparsecoll.torch.compressors import Compressor
from sparsecoll.torch.compressors.versions import Versions
from sparsecoll.torch.tensors.layout import CPU, Array, Layout, all_zero
from sparsecoll.torch.tensors.model import is_finite
from sparsecoll.transport import Transport
from sparsecoll.transport.all_ranks import disseminate

# by parameter: its new gradient, and memory and offset of the old one, where others may have this memory
NewGrads = dict[str, tuple[torch.Tensor, tuple[Callable[[], Any], Any] | None]]


class Buffer:
    """A flat vector, as an array and as a tensor over the same memory.

    The tensor is made when it is first read: in a hook on a gradient, an operation of torch takes tens of microseconds.
    """

    def __init__(self, array: Array, layout: Layout) -> None:
        self.array, self._layout = array, layout

    @functools.cached_property
    def tensor(self) -> torch.Tensor:
        """The vector as a tensor."""
        return self._layout.device.tensor(self.array)


class Bucket:
    """Some parameters and the memory for their gradients and means.

    A gradient is copied into a buffer, which a compressor with error feedback makes its residual; the memory of the old
    residual is used again once the step is taken. Means become gradients without a copy. A gradient is not copied if it
    is the only one of its bucket, or in the flat vector already, as with `as_view`: it is the source, which is not
    written to, so that a reduction that fails has changed no gradient.

    Args:
        params: name -> parameter; those of the layout are taken.
        versions: the state of the compressor.
        as_view: whether gradients become views of the source.

    Attributes:
        gradient: this rank's gradients, in `layout.dtype`, or memory if there is a source; None outside of a reduction.
        source: this rank's gradients where they are not in `gradient`, or None.
        mean: the means, after a reduction until they are gradients.
    """

    def __init__(
        self, params: Mapping[str, torch.Tensor], layout: Layout, versions: Versions, as_view: bool = False
    ) -> None:
        self.params = {name: params[name] for name in layout.names}
        self.layout, self.versions = layout, versions
        self.gradient: Buffer | None = None
        self.source: Buffer | None = None
        self.mean: Buffer | None = None
        self._reduced: tuple[Compressor, Any, Any] | None = None  # of which the mean is still to be formed
        self._values: Buffer | None = None  # the parameters, once they are parts of one vector
        self._as_view, self._dtype = as_view, layout.device.zeros_tensor(0, layout.dtype).dtype

    def gradient_buffer(self) -> Buffer:
        """Return the buffer for the gradients of this reduction; the first call reserves it."""
        if self.gradient is None:
            self.mean = None
            self.gradient = Buffer(self.layout.empty(), self.layout)
        return self.gradient

    def take_grad(self, name: str, scale: float = 1.0) -> None:
        """Take a parameter's gradient, divided by `scale`: zeros if it has none."""
        p, whole = self.params[name], self.gradient_buffer()
        flat = scale == 1.0 and self._is_flat(p)
        if flat and len(self.params) == 1 and p.shape == self.layout.shapes[0]:
            self.source = Buffer(p.grad.numpy().reshape(-1), self.layout)  # type: ignore[union-attr]
            return
        self._check(name, p)
        if self.source is None and self._as_view and scale == 1.0 and self.layout.device is CPU:
            self.source = (self._around(p) if flat else None) or Buffer(self.layout.empty(), self.layout)
        view = self.layout.part((self.source or whole).tensor, name)
        if flat and p.grad.data_ptr() == view.data_ptr():  # type: ignore[union-attr]
            return
        with span("dense", view.numel()), torch.no_grad():
            self._copy_in(view, p.grad, scale)
        if flat and self.source is not None:
            p.grad.data = view  # type: ignore[union-attr]  # the same tensor: another one would count as a new gradient

    @torch.no_grad()
    def take_changes(self, now: Mapping[str, torch.Tensor], names: Collection[str]) -> None:
        """Take the named parameters - their values of `now`, and zeros for the others."""
        for name, view in self.layout.split(self.gradient_buffer().tensor).items():
            self._check(name, now[name])
            if name not in names:
                view.zero_()
                continue
            shared, own = self.params[name], now[name].to(view.device)
            if shared.dtype == own.dtype == view.dtype:
                torch.sub(shared, own, out=view)
            else:
                view.copy_(shared).sub_(own)

    def _is_flat(self, p: torch.Tensor) -> bool:
        """Whether a parameter's gradient could be a part of the flat vector as it is; devices other than CPUs copy."""
        gradient = p.grad
        return (
            gradient is not None
            and self.layout.device is CPU
            and gradient.dtype == p.dtype == self._dtype
            and not (gradient.is_sparse or gradient.requires_grad or gradient.is_inference())
            and gradient.is_contiguous()
            and p.is_contiguous()
        )

    def _around(self, p: torch.Tensor) -> Buffer | None:
        """Return the flat vector of which a parameter's gradient is a part already; None: it is not."""
        gradient, layout = p.grad, self.layout
        assert gradient is not None
        fits = gradient.untyped_storage().nbytes() == layout.length * layout.dtype.itemsize
        memory = gradient.untyped_storage().data_ptr()
        some = {n: q.grad for n, q in self.params.items() if q.grad is not None and not q.grad.is_sparse}
        inside = {n: g.storage_offset() for n, g in some.items() if g.untyped_storage().data_ptr() == memory}
        if not fits or inside != dict(zip(layout.names, layout.offsets, strict=False)):
            return None  # or another gradient, also of another bucket, would be overwritten before it is taken
        return Buffer(gradient.detach().as_strided((layout.length,), (1,), 0).numpy(), layout)

    def _check(self, name: str, p: torch.Tensor) -> None:
        """Raise unless a parameter is as it was when the bucket was made."""
        shape, dtype = self.layout.shapes[self.layout.positions[name]], self._dtype
        if p.shape != shape or (p.dtype == torch.float64) != (dtype == torch.float64):
            raise ValueError(
                f"parameter {name!r}: expected shape {shape} and a dtype that is summed in {dtype}, as"
                f" when the optimizer was wrapped, got {tuple(p.shape)} and {p.dtype}: convert a model before you wrap"
                " its optimizer"
            )

    def _copy_in(self, view: torch.Tensor, gradient: torch.Tensor | None, scale: float) -> None:
        gradient = gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
        if gradient is None:
            view.zero_()
        elif scale == 1.0:
            view.copy_(gradient)
        else:
            torch.mul(gradient.to(view.dtype), 1 / scale, out=view)

    def accumulate(self, residual: Array | None, weights: Mapping[str, tuple[float, float]]) -> Array:
        """Write a * residual + b * gradient to the gradient buffer, with (a, b) by parameter name; return its array.

        Without a residual, write b * gradient.
        """
        out = self.gradient_buffer()
        views, kept = self.layout.split(out.tensor), {} if residual is None else self.layout.by_name(residual)
        for name, p in self.params.items():
            gradient, acc, old, (a, b) = p.grad, views[name], kept.get(name), weights[name]
            if gradient is not None and gradient.shape != acc.shape:
                raise ValueError(f"gradient: expected shape {tuple(acc.shape)}, got {tuple(gradient.shape)}")
            if old is None:
                self._copy_in(acc, gradient, 1 / b)
            elif gradient is not None and a == 1 and not gradient.is_sparse:
                torch.add(old, gradient, alpha=b, out=acc)
            else:
                torch.mul(old, a, out=acc)
                if gradient is not None:
                    acc.add_(gradient.to(acc.dtype) if gradient.is_sparse else gradient, alpha=b)
        return out.array

    def mean_buffer(self, keeps_gradient: bool) -> Array:
        """Return memory for the means: that of the gradients, unless the compressor keeps it."""
        self.mean = Buffer(self.layout.empty(), self.layout) if keeps_gradient else self.gradient
        assert self.mean is not None
        return self.mean.array

    def reduce(self, transport: Transport, compressor: Compressor) -> None:
        """Reduce the gradients to their mean. Collective."""
        assert self.gradient is not None
        source = None if self.source is None else self.source.array
        out = self.mean_buffer(compressor.keeps_gradient)
        compressor.allreduce_mean(transport, self.gradient.array, out, source)
        if not compressor.communicates:  # the means are this rank's gradients
            self.mean = self.gradient if self.source is None else self.source

    def nonzero(self, values: torch.Tensor, among: Collection[str] | None = None) -> NDArray[np.uint8]:
        """Return a bit for each parameter: whether it has other values than zeros, and is `among` the given ones."""
        views = self.layout.split(values).items()
        return np.packbits(np.array([(among is None or n in among) and not all_zero(t) for n, t in views], np.uint8))

    def leave_out(self, transport: Transport, nonzero: NDArray[np.uint8]) -> list[slice]:
        """Restore the state of parameters that are not `nonzero` on any rank; return their places. Collective."""
        names = self.layout.names
        used = np.unpackbits(disseminate(transport, nonzero, np.bitwise_or), count=len(names)).tolist()
        unused = {name for name, is_used in zip(names, used, strict=True) if not is_used}
        self.versions.exclude(unused)
        return self.layout.slices(unused)

    def message(self, compressor: Compressor, transport: Transport) -> tuple[Any, Array]:
        """Return this rank's message of the gradients, as `compress` returns it, and as bytes."""
        assert self.gradient is not None
        compressor.sync(transport)
        with compressor.shown(), span("select", self.layout.length):
            message = compressor.message(compressor.compensate(self.gradient.array))
            return message, compressor.encoded(message)

    def combine(self, compressor: Compressor, message: Any, blocks: Sequence[Array], *shares: Sequence[float]) -> None:
        """Take all ranks' messages in bytes; `message` is this rank's, or None if it is not among them."""
        self._reduced = compressor, message, compressor.combined(blocks, *shares)

    def form_mean(self) -> None:
        """Form the mean of the messages that `combine` has taken, if any."""
        if self._reduced is not None:
            (compressor, message, reduced), self._reduced = self._reduced, None
            with compressor.shown(), span("dense", self.layout.length):
                compressor.update(self.mean_buffer(compressor.keeps_gradient), message, reduced)

    def add_mean(self, scale: float) -> bool:
        """Add scale * the mean to the parameters without forming it; return False if that cannot be done.

        LocalOptimizer's mean of 20 M parameters by ChunkedTopK takes 0.77 to 0.85 of the time by it (P = 1 to 4).
        """
        if self._reduced is None or any(p.dtype != self._dtype for p in self.params.values()):
            return False
        if self._values is None:
            self._values = Buffer(self.layout.empty(), self.layout)
            for name, view in self.layout.split(self._values.tensor).items():
                self.params[name].data = view.copy_(self.params[name])
        (compressor, _, reduced), self._reduced = self._reduced, None
        if scale:
            compressor.add_mean(self._values.array, reduced, scale)
        return True

    def accept(self) -> None:
        """Accept the reduction: the gradient buffer now belongs to the compressor's state, or holds the means."""
        self.versions.accept()
        self.gradient = self.source = None

    def drop(self) -> None:
        """Drop the reduction."""
        self.layout.device.wait_stream()  # which may still write to memory that is free then
        self.versions.drop()
        self.gradient = self.source = self.mean = self._reduced = None

    def part_of_mean(self, name: str) -> torch.Tensor:
        """Return a view of a parameter's mean."""
        assert self.mean is not None
        return self.layout.part(self.mean.tensor, name)

    def has_mean(self, name: str) -> bool:
        """Return whether a parameter's mean has a value other than zero."""
        return bool(self.part_of_mean(name).any())

    def reduce_flat(
        self,
        transport: Transport,
        compressor: Compressor,
        values: torch.Tensor,
        out: torch.Tensor,
        before: float = 1.0,
        after: float = 1.0,
    ) -> None:
        """Write after * the mean over the ranks of before * `values` to `out`. Collective.

        Args:
            values: this rank's gradients in the order of the layout, perhaps in another dtype.
            out: memory for the mean, which may be that of `values`; shorter if the compressor scatters it.
        """
        whole, keeps, device = self.gradient_buffer(), compressor.keeps_gradient, self.layout.device
        if values.dtype != whole.tensor.dtype or not compressor.communicates:
            values = whole.tensor.copy_(values)  # which has the range for the factor
        source = None
        if before != 1.0:
            torch.mul(values, before, out=whole.tensor)
        elif values.data_ptr() != whole.tensor.data_ptr():
            source = device.array(values)
        size, in_place = out.numel(), keeps and out.dtype == whole.tensor.dtype
        room = device.empty(size, self.layout.dtype) if keeps and not in_place else whole.array[:size]
        mean = device.array(out) if in_place else room
        compressor.allreduce_mean(transport, whole.array, mean, source)
        reduced = out if in_place else device.tensor(mean)
        if after != 1.0:
            reduced.mul_(after)
        if not in_place:
            out.copy_(reduced)

    def mean_is_finite(self) -> bool:
        """Return whether no mean is NaN or infinite."""
        return self.mean is None or is_finite(self.mean.tensor)

    def nan(self, name: str) -> torch.Tensor:
        """Return a gradient of a parameter that is NaN."""
        return torch.full_like(self.params[name], float("nan"), requires_grad=False)

    @torch.no_grad()
    def new_grads(self, names: Collection[str], scale: float = 1.0) -> NewGrads:
        """Return scale * mean of these parameters for `assign_grads`: what takes memory, or may fail, is done here."""
        made: NewGrads = {}
        for name in names:
            p, view = self.params[name], self.part_of_mean(name)
            if scale != 1.0:
                view.mul_(scale)
            old, fits, place = p.grad, p.dtype == view.dtype and p.is_contiguous(), None
            if not _stays(p):
                view = view if fits else torch.empty_like(p, requires_grad=False).copy_(view)
            elif fits and old is not None and old.data_ptr() != view.data_ptr():
                place = weakref.ref(old.untyped_storage()), old.storage_offset()
            made[name] = view, place
        return made

    @torch.no_grad()
    def assign_grads(self, made: NewGrads) -> None:
        """Set the gradients of parameters to what `new_grads` has made; the same again does no harm.

        A tensor that is the gradient remains it, and gets the memory of the mean. If another tensor has its memory, as
        a flat one through which a loop clips, the mean is copied there, as by DDP.
        """
        for name, (new, place) in made.items():
            p = self.params[name]
            old = p.grad if _stays(p) else None
            if old is None:
                p.grad = new.data
            elif place is not None:
                old.data = new
            elif old.data_ptr() != new.data_ptr():
                old.copy_(new)
        self.mean = None
        for name, (new, place) in made.items():
            if place is not None and (storage := place[0]()) is not None:
                gradient: Any = self.params[name].grad
                gradient.set_(storage, place[1], new.shape, new.stride()).copy_(new)


def _stays(p: torch.Tensor) -> bool:
    """Return whether the tensor that is a parameter's gradient can take the mean."""
    old = p.grad
    if old is None or old.is_sparse or old.requires_grad or old.is_inference():
        return False
    return (old.dtype, old.stride()) == (p.dtype, p.stride())
