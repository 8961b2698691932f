"""COVAP (Meng, Sun, Li, "Near-Linear Scaling Data Parallel Training with Overlapping-Aware Gradient Compression")."""

from __future__ import annotations

import logging
import math
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise

import numpy as np

from sparsecoll.algorithms import Reduction
from sparsecoll.errors import check_integer, check_number
from sparsecoll.torch.compressors.base import ErrorFeedback, StepContext, write_mean
from sparsecoll.torch.tensors.layout import Array, Layout
from sparsecoll.transport import Transport
from sparsecoll.transport.network import Network
from sparsecoll.vector import DenseVector

logger = logging.getLogger(__name__)


@dataclass
class COVAP(ErrorFeedback):
    """Sends every tensor (bucket) densely in one of I steps; in the others it is added to the residual.

    1. I = ceil(CCR), where CCR is the time of communication divided by that of back-propagation (section III.B). The
       paper measures both. Here you pass `backward_seconds`, and the time of the sums follows from `network`, so that
       I is the same on all ranks and in all runs. It is at most `max_interval`; rank 0 logs a warning if CCR is larger,
       since communication then takes longer than back-propagation all the same.
    2. A bucket of at least twice the median length counts as floor(length / median) tensors, but at most I, of
       contiguous shards (section III.C).
    3. Tensor l is sent in a step if (l + step) mod I = 0 (Definition 1), counting steps that its bucket takes part in.
    4. Residuals are multiplied by min(start + floor(step / ascend_steps) * ascend, 1) before a gradient is added
       (section III.D). A coefficient below 1 loses gradient mass by design.

    Volume: 2n(P-1)/(P I) words on average.

    Args:
        interval: I, in steps, unless `backward_seconds` is given (default: 4).
        start: first value of the coefficient, in [0, 1] (default: 0.8). The paper leaves the coefficient to the user.
        ascend_steps: number of steps after which the coefficient increases (default: 100).
        ascend: amount by which it increases (default: 0.1).
        backward_seconds: seconds of back-propagation in a step; None, the default, for `interval`.
        max_interval: the largest I that follows from `backward_seconds` (default: 16); a tensor that is sent in one of
            hundreds of steps is hardly trained.
        network: alpha and beta of a message; None, the default, for those that `sparsecoll.Auto` assumes.

    Raises:
        ValueError: An option is out of range.
    """

    name = "covap"
    needs_all_buckets = True

    interval: int = 4
    _: KW_ONLY
    start: float = 0.8
    ascend_steps: int = 100
    ascend: float = 0.1
    backward_seconds: float | None = None
    max_interval: int = 16
    network: Network | None = None

    def __post_init__(self) -> None:
        for name in ("interval", "max_interval", "ascend_steps"):
            check_integer(name, getattr(self, name), 1)
        check_number("start", self.start, "[0, 1]")
        check_number("ascend", self.ascend, "[0, inf)")
        if self.backward_seconds is not None:
            check_number("backward_seconds", self.backward_seconds, "(0, inf)")

    def bind(self, layout: Layout, transport: Transport, context: StepContext, timeout: float | None = None) -> None:
        super().bind(layout, transport, context, timeout)
        self._interval = self.interval if self.backward_seconds is None else self._chosen(transport)
        if min(layout.lengths) < 0:
            self._interval = 1
        median = max(float(np.median([length for length in layout.lengths if length > 0] or [1])), 1.0)
        counts = [min(max(int(length // median), 1), self._interval) for length in layout.lengths]
        parts, length = counts[layout.index], layout.length
        shards = pairwise(length * j // parts for j in range(parts + 1))
        self._shards = dict(enumerate(shards, sum(counts[: layout.index])))  # number of a tensor -> its edges

    def _chosen(self, transport: Transport) -> int:
        """Return ceil(CCR), at most `max_interval`."""
        assert self.backward_seconds is not None
        network, layout, P = self.network or transport.network, self.layout, self.size
        sent = sum(layout.lengths) * layout.dtype.itemsize / P
        ccr = 2 * (P - 1) * (network.alpha * len(layout.lengths) + network.beta * sent) / self.backward_seconds
        if ccr > self.max_interval and self.own_rank == 0 and layout.index == 0:
            logger.warning(
                "COVAP: communication takes %.1f times as long as back-propagation; I is limited to max_interval=%d, so"
                " that every tensor is trained: use a compressor that sends fewer bytes, such as TopK, or raise it",
                ccr,
                self.max_interval,
            )
        return min(max(math.ceil(ccr), 1), self.max_interval)

    @property
    def coefficient(self) -> float:
        """The factor of residuals in this step."""
        return float(min(self.start + self.context.step // self.ascend_steps * self.ascend, 1.0))

    def compensate(self, gradient: Array, scale: float = 1.0, source: Array | None = None) -> DenseVector:
        return super().compensate(gradient, 1.0 if self.versions.open else self.coefficient, source)

    def compress(self, acc: DenseVector) -> list[tuple[int, int]]:
        self.check_finite(acc)  # it may wait here for long
        return [edges for tensor, edges in self._shards.items() if (tensor + self.turn) % self._interval == 0]

    def communicate(self, transport: Transport, message: list[tuple[int, int]]) -> list[Reduction]:
        return [self.reduce(transport, DenseVector(self.acc.values[a:b])) for a, b in message]

    def update(self, out: Array, message: list[tuple[int, int]], reduced: list[Reduction]) -> None:
        out.view(np.uint8).fill(0)
        for (a, b), reduction in zip(message, reduced, strict=True):
            write_mean(out[a:b], reduction.value, self.size)
            self.acc.values[a:b] = 0
