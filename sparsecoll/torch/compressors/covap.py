"""COVAP (Meng, Sun, Li, "Near-Linear Scaling Data Parallel Training with Overlapping-Aware Gradient Compression")."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from sparsecoll.algorithms import Reduction
from sparsecoll.errors import check_integer
from sparsecoll.torch.compressors.base import ErrorFeedback, StepContext, write_mean
from sparsecoll.torch.tensors.device import Array
from sparsecoll.torch.tensors.layout import Layout
from sparsecoll.transport import Transport
from sparsecoll.vector import DenseVector

logger = logging.getLogger(__name__)


@dataclass
class COVAP(ErrorFeedback):
    """Sends every tensor (bucket) densely in one of I steps; in the others it is added to the residual.

    1. I = ceil(CCR), where CCR is the time of communication divided by that of back-propagation. It is measured in the
       first steps, in which everything is sent (section III.B). A reduction ends on all ranks at once, so its time is
       the shortest over the ranks, that of the rank that started last. I is at most `max_interval`; rank 0 logs a
       warning if CCR is larger, since communication then takes longer than back-propagation all the same.
    2. A bucket of at least twice the median length counts as floor(length / median) tensors, but at most I, of
       contiguous shards (section III.C).
    3. Tensor l is sent in a step if (l + step) mod I = 0 (Definition 1).
    4. Residuals are multiplied by min(start + floor(step / ascend_steps) * ascend, 1) before a gradient is added
       (section III.D). A coefficient below 1 loses gradient mass by design.

    Volume: 2n(P-1)/(P I) words on average.

    Args:
        interval: I, in steps; None, the default, to measure it.
        start: first value of the coefficient, in [0, 1] (default: 0.8). The paper leaves the coefficient to the user.
        ascend_steps: number of steps after which the coefficient increases (default: 100).
        ascend: amount by which it increases (default: 0.1).
        max_interval: the largest I that a measurement may give (default: 16); a tensor that is sent in one of hundreds
            of steps is hardly trained.

    Raises:
        ValueError: An option is out of range.
    """

    name = "covap"
    needs_all_buckets = True

    interval: int | None = None
    start: float = 0.8
    ascend_steps: int = 100
    ascend: float = 0.1
    max_interval: int = 16
    _interval: int = field(default=1, init=False, repr=False)
    _decided: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.interval is not None:
            check_integer("interval", self.interval, 1)
        check_integer("max_interval", self.max_interval, 1)
        if not 0 <= self.start <= 1 or self.ascend < 0 or self.ascend_steps < 1:
            raise ValueError(
                "start, ascend, ascend_steps: expected in [0, 1], at least 0 and at least 1,"
                f" got {self.start}, {self.ascend} and {self.ascend_steps}"
            )
        self.wants_profile = self.interval is None

    def bind(self, layout: Layout, transport: Transport, context: StepContext, timeout: float | None = None) -> None:
        super().bind(layout, transport, context, timeout)
        if self.interval is not None:
            self._decide(self.interval)
        else:
            self._shards = [(0, layout.length)]
            self._first = layout.index

    def _decide(self, interval: int) -> None:
        """Divide this bucket into shards and number them, given I."""
        self._interval, self._decided = interval, True
        median = max(float(np.median([length for length in self.layout.lengths if length] or [1])), 1.0)
        counts = [min(max(int(length // median), 1), interval) for length in self.layout.lengths]
        self._first = sum(counts[: self.layout.index])
        parts, length = counts[self.layout.index], self.layout.length
        edges = [length * j // parts for j in range(parts + 1)]
        self._shards = list(pairwise(edges))

    def _measured(self, ccr: float) -> int:
        """Return I for the ratio of communication to back-propagation."""
        interval = max(1, math.ceil(ccr))
        if interval > self.max_interval and self.own_rank == 0 and self.layout.index == 0:
            logger.warning(
                "COVAP: communication takes %.1f times as long as back-propagation; I is limited to max_interval=%d, so"
                " that every tensor is trained: use a compressor that sends fewer bytes, such as TopK, or raise it",
                ccr,
                self.max_interval,
            )
        return min(interval, self.max_interval)

    @property
    def coefficient(self) -> float:
        """The factor of residuals in this step."""
        return float(min(self.start + self.context.step // self.ascend_steps * self.ascend, 1.0))

    def compensate(self, gradient: Array, scale: float = 1.0, source: Array | None = None) -> DenseVector:
        if not self._decided and self.context.ccr is not None:
            self._decide(self._measured(self.context.ccr))
        return super().compensate(gradient, self.coefficient, source)

    def compress(self, acc: DenseVector) -> list[tuple[int, int]]:
        self.check_finite(acc)  # it may wait here for long
        step, interval = self.context.step, self._interval
        return [edges for tensor, edges in enumerate(self._shards, self._first) if (tensor + step) % interval == 0]

    def communicate(self, transport: Transport, message: list[tuple[int, int]]) -> list[Reduction]:
        acc = self.acc.values
        return [self.reduce(transport, DenseVector(acc[a:b])) for a, b in message]

    def update(self, out: Array, message: list[tuple[int, int]], reduced: list[Reduction]) -> None:
        out.view(np.uint8).fill(0)
        for (a, b), reduction in zip(message, reduced, strict=True):
            write_mean(out[a:b], reduction.value, self.size)
            self.acc.values[a:b] = 0

    def extra_state(self) -> dict[str, Any]:
        return {"interval": self._interval if self._decided else 0}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        if state["interval"]:
            self._decide(state["interval"])
