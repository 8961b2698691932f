"""COVAP (Meng, Sun, Li, "Near-Linear Scaling Data Parallel Training with Overlapping-Aware Gradient Compression")."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from sparsecoll.algorithms import Reduction
from sparsecoll.torch.compressors.base import ErrorFeedback, StepContext
from sparsecoll.torch.device import Array
from sparsecoll.torch.layout import Layout
from sparsecoll.torch.options import check_integer
from sparsecoll.transport import Transport
from sparsecoll.vector import DenseVector


@dataclass
class COVAP(ErrorFeedback):
    """Every tensor (bucket) is sent in one of I steps, whole and dense; the others wait in the residual.

    1. I = ceil(CCR), the seconds of communication over those of back-propagation, measured in the first steps (section
       III.B), in which everything is sent. An operation ends on all ranks at once, so the rank that came to it last
       measures its time, which is the least over the ranks.
    2. A bucket of at least twice the median length counts as floor(length / median) tensors, at most I of them, of
       contiguous shards (section III.C).
    3. Tensor l is sent in a step if (l + step) mod I = 0 (Definition 1).
    4. Residuals are multiplied by min(start + floor(step / ascend_steps) * ascend, 1) before a gradient is added
       (section III.D). Below 1 that loses gradient mass by design.

    Volume: on average 2n(P-1)/(P I) words.

    Args:
        interval: I; None: measured.
        start, ascend_steps, ascend: of the coefficient. The paper leaves them to the user.
    """

    name = "covap"
    needs_all_buckets = True

    interval: int | None = None
    start: float = 0.8
    ascend_steps: int = 100
    ascend: float = 0.1
    _interval: int = field(default=1, init=False, repr=False)
    _decided: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.interval is not None:
            check_integer("interval", self.interval, 1)
        if not 0 <= self.start <= 1 or self.ascend < 0 or self.ascend_steps < 1:
            raise ValueError(
                "start, ascend, ascend_steps: expected in [0, 1], at least 0 and at least 1,"
                f" got {self.start}, {self.ascend} and {self.ascend_steps}"
            )

    @property
    def wants_profile(self) -> bool:
        return self.interval is None

    def bind(self, layout: Layout, transport: Transport, context: StepContext, timeout: float | None = None) -> None:
        super().bind(layout, transport, context, timeout)
        if self.interval is not None:
            self._decide(self.interval)
        else:
            self._shards = [(0, layout.length)]
            self._first = layout.index

    def _decide(self, interval: int) -> None:
        """Cut this bucket into shards and number them, given I."""
        self._interval, self._decided = interval, True
        median = max(float(np.median(self.layout.lengths)), 1.0)
        counts = [min(max(int(length // median), 1), interval) for length in self.layout.lengths]
        self._first = sum(counts[: self.layout.index])
        parts, length = counts[self.layout.index], self.layout.length
        edges = [length * j // parts for j in range(parts + 1)]
        self._shards = list(pairwise(edges))

    @property
    def coefficient(self) -> float:
        """What residuals are multiplied by in this step."""
        return float(min(self.start + self.context.step // self.ascend_steps * self.ascend, 1.0))

    def compensate(self, gradient: Array, scale: float = 1.0) -> DenseVector:
        if not self._decided and self.context.ccr is not None:
            self._decide(max(1, math.ceil(self.context.ccr)))
        return super().compensate(gradient, self.coefficient)

    def compress(self, acc: DenseVector) -> list[tuple[int, int]]:
        self.check_finite(acc)  # it may wait here for long
        step, interval = self.context.step, self._interval
        return [edges for tensor, edges in enumerate(self._shards, self._first) if (tensor + step) % interval == 0]

    def communicate(self, transport: Transport, message: list[tuple[int, int]]) -> list[Reduction]:
        acc = self.acc.values
        return [self._reduce(transport, DenseVector(acc[a:b])) for a, b in message]

    def update(self, out: Array, message: list[tuple[int, int]], reduced: list[Reduction]) -> None:
        out.fill(0)
        for (a, b), reduction in zip(message, reduced, strict=True):
            assert isinstance(reduction.value, DenseVector)
            np.divide(reduction.value.values, self.size, out=out[a:b])
            self.acc.values[a:b] = 0

    def extra_state(self) -> dict[str, Any]:
        return {"interval": self._interval if self._decided else 0}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        if state["interval"]:
            self._decide(state["interval"])
