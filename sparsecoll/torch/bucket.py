"""The memory of a bucket: its gradients and their means as flat vectors."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch

from sparsecoll.telemetry.trace import span
from sparsecoll.torch.compressors import Compressor, TopK
from sparsecoll.torch.compressors.base import write_mean
from sparsecoll.torch.device import CPU, Array
from sparsecoll.torch.layout import Layout
from sparsecoll.torch.sparse_means import SparseMean
from sparsecoll.torch.updates import Update, updates
from sparsecoll.transport import Transport
from sparsecoll.vector import SparseVector

MOST_FREE = 2  # buffers that are kept for later: one may be in use as the last step's means


def _users(tensor: torch.Tensor) -> int:
    """Return how many tensors use the memory of one."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))  # type: ignore[attr-defined]


def _references(p: torch.Tensor) -> tuple[int, int]:
    """Return how often Python and how often tensors refer to a parameter's gradient."""
    gradient = p.grad
    assert gradient is not None
    return sys.getrefcount(gradient), _users(gradient)


@functools.cache
def _fewest_references() -> tuple[int, int]:
    p = torch.zeros(1, device="cpu")
    p.grad = torch.zeros(1, device="cpu")
    return _references(p)


def _is_alone(p: torch.Tensor) -> bool:
    """Whether nobody but a parameter has its gradient's memory, and no hook but the library's gets to see it.

    A storage that cannot be resized is memory of somebody else (`torch.from_numpy`, DLPack) or of several processes.
    """
    gradient, hooks = p.grad, p._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    if gradient is None:
        return False
    storage = gradient.untyped_storage()
    whole = storage.nbytes() == gradient.nbytes and storage.resizable()
    del gradient, storage
    return whole and len(hooks or ()) <= 1 and _references(p) == _fewest_references()


class Buffer:
    """A flat vector, as an array and as a tensor over the same memory, with a view for each parameter.

    Tensors are made when they are first asked for: in a hook on a gradient, an operation of torch takes tens of
    microseconds, since what back-propagation computes has taken its code out of the caches.
    """

    def __init__(self, array: Array, layout: Layout) -> None:
        self.array = array
        self._layout = layout
        self._users = 0

    @functools.cached_property
    def tensor(self) -> torch.Tensor:
        """The vector as a tensor."""
        made = self._layout.device.tensor(self.array)
        self._users = _users(made)
        return made

    @functools.cached_property
    def views(self) -> dict[str, torch.Tensor]:
        """The view of each parameter, by name."""
        made = self._layout.split(self.tensor)
        self._users += len(made)
        return made

    @property
    def lent(self) -> bool:
        """Whether tensors that were given away (gradients) still use this memory."""
        return "tensor" in vars(self) and _users(self.tensor) > self._users


class Bucket:
    """Some parameters and the memory for their gradients and means.

    Buffers are used in turn: a gradient is copied into one, a compressor with error feedback makes that buffer its
    residual and returns the memory of the old residual once the step is taken. Means become gradients without a copy,
    so that their buffer is free again when nobody holds those tensors any more.

    A gradient is not copied if it is the only one of its bucket, or if it is in the flat vector already, as with
    `as_view`: it is the source, which nobody writes to. A reduction that fails has then changed no gradient. With
    `take_memory`, a gradient that is alone becomes the memory of the new residual, which takes the fastest pass. Until
    the step, `p.grad` is a stand-in that raises on any use; if the reduction fails, the gradient is given back.

    Args:
        params: name -> parameter; those of the layout are taken.
        layout: of the flat vector.
        as_view: whether gradients become views of the source.
        sparse: whether sparse sums stay as they are, for steps that take them.

    Attributes:
        params: name -> parameter.
        gradient: this rank's gradients, in `layout.dtype`, or memory if there is a source; None outside of a reduction.
        source: this rank's gradients where they are not in `gradient`, or None.
        mean: the means, after a reduction.
        sum: the sum over the ranks instead, until it was applied.
        stand_in: what `p.grad` of the only parameter is while the compressor has the memory of its gradient, or None.
    """

    def __init__(
        self, params: Mapping[str, torch.Tensor], layout: Layout, as_view: bool = False, sparse: bool = False
    ) -> None:
        self.params = {name: params[name] for name in layout.names}
        self.layout = layout
        self.source: Buffer | None = None
        self._as_view, self._sparse, self._dtype = as_view, sparse, layout.device.zeros_tensor(0, layout.dtype).dtype
        self._known: dict[int, Buffer] = {}
        self._free: list[Buffer] = []
        self.gradient: Buffer | None = None
        self.mean: Buffer | None = None
        self.sum: SparseVector | None = None
        self.stand_in: SparseMean | None = None
        self._aside: torch.Tensor | None = None  # what came since, to be added to the gradient that was taken
        self._version = -1  # of `_aside`, after autograd has added to it
        self._adding = False  # whether autograd is about to add to it
        self._took_memory = False  # whether that of the last gradient was taken

    def _unused(self) -> Buffer:
        for position, buffer in enumerate(self._free):
            if not buffer.lent:
                return self._free.pop(position)
        return self.buffer_of(self.layout.zeros())

    def buffer_of(self, array: Array) -> Buffer:
        """Return the buffer that has this array, of the bucket's length, as its memory."""
        buffer = self._known.get(id(array))
        if buffer is None:
            buffer = self._known[id(array)] = Buffer(array, self.layout)
        return buffer

    def recycle(self, arrays: Iterable[Array]) -> None:
        """Take back arrays that a compressor no longer needs."""
        self._free += [self.buffer_of(array) for array in arrays]
        most = 0 if self._took_memory and self.sum is not None else MOST_FREE  # memory of gradients came in addition
        while len(self._free) > most:
            unused = next((buffer for buffer in self._free if not buffer.lent), self._free[0])
            self._forget(unused)

    def _forget(self, buffer: Buffer) -> None:
        """Let a buffer go with its memory."""
        self._known.pop(id(buffer.array), None)
        if buffer in self._free:
            self._free.remove(buffer)

    def gradient_buffer(self) -> Buffer:
        """Return the buffer for the gradients of this reduction; the first call reserves it."""
        if self.gradient is None:
            self.gradient = self._unused()
        return self.gradient

    def take_grad(self, name: str, scale: float = 1.0, take_memory: bool = False) -> None:
        """Take a parameter's gradient, divided by `scale`: zeros if it has none.

        Args:
            take_memory: whether the compressor may have its memory if nobody else can use it (default: False).
        """
        p = self.params[name]
        flat = scale == 1.0 and self._is_flat(p)
        alone = flat and len(self.params) == 1 and p.shape == self.layout.shapes[0]
        self._took_memory = take_memory and alone and _is_alone(p)
        if self._took_memory:
            self._take_memory(p)
            return
        whole = self.gradient_buffer()
        if alone:
            self.source = Buffer(p.grad.numpy().reshape(-1), self.layout)  # type: ignore[union-attr]
            return
        self._check(name, p)
        if self.source is None and self._as_view and scale == 1.0 and self.layout.device is CPU:
            self.source = (self._around(p, name) if flat else None) or self._unused()
        view = (self.source or whole).views[name]
        if flat and p.grad.data_ptr() == view.data_ptr():  # type: ignore[union-attr]
            return
        with span("dense", view.numel()), torch.no_grad():
            self._copy_in(view, p.grad, scale)
        if flat and self.source is not None:
            p.grad.data = view  # type: ignore[union-attr]  # the same tensor: another one would count as a new gradient

    def _take_memory(self, p: torch.Tensor) -> None:
        """Take the memory of the gradient of the only parameter."""
        self.gradient = self.buffer_of(self.layout.device.array(p.grad.view(-1)))  # type: ignore[union-attr]
        p.grad = self.stand_in = SparseMean.of(p)
        self._aside, self._adding = None, False

    def set_aside(self, name: str) -> None:
        """Autograd may add to the gradient, in this back-propagation or a later one: it adds to zeros instead."""
        if self.stand_in is None:
            return
        p = self.params[name]
        if p.grad is self.stand_in:
            p.grad = self._aside = torch.zeros_like(p, requires_grad=False)
        self._adding = self._aside is not None and p.grad is self._aside
        self._note()

    def added(self, name: str) -> None:
        """Autograd has added to the gradient, maybe as a new tensor (`create_graph=True`)."""
        if self._adding:
            self._aside, self._adding = self.params[name].grad, False
            self._note()

    def _note(self) -> None:
        self._version = -1 if self._aside is None else self._aside._version

    def changed_aside(self) -> bool:
        """Whether what was set aside has been changed in place, which the gradient that was taken has not seen.

        Zeros, as `zero_grad(set_to_none=False)` of a model writes them, throw that gradient away.
        """
        aside = self._aside
        if aside is None or aside._version == self._version:
            return False
        if any(p.grad is aside for p in self.params.values()) and aside.any():
            return True
        self._aside = None
        return False

    @torch.no_grad()
    def give_back(self, compressor: Compressor) -> None:
        """Give back a gradient whose memory was taken, unless it was thrown away; see `Compressor.give_back`."""
        stand_in, self.stand_in = self.stand_in, None
        if stand_in is None:
            return
        assert self.gradient is not None
        [(name, p)] = self.params.items()
        self.changed_aside()
        if p.grad is stand_in or (self._aside is not None and p.grad is self._aside):
            compressor.give_back()
            gradient = self.gradient.views[name]
            p.grad = gradient if p.grad is stand_in else p.grad.add_(gradient)
        self._aside = None
        self._forget(self.gradient)

    def throw_away(self) -> None:
        """Gradients are thrown away: one whose memory was taken is not given back."""
        self._aside = None

    def _is_flat(self, p: torch.Tensor) -> bool:
        """Whether a parameter's gradient could be a part of the flat vector as it is; devices other than CPUs copy."""
        gradient = p.grad
        return (
            gradient is not None
            and self.layout.device is CPU
            and gradient.dtype == p.dtype == self._dtype
            and not (gradient.is_sparse or gradient.requires_grad)
            and gradient.is_contiguous()
            and p.is_contiguous()
        )

    def _around(self, p: torch.Tensor, name: str) -> Buffer | None:
        """Return the buffer of which a parameter's gradient is a view already; None: it is not."""
        where = p.grad.data_ptr()  # type: ignore[union-attr]
        found = next((b for b in self._known.values() if b.views[name].data_ptr() == where), None)
        if found in self._free:
            self._free.remove(found)
        return found

    def _is_held(self, p: torch.Tensor, name: str) -> bool:
        """Whether somebody else may have a parameter's gradient, or its memory if that is not a bucket's."""
        if p.grad is None or p.grad.is_sparse or isinstance(p.grad, SparseMean):
            return False
        python, tensors = (a > b for a, b in zip(_references(p), _fewest_references(), strict=True))
        where = p.grad.data_ptr()
        return python or (tensors and all(buffer.views[name].data_ptr() != where for buffer in self._known.values()))

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
        if gradient is None:
            view.zero_()
            return
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if scale == 1.0:
            view.copy_(gradient)
        else:
            torch.mul(gradient.to(view.dtype), 1 / scale, out=view)

    def accumulate(self, residual: Array, weights: Mapping[str, tuple[float, float]]) -> Array:
        """Write a * residual + b * gradient to the gradient buffer; one pass over memory where a is 1.

        Args:
            residual: of the bucket's length.
            weights: parameter name -> (a, b).

        Raises:
            ValueError: a gradient has another shape than its parameter had when this was made.
        """
        out, kept = self.gradient_buffer(), self.buffer_of(residual)
        for name, p in self.params.items():
            gradient, acc, old, (a, b) = p.grad, out.views[name], kept.views[name], weights[name]
            if gradient is not None and gradient.shape != acc.shape:
                raise ValueError(f"gradient: expected shape {tuple(acc.shape)}, got {tuple(gradient.shape)}")
            if gradient is not None and a == 1 and not gradient.is_sparse:
                torch.add(old, gradient, alpha=b, out=acc)
                continue
            torch.mul(old, a, out=acc)
            if gradient is not None:
                acc.add_(gradient.to(acc.dtype) if gradient.is_sparse else gradient, alpha=b)
        return out.array

    def mean_buffer(self, keeps_gradient: bool) -> Array:
        """Return memory for the means: that of the gradients, unless the compressor keeps it."""
        assert self.gradient is not None
        self.mean = self._unused() if keeps_gradient else self.gradient
        return self.mean.array

    def reduce(self, transport: Transport, compressor: Compressor) -> None:
        """Reduce the gradients to their mean. Collective."""
        assert self.gradient is not None
        source = None if self.source is None else self.source.array
        self.sum = None
        if self._sparse and isinstance(compressor, TopK) and compressor.sums_sparsely:
            total = compressor.allreduce_sum(transport, self.gradient.array, source)
            if isinstance(total, SparseVector):
                self.sum = total
            else:
                write_mean(self.mean_buffer(True), total, transport.size)
            return
        out = self.mean_buffer(compressor.keeps_gradient)
        compressor.allreduce_mean(transport, self.gradient.array, out, source)
        if not compressor.communicates:  # the means are this rank's gradients
            self.mean = self.gradient if self.source is None else self.source

    def accept(self) -> None:
        """Accept the reduction: the gradient buffer now belongs to the compressor, or holds the means."""
        unused = self.gradient if self.mean is not None and self.mean is self.source else None
        self._release(self.source, self.mean, unused)  # not used again before the gradients made of them are gone
        self.gradient = self.source = self.stand_in = None

    def assigned(self) -> None:
        """Gradients have been made of the means; a mean that nobody else holds is freed with them."""
        self.mean = None

    def reset(self) -> None:
        """Drop the reduction, and free its buffers."""
        self._release(self.gradient, self.source, self.mean)
        self.gradient = self.source = self.mean = self.sum = None

    def _release(self, *buffers: Buffer | None) -> None:
        """Free buffers, except the memory of gradients that were not copied."""
        for buffer in buffers:
            if buffer is not None and id(buffer.array) in self._known and buffer not in self._free:
                self._free.append(buffer)

    def part_of_mean(self, name: str) -> torch.Tensor:
        """Return a view of a parameter's mean."""
        assert self.mean is not None
        return self.layout.part(self.mean.tensor, name)

    def has_mean(self, name: str) -> bool:
        """Return whether a parameter's mean has a value other than zero."""
        if self.sum is not None:
            return bool(dict(self.updates())[name])
        return bool(self.part_of_mean(name).any())

    def updates(self) -> Iterator[tuple[str, Update]]:
        """Yield the name and the part of the sum for each parameter."""
        return iter(()) if self.sum is None else updates(self.layout, self.sum)

    def mean_is_finite(self) -> bool:
        """Return whether no mean is NaN or infinite."""
        return self.mean is None or bool(np.isfinite(self.mean.array).all())

    def nan(self, name: str) -> torch.Tensor:
        """Return a gradient of a parameter that is NaN."""
        return torch.full_like(self.params[name], float("nan"), requires_grad=False)

    @torch.no_grad()
    def assign_grad(self, name: str, scale: float = 1.0) -> None:
        """Set the gradient of a parameter to scale * mean, in the parameter's dtype and memory format.

        A gradient that somebody else may have is written to, as DistributedDataParallel does, for loops that zero or
        clip such tensors, or the flat one of which they are parts.
        """
        p = self.params[name]
        if self.sum is not None:
            p.grad = SparseMean.of(p)
            return
        view = self.part_of_mean(name)
        if scale != 1.0:
            view.mul_(scale)
        if p.dtype == view.dtype and p.is_contiguous() and not self._is_held(p, name):
            p.grad = view.data  # with a version counter of its own, which views share
        elif p.grad is None or p.grad.data_ptr() != view.data_ptr():
            old = p.grad
            fits = old is not None and not old.is_sparse and old.stride() == p.stride()
            p.grad = (old if fits else torch.empty_like(p, requires_grad=False)).copy_(view)  # type: ignore[union-attr]
