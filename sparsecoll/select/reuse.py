"""A threshold that is carried over between calls (Ok-Topk, section 3.1.3)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from sparsecoll.select.base import Selector, Vector, check_k, checked
from sparsecoll.vector import SparseVector


@dataclass
class ThresholdReuse(Selector):
    """A top-k threshold, found exactly every `period` calls and carried over between them (Ok-Topk, section 3.1.3).

    Between exact calls the threshold follows the number it selected: with count ~ threshold^-slope locally,
    log(threshold) += error / slope + drift, where error = log(count / k) and `drift` integrates the error, so that a
    threshold that changes at a steady rate is followed without lag. A count that leaves [k/(1+tolerance),
    k(1+tolerance)] is not used: the call is made exact instead, and `drift` learns from what was expected.
    """

    name = "reuse"

    period: int = 32
    tolerance: float = 0.1
    value: float | None = field(default=None, init=False, repr=False)
    slope: float = field(default=1.0, init=False, repr=False)
    drift: float = field(default=0.0, init=False, repr=False)
    age: int = field(default=0, init=False, repr=False)

    PROBE = 1.1  # the slope is measured between the threshold and PROBE times it
    INTEGRAL = 0.5  # how much of an error counts as drift
    JUMP = 0.1  # and of how large an error at most: more than that is not drift

    @property
    def due(self) -> bool:
        """Whether this call has to find the threshold exactly."""
        return self.value is None or self.age >= self.period

    def accepts(self, count: int, k: int) -> bool:
        """Whether a count is near enough to k to be used."""
        return k <= count * (1 + self.tolerance) and count <= k * (1 + self.tolerance)

    def found(self, value: float, count: int, count_above_probe: int) -> None:
        """Take an exact threshold: `count` entries reach it, `count_above_probe` reach PROBE times it."""
        usable = math.isfinite(value) and value > 0
        if usable and self.value is not None:  # how far it is from what was expected
            self.drift += self.INTEGRAL * min(max(math.log(value / self.value), -self.JUMP), self.JUMP)
        self.value = value * math.exp(self.drift) if usable else None
        ratio = math.log(count / max(count_above_probe, 1)) / math.log(self.PROBE) if count else 1.0
        self.slope = min(max(ratio, 0.25), 50.0)
        self.age = 1

    def selected(self, count: int, k: int) -> None:
        """Learn from a reused threshold that selected `count` entries."""
        assert self.value is not None
        error = math.log(count / k) / self.slope
        self.drift += self.INTEGRAL * error
        self.value *= math.exp(error + self.drift)
        self.age += 1

    def aim(self, ratio: float) -> None:
        """Expect `ratio` times as many entries from here on: k has changed by that."""
        if self.value is not None:
            self.value *= ratio ** (-1 / self.slope)

    def forget(self) -> None:
        """Make the next call exact."""
        self.value, self.drift, self.age = None, 0.0, 0

    def select(self, x: Vector, k: int, exact: bool = False) -> SparseVector:
        """About k entries of x (at most (1 + tolerance) k); exactly k, where x has them, if `exact` or due."""
        check_k(k)
        return checked(self._select(x, k, exact))

    def _select(self, x: Vector, k: int, exact: bool) -> SparseVector:
        if x.nnz <= k or k == 0:
            return checked(x.topk(k))
        if not (exact or self.due):
            assert self.value is not None
            chosen = x.threshold(self.value, k)
            if self.accepts(chosen.nnz, k):
                self.selected(chosen.nnz, k)
                return chosen
        chosen = checked(x.topk(k))
        if chosen.nnz:
            lowest = chosen.magnitude_of(chosen.key_range()[0])
            self.found(lowest, chosen.nnz, chosen.count_at_least(lowest * self.PROBE))
        return chosen

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers that `load_state_dict` takes."""
        return {"value": self.value, "slope": self.slope, "drift": self.drift, "age": self.age}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a saved run stopped."""
        self.value, self.slope = state["value"], state["slope"]
        self.drift, self.age = state["drift"], state["age"]
