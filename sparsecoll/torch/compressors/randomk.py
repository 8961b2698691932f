"""Random-k: the same random coordinates on every rank; only values are sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparsecoll import select
from sparsecoll.algorithms import Reduction
from sparsecoll.select import Vector
from sparsecoll.select.randomk import mix
from sparsecoll.torch.compressors.base import ErrorFeedback, StepContext, entries_of, write_mean
from sparsecoll.torch.compressors.schedule import ENTRIES, Density, as_schedule, is_rare
from sparsecoll.torch.tensors.layout import Array, Layout
from sparsecoll.transport import Transport
from sparsecoll.vector import DenseVector, SparseVector


@dataclass
class RandomKCompressor(ErrorFeedback):
    """Sends k random coordinates, the same on all ranks, with error feedback (Stich, Cordonnier, Jaggi, NeurIPS 2018).

    Generators of NumPy and torch are not used. Volume: 2k(P-1)/P words, since the dense allreduce sends only values.

    Args:
        density: k as a fraction of a bucket, in (0, 1], or a Schedule (default: 0.01).
        seed: seed of the coordinates, the same on all ranks (default: 0).

    Raises:
        ValueError: `density` is out of range.
    """

    name = "randomk"

    density: Density = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        self.sends_rarely = is_rare(as_schedule(self.density))

    def bind(self, layout: Layout, transport: Transport, context: StepContext, timeout: float | None = None) -> None:
        super().bind(layout, transport, context, timeout)
        self.reset()

    def reset(self) -> None:
        failures = self.epoch - (self.context.epoch or 0)  # after each there are others
        self._selector = select.RandomK(mix(self.seed + self.layout.index, failures))

    def compress(self, acc: Vector) -> SparseVector:
        self.check_finite(acc)  # it may not be drawn for long
        self._k = entries_of(self.density, self.layout.length, self.context.step)
        return self._selector.select(acc, self._k)

    def communicate(self, transport: Transport, message: SparseVector) -> Reduction:
        return self.reduce(transport, DenseVector(message.values), compared={ENTRIES: self._k})

    def update(self, out: Array, message: SparseVector, reduced: Reduction) -> None:
        self.contributed(message)
        assert isinstance(reduced.value, DenseVector)
        write_mean(out, message.with_values(reduced.value.values), self.size)

    def extra_state(self) -> dict[str, Any]:
        return {"seed": self._selector.seed, "selector": self._selector.state_dict()}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        self._selector = select.RandomK(state["seed"])
        self._selector.load_state_dict(state["selector"])
