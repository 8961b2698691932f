"""A threshold that is reused in later calls (Ok-Topk, section 3.1.3)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sparsecoll.errors import check_integer, check_number
from sparsecoll.select.base import Selector, Vector, checked
from sparsecoll.vector import SparseVector


@dataclass
class ThresholdReuse(Selector):
    """Select by a top-k threshold that is found exactly every `period` calls and reused between (Ok-Topk, 3.1.3).

    Between exact calls a controller adjusts the threshold by the number of entries that it selected: with count ~
    threshold^-slope locally, log(threshold) += error / slope + drift, where error = log(count / k) and `drift`
    integrates the error, so that a threshold that changes at a steady rate is followed without lag. If the count leaves
    [k/(1+tolerance), k(1+tolerance)], it is not used: the call finds the exact threshold instead, and `drift` is
    corrected by the difference. While thresholds change too fast for that, calls find the exact one at once, until the
    reused one would have been accepted again: exact selection takes one pass, too.

    Args:
        period: number of calls from one exact threshold to the next (default: 32).
        tolerance: relative deviation of the number selected from k that is accepted (default: 0.1).

    Attributes:
        value: the threshold; None before the first call.

    Raises:
        ValueError: `period` or `tolerance` is out of range.
        TypeError: `period` is not an integer.
    """

    name = "reuse"

    period: int = 32
    tolerance: float = 0.1
    value: float | None = field(default=None, init=False, repr=False)
    slope: float = field(default=1.0, init=False, repr=False)
    drift: float = field(default=0.0, init=False, repr=False)
    age: int = field(default=0, init=False, repr=False)
    steady: bool = field(default=True, init=False, repr=False)  # whether the threshold fitted the last exact call

    PROBE = 1.1  # the slope is measured between the threshold and PROBE times it
    INTEGRAL = 0.5  # how much of an error counts as drift
    JUMP = 0.1  # the largest error that counts as drift

    def __post_init__(self) -> None:
        check_integer("period", self.period, 1)
        check_number("tolerance", self.tolerance, "[0, inf]")

    @property
    def due(self) -> bool:
        """Whether the next call has to find the exact threshold."""
        return not self.value or self.age >= self.period

    def accepts(self, count: int, k: int) -> bool:
        """Return whether a count is within the tolerance of k."""
        return k <= count * (1 + self.tolerance) and count <= k * (1 + self.tolerance)

    def found(self, value: float, count: int, count_above_probe: int, exact: bool = True) -> None:
        """Store a threshold that `count` entries reach; `count_above_probe` entries reach PROBE times it."""
        usable = math.isfinite(value) and value > 0
        if usable and self.value:  # how far it is from what was expected
            self.drift += self.INTEGRAL * min(max(math.log(max(value / self.value, 1e-300)), -self.JUMP), self.JUMP)
        self.value = value * math.exp(self.drift) if usable else None
        ratio = math.log(count / max(count_above_probe, 1)) / math.log(self.PROBE) if count else 1.0
        self.slope = min(max(ratio, 0.25), 50.0)
        self.age = 1 if exact else self.age + 1

    def selected(self, count: int, k: int) -> None:
        """Adjust the threshold after it has selected `count` entries."""
        assert self.value is not None
        error = math.log(count / k) / self.slope
        self.drift += self.INTEGRAL * error
        self.value *= math.exp(error + self.drift)
        self.age += 1

    def aim(self, ratio: float) -> None:
        """Adjust the threshold to a k that is `ratio` times as large."""
        if self.value is not None:
            self.value *= ratio ** (-1 / self.slope)

    def reset(self) -> None:
        """Make the next call exact."""
        self.value, self.drift, self.age, self.steady = None, 0.0, 0, True

    def select(self, x: Vector, k: int, exact: bool = False) -> SparseVector:
        """Select about k entries of x (at most (1 + tolerance) k); exactly k, if x has as many, if `exact` or due."""
        k = check_integer("k", k, 0)
        if x.nnz <= k or k == 0:
            return checked(x.topk(k))
        chosen: SparseVector | None = None
        if not (exact or self.due) and self.steady:
            assert self.value is not None
            chosen = x.threshold(self.value, k)
            if self.accepts(chosen.nnz, k):
                self.selected(chosen.nnz, k)
                return checked(chosen)
        enough = chosen is not None and chosen.nnz > k  # then the k largest are among them
        chosen = checked(chosen.topk(k) if enough else x.topk(k))  # type: ignore[union-attr]
        if chosen.nnz:
            lowest = chosen.magnitude_of(chosen.key_range()[0])
            self._update_steady(chosen, lowest)
            self.found(lowest, chosen.nnz, chosen.count_at_least(lowest * self.PROBE))
        return chosen

    def _update_steady(self, chosen: SparseVector, lowest: float) -> None:
        """Find out whether the threshold would have been accepted in this call, whose exact one is `lowest`."""
        if not self.value or not (0 < lowest < math.inf):
            return
        if self.value > lowest:
            self.steady = self.accepts(chosen.count_at_least(self.value), chosen.nnz)
        else:  # the number of entries above a lower one is not known
            self.steady = self.slope * math.log(lowest / self.value) <= math.log(1 + self.tolerance)
