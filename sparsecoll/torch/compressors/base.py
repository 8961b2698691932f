"""What a compressor is: four steps from a bucket's gradient on this rank to the mean over all ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
import torch

from sparsecoll import api
from sparsecoll.agreement import together
from sparsecoll.algorithms import Algorithm, Reduction
from sparsecoll.algorithms.dense import Dense
from sparsecoll.select import Vector
from sparsecoll.torch.device import Array, Host
from sparsecoll.torch.layout import Layout
from sparsecoll.trace import doing
from sparsecoll.transport import Transport
from sparsecoll.transport.collectives import allgatherv
from sparsecoll.vector import DenseVector

DENSE = Dense()


@dataclass
class Shared:
    """What all buckets of a model have in common; the same on every rank.

    Attributes:
        step: steps taken before this one.
        ccr: seconds of uncompressed communication over seconds of back-propagation, once it is measured (COVAP).
    """

    step: int = 0
    ccr: float | None = None


@dataclass
class Compressor(ABC):
    """Options of a method; a copy of it, bound to a bucket, does that bucket's work and holds its state.

    `mean` is one step: compensate, compress, communicate, update. What a rank raises in the first two is raised on
    every rank by the third.
    """

    name: ClassVar[str]
    profiles: ClassVar[bool] = False  # whether `Shared.ccr` is to be measured

    def bind(self, layout: Layout, transport: Transport, shared: Shared, timeout: float | None = None) -> None:
        """Make room for a bucket's state. Collective: compressors may measure or agree here."""
        self.layout, self.shared, self.timeout = layout, shared, timeout
        self.size = transport.size
        self._generation = transport.generation

    def compensate(self, gradient: Array) -> Any:
        """acc: the gradient with what earlier steps left."""
        return gradient

    @abstractmethod
    def compress(self, acc: Any) -> Any:
        """What this rank sends."""

    @abstractmethod
    def communicate(self, transport: Transport, message: Any) -> Any:
        """What came of it; the same on every rank. `message` may be an exception, to be raised on every rank."""

    @abstractmethod
    def update(self, gradient: Array, message: Any, reduced: Any) -> None:
        """gradient = the mean over the ranks; keep what did not contribute."""

    def mean(self, transport: Transport, gradient: Array) -> None:
        """Replace this rank's gradient by the (compressed) mean over the ranks. Collective."""
        if self._generation != transport.generation:
            self._generation = transport.generation
            self.forget()
        try:
            with doing("select", gradient.size):
                message = self.compress(self.compensate(gradient))
        except Exception as error:
            message = error
        try:
            reduced = self.communicate(transport, message)
        except Exception:
            self.recover()
            raise
        with doing("dense", gradient.size):
            self.update(gradient, message, reduced)

    def recover(self) -> None:  # noqa: B027 - most have nothing to mend
        """After a step that failed: leave state with which the next one can be made."""

    def forget(self) -> None:  # noqa: B027 - most keep nothing of the kind
        """Drop what must be the same on all ranks and may not be: a call has failed since the last step."""

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Tensors by kind ("residual", ...) and parameter name; views, not copies."""
        return {}

    def extra_state(self) -> dict[str, Any]:
        """What else a later run needs, of the whole bucket; plain Python values."""
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None:  # noqa: B027 - most have none
        """Take back what `extra_state` gave."""

    def describe(self) -> str:
        """Name and options."""
        options = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.init)
        return f"{self.name}({options})"

    def _reduce(
        self,
        transport: Transport,
        message: Vector | Exception,
        algorithm: Algorithm = DENSE,
        **options: Any,
    ) -> Reduction:
        """One allreduce of what was selected."""

        def prepare() -> tuple[Vector, Algorithm]:
            if isinstance(message, Exception):
                raise message
            return message, algorithm

        dense = isinstance(message, DenseVector)  # as in plain data parallelism, NaN reaches all ranks
        options["nonfinite"] = "pass" if dense else "raise"
        return api.allreduce_vectors(transport, prepare, timeout=self.timeout, selected=True, **options)

    def _gather(self, transport: Transport, message: Array | Exception) -> list[Array]:
        """All ranks' messages of bytes, in rank order."""
        with together(transport, "compressor", self.timeout) as conversation:
            conversation.call |= {"compressor": self.describe(), "length": self.layout.length}
            if isinstance(message, Exception):
                raise message
            conversation.agree()
            with transport.phase("gather"):
                blocks = allgatherv(transport, message)
            transport.flush()
        return blocks


@dataclass
class Feedback(Compressor):
    """With error feedback: acc = residual + gradient, residual = acc - contributed."""

    def bind(self, layout: Layout, transport: Transport, shared: Shared, timeout: float | None = None) -> None:
        super().bind(layout, transport, shared, timeout)
        self.residual = layout.residual()

    def compensate(self, gradient: Array) -> DenseVector:
        return self.residual.compensate(gradient)

    def recover(self) -> None:
        self.residual.drop_not_finite()

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        return {"residual": self.layout.by_name(self.residual.array)}


def write_mean(gradient: Array, value: Vector, size: int) -> None:
    """gradient = value / size."""
    if isinstance(value, DenseVector):
        np.multiply(value.values, 1 / size, out=gradient, casting="same_kind")
        return
    gradient.fill(0)
    DenseVector(gradient).add_at(value.scaled(1 / size))


class Pieces:
    """Arrays laid end to end in one message, and taken apart again."""

    def __init__(self, shapes: list[tuple[int, ...]], layout: Layout) -> None:
        self.shapes = shapes
        self.sizes = [int(np.prod(shape)) for shape in shapes]
        self.layout = layout

    def join(self, parts: list[torch.Tensor]) -> Array:
        """One new array."""
        whole = self.layout.device.zeros(sum(self.sizes), self.layout.dtype)
        for view, part in zip(self.split(whole), parts, strict=True):
            view.copy_(part)
        return whole

    def split(self, whole: Array) -> Iterator[torch.Tensor]:
        """The parts, which share memory with the whole."""
        flat, start = self.layout.device.tensor(whole), 0
        for shape, size in zip(self.shapes, self.sizes, strict=True):
            yield flat[start : start + size].view(shape)
            start += size


def measured(transport: Transport, call: Callable[[], object], device: Host, repeat: int = 5) -> float:
    """Median seconds of a local call on this rank, with the work that it queues."""
    times = []
    for _ in range(repeat):
        start = transport.now()
        call()
        device.finish()
        times.append(transport.now() - start)
    return float(np.median(times))
