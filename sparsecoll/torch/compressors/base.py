"""The interface of compressors: four phases from a bucket's gradient on this rank to the mean over all ranks."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np
import torch

from sparsecoll.algorithms import Algorithm, Reduction
from sparsecoll.algorithms.dense import Dense
from sparsecoll.collectives.allreduce import allreduce_vectors
from sparsecoll.collectives.options import NOTHING, CallOptions
from sparsecoll.collectives.reduce_scatter import reduce_scatter_vectors
from sparsecoll.errors import NonFiniteError, check_integer
from sparsecoll.kernels import kernels_of
from sparsecoll.kernels.memory import empty
from sparsecoll.residual import LazyAccumulator, check_part
from sparsecoll.select import Vector
from sparsecoll.telemetry.trace import record, span
from sparsecoll.torch.compressors.schedule import Density, Schedule, check_density, without_addresses
from sparsecoll.torch.compressors.versions import Versioned, Versions
from sparsecoll.torch.tensors.layout import Array, Layout
from sparsecoll.torch.tensors.private import profiled
from sparsecoll.transport import Transport
from sparsecoll.transport.all_ranks import allgatherv
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.vector import DenseVector, SparseVector

DENSE = Dense()
NO_MESSAGES = "compressor: expected one with encoded() and combined(), such as 'chunktopk', got {!r}"


@dataclass
class StepContext:
    """State that all buckets of a model share; the same on every rank.

    Attributes:
        step: number of steps taken before this one.
        momenta: returns the optimizer's momenta of named parameters; None in loops that do not know them.
        sums_means: whether means before a step are added up; otherwise gradients contain the last one's.
        epoch: that of the transport when the first bucket was bound.
        warned: whether rank 0 has warned that the compressor's momentum is not that of rows.
    """

    step: int = 0
    momenta: Callable[[Sequence[str]], list[float]] | None = None
    sums_means: bool = False
    epoch: int | None = None
    warned: bool = False


@dataclass
class Compressor(ABC):
    """A compression method: derive a dataclass of its options. A copy of the object is bound to each bucket.

    The copy holds the state of its bucket. `allreduce_mean` performs one reduction: compensate, compress, communicate,
    update. An exception in any of these is raised on every rank. State (residuals, velocities, factors) is in
    `versions`, so that a reduction or a step that fails leaves it as it was.
    """

    name: ClassVar[str]  # a preset sets that of the object
    communicates: ClassVar[bool] = True  # whether gradients are averaged at all
    passes_nonfinite: ClassVar[bool] = False  # whether means are NaN or infinite where a gradient is, without an error
    needs_all_buckets: ClassVar[bool] = False  # whether `bind` depends on the lengths of the buckets after this one
    replicated_state: ClassVar[frozenset[str]] = frozenset()  # kinds of state that are the same on all ranks
    scatters = False  # whether each rank gets only its region of a sum, as `fsdp.attach` without replicas wants it
    keeps_gradient = False  # whether the gradient's memory becomes part of the state, so that the mean needs its own
    keeps_zeros = True  # whether zeros are sent as such, so that a parameter without gradient and residual stays
    sends_rarely = False  # whether an entry waits in the residual for many steps
    stands_alone = False  # whether it has `encoded` and `combined`, so that an ElasticGroup can use it
    sends_at_once = False  # whether these messages go directly to all ranks, so that several buckets' can be under way
    dense_below = 1024  # number of values below which a parameter is not compressed, unless the user gives another

    @property
    def unscales(self) -> bool:
        """Whether a GradScaler's scale is taken out of gradients first: residuals are kept without it."""
        return self.keeps_gradient

    def bind(self, layout: Layout, transport: Transport, context: StepContext, timeout: float | None = None) -> None:
        """Allocate the state of a bucket; collective, since compressors may measure or agree here."""
        self.layout, self.context, self.timeout = layout, context, timeout
        self.size, self.own_rank = transport.size, transport.rank  # `rank` is an option of PowerSGD
        self.epoch, self._begun = transport.epoch, 0
        context.epoch = self.epoch if context.epoch is None else context.epoch
        self.versions = Versions()
        check_integer("seed", getattr(self, "seed", 0))

    def for_small(self) -> Compressor | str:
        """Return the compressor, or its name, for parameters that are too small to be compressed: the exact mean."""
        return "none" if self.communicates else self

    def sends_whole(self, parameter: torch.Tensor, transport: Transport) -> bool:
        """Return whether a parameter counts as too small to be compressed, the same on all ranks (default: False)."""
        return False

    def for_rows(self) -> dict[str, Any]:
        """Return the options of `RowSum`, the compressor of gradients that are rows: the exact sum by default."""
        return {"finite": not self.passes_nonfinite, "local": not self.communicates}

    def compensate(self, gradient: Array, *, source: Array | None = None) -> Any:
        """Return acc, the gradient plus the residual of earlier steps, in the gradient's memory; see `allreduce_mean`.

        By default, there is no residual.
        """
        if source is not None:
            gradient[:] = source
        return gradient

    @abstractmethod
    def compress(self, acc: Any) -> Any:
        """Return what this rank sends."""

    @abstractmethod
    def communicate(self, transport: Transport, message: Any) -> Any:
        """Reduce `message` over all ranks; the result is the same on every rank."""

    @abstractmethod
    def update(self, out: Array, message: Any, reduced: Any) -> None:
        """Write the mean over the ranks to `out`; values that did not contribute stay in the trial state."""

    def allreduce_mean(self, transport: Transport, gradient: Array, out: Array, source: Array | None = None) -> None:
        """Write the (compressed) mean of all ranks' gradients to `out`. Collective.

        Args:
            gradient: this rank's gradient; its memory becomes the trial residual if `keeps_gradient`.
            out: array for the mean; it may be `gradient` unless `keeps_gradient`.
            source: array that holds the gradient and does not change before the mean is written; `gradient` is then
                only memory. None, the default: the gradient is in `gradient`.

        Raises:
            NonFiniteError: On every rank, if a gradient contains NaN or infinity and the method cannot pass that on.
        """
        with self.reducing(transport):
            with span("select", gradient.size):
                message = self.message(self.compensate(gradient, source=source))
            reduced = self.communicate(transport, message)
            with span("dense", gradient.size):
                self.update(out, message, reduced)

    @contextlib.contextmanager
    def reducing(self, transport: Transport) -> Iterator[None]:
        """Context manager of a reduction of the bucket: what it raises, all ranks raise; torch.profiler shows it."""
        self.sync(transport)
        with self.shown() as name, CollectiveCall(transport, name, self.timeout):
            yield

    @contextlib.contextmanager
    def shown(self) -> Iterator[str]:
        """Context manager of work on the bucket, which torch.profiler shows by the name that it yields."""
        name = f"bucket {self.layout.index}"
        with contextlib.ExitStack() as stack:
            if profiled():
                stack.enter_context(torch.profiler.record_function(f"sparsecoll: {name}"))
                stack.enter_context(record(Shown()))
            yield name

    @property
    def turn(self) -> int:
        """Number of steps that this bucket has taken part in; a bucket that was never released counts all."""
        return self.context.step - self._begun

    def sync(self, transport: Transport) -> None:
        """Drop what may differ between ranks since a call has failed."""
        if self.epoch != transport.epoch:
            self.epoch = transport.epoch
            self.reset()

    def message(self, acc: Any) -> Any:
        """`compress`, with the name of a parameter whose gradient is not finite in the error."""
        try:
            return self.compress(acc)
        except NonFiniteError:
            if isinstance(acc, (DenseVector, SparseVector)):
                self.check_finite(acc)  # names the parameter
            raise

    def best_bucket(self, size: int) -> int | None:
        """Return the bytes of a bucket with the shortest mean among `size` ranks, where rounds take few messages."""
        return None

    def encoded(self, message: Any) -> Array:
        """Return what `compress` has returned as bytes, as all ranks get it; see `combined`."""
        raise TypeError(NO_MESSAGES.format(self.name))

    def combined(self, blocks: Sequence[Array], shares: Sequence[float] | None = None) -> Any:
        """Return what `communicate` returns, from all ranks' `encoded` messages, multiplied by `shares` if given.

        `update` then gets None for the message if this rank's is not among them.
        """
        raise TypeError(NO_MESSAGES.format(self.name))

    def add_mean(self, values: Array, reduced: Any, scale: float) -> None:
        """Add scale * the mean of what `combined` has returned to `values`."""
        mean = empty(values.size, values.dtype, values)
        self.update(mean, None, reduced)
        mean *= scale
        values += mean

    def reset(self) -> None:  # noqa: B027 - most keep nothing of the kind
        """Discard state that may differ between ranks after a call that failed."""

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return tensors by kind ("residual", ...) and parameter name, as of the last step; views, not copies."""
        return {}

    def state_shape(self, kind: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape of a kind of state of a parameter with this shape; None if shapes are not compared."""
        return None if kind in self.replicated_state else shape

    def load_state(self, saved: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Copy saved tensors into the state; `state` has all of their kinds and names."""
        own = self.state()
        for kind, entries in saved.items():
            for name, t in entries.items():
                own[kind][name].copy_(t.to_dense() if t.is_sparse else t)

    def extra_state(self) -> dict[str, Any]:
        """Return the other state of the bucket that a later run needs, as plain Python values."""
        return {"turn": self.turn}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Restore what `extra_state` returned."""
        self._begun = self.context.step - state["turn"]

    def describe(self) -> str:
        """Return name and options as a string, by which ranks compare their compressors."""
        options = ", ".join(f"{name}={value}" for name, value in self._described().items())
        return f"{self.name}({options})"

    def signature(self) -> dict[str, str]:
        """Return name and options as errors call them, so that an error names the one that differs between ranks."""
        return {"compressor": self.name} | {f"compressor.{name}": value for name, value in self._described().items()}

    def _described(self) -> dict[str, str]:
        return {f.name: without_addresses(repr(getattr(self, f.name))) for f in fields(self) if f.init}

    def check_finite(self, x: Vector) -> None:
        """Raise if a vector to be sent contains NaN or infinity.

        Raises:
            NonFiniteError: The vector contains one; the message names the parameter.
        """
        if (index := x.first_not_finite()) is not None:
            name = self.layout.name_at(index)
            raise NonFiniteError(f"gradient of {name!r}: expected finite values, got NaN or infinity")

    def reduce(
        self,
        transport: Transport,
        message: Vector,
        algorithm: Algorithm = DENSE,
        compared: Mapping[str, Any] = NOTHING,
        **options: Any,
    ) -> Reduction:
        """Sum the selected entries over the ranks, which also compare the values of `compared`."""
        if isinstance(message, SparseVector):
            self.check_finite(message)
        # dense sums pass NaN on, as plain data parallelism does; others have been checked
        given = CallOptions(timeout=self.timeout, nonfinite="pass", **options)
        if self.scatters:
            return reduce_scatter_vectors(transport, message, replace(given, k=None), compared)
        return allreduce_vectors(transport, message, algorithm, given, True, compared, deferred=True)

    def gather(
        self, transport: Transport, message: Array, compared: Mapping[str, Any] = NOTHING, direct: bool = False
    ) -> list[Array]:
        """Return all ranks' messages of bytes, in rank order; ranks compare the values of `compared`, too."""
        with self._agreed(transport, compared), transport.phase("gather"):
            return allgatherv(transport, message, direct)

    @contextlib.contextmanager
    def _agreed(self, transport: Transport, compared: Mapping[str, Any] = NOTHING) -> Iterator[None]:
        """Context manager of a call in which ranks compare the compressor and the values of `compared`."""
        with CollectiveCall(transport, "compressor", self.timeout) as call:
            call.signature |= {**compared, "compressor": self.describe(), "length": self.layout.length}
            call.agree()
            yield
            transport.waitall()


@dataclass
class ErrorFeedback(Compressor):
    """A compressor with error feedback: acc = residual + gradient, residual = acc - contributed.

    acc is formed in the memory of `gradient`, so that the residual does not change until the step has succeeded.
    """

    keeps_gradient = True

    def bind(self, layout: Layout, transport: Transport, context: StepContext, timeout: float | None = None) -> None:
        super().bind(layout, transport, context, timeout)
        self._residual = self.versions.add(self._first_residual())

    def _first_residual(self) -> Versioned:
        layout = self.layout
        zeros = layout.zeros() if self.keeps_gradient else layout.device.zeros(0, layout.dtype)
        return Versioned(zeros, layout.slices)

    def compensate(self, gradient: Array, scale: float = 1.0, source: Array | None = None) -> DenseVector:
        """acc = scale * residual + gradient."""
        if not self.keeps_gradient:
            return DenseVector(gradient if source is None else source)
        self.begin(gradient, source)
        self.acc.add_later(self._residual.current, scale)
        return self.acc.flush()

    def begin(self, acc: Array, source: Array | None = None) -> None:
        """Let acc be a vector in this memory, of its values or those of `source`; it becomes the trial residual."""
        self.acc, self._residual.trial = LazyAccumulator(acc, source), acc

    @property
    def residual(self) -> Array:
        """The residual that the next reduction begins with."""
        return self._residual.current  # type: ignore[no-any-return]

    def contributed(self, sent: Vector) -> None:
        """Subtract what contributed from acc; the rest is the trial residual.

        If the pass that selected `sent` has removed these entries from acc, nothing is left to do; other entries that
        it has removed are put back first.

        Raises:
            ValueError: `sent` has another length than acc.
            TypeError: It is no vector, or of a dtype that cannot be added to acc.
        """
        if self.acc.has_removed(sent):
            self.acc.commit(sent)
        elif sent is self.acc.flush():
            self.acc.values.fill(0)
        else:
            check_part("contributed", sent, self.acc)
            self.acc.subtract_at(sent)

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        return {"residual": self.layout.by_name(self._residual.base)} if self.keeps_gradient else {}


class Shown:
    """A listener of `telemetry.trace` that lets torch.profiler show the kinds of work."""

    def span(self, kind: str, /, **_: int) -> contextlib.AbstractContextManager[object]:
        return torch.profiler.record_function(f"sparsecoll: {kind}")


def entries_of(density: Density, length: int, step: int) -> int:
    """Return how many of `length` values to select in a step, at least one."""
    if isinstance(density, Schedule):
        density = check_density(density.at(step), density, f"at({step})")
    return min(length, max(1, round(float(density) * length)))


def overflowed(values: Array) -> Array:
    """Replace values that are sent, or were received, as the largest float16 by infinity, in place."""
    largest = values.dtype.type(np.finfo(np.float16).max)
    if values.size and kernels_of(values).key_range(values)[1] >= int(largest.view(f"u{values.dtype.itemsize}")):
        beyond = abs(values) >= largest
        values[beyond] = np.copysign(np.inf, values[beyond])
    return values


def write_mean(out: Array, value: Vector, size: int) -> None:
    """out = value / size."""
    if isinstance(value, DenseVector):
        np.divide(value.values, size, out=out, casting="same_kind")
        return
    DenseVector(out).copy_entries(value, size)
