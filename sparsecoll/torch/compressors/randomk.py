"""Random-k: the same random coordinates on every rank; only values are sent."""

from __future__ import annotations

from dataclasses import dataclass

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
        self._drawn = -1, select.RandomK()  # a step, and the selector of its reductions

    def compress(self, acc: Vector) -> SparseVector:
        self.check_finite(acc)  # it may not be drawn for long
        self._k = entries_of(self.density, self.layout.length, self.context.step)
        step = self.context.step
        if self._drawn[0] != step:
            self._drawn = step, select.RandomK(mix(mix(self.seed, self.layout.index), step))
        return self._drawn[1].select(acc, self._k)

    def communicate(self, transport: Transport, message: SparseVector) -> Reduction:
        return self.reduce(transport, DenseVector(message.values), compared={ENTRIES: self._k})

    def update(self, out: Array, message: SparseVector, reduced: Reduction) -> None:
        self.contributed(message)
        assert isinstance(reduced.value, DenseVector)
        write_mean(out, message.with_values(reduced.value.values), self.size)
