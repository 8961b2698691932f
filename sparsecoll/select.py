"""Local selection: which entries of a vector a rank sends.

`topk` and `threshold` are plain functions; `ThresholdReuse` is the state that Ok-Topk keeps between calls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from sparsecoll.vector import DenseVector, SparseVector

Vector = SparseVector | DenseVector


def _vector(x: Any) -> Vector:
    return x if isinstance(x, (SparseVector, DenseVector)) else DenseVector(x)


def topk(x: Any, k: int) -> SparseVector:
    """The k entries of largest magnitude, ties by lower index; zeros are never taken.

    Args:
        x: 1-D NumPy array (n values) or a vector.
        k: at least 0; more than n takes every nonzero.

    Raises:
        ValueError: k negative, or a NaN among the values taken (NaN has no order).

    >>> topk(np.array([1.0, -3.0, 2.0, 3.0]), 2).indices
    array([1, 3], dtype=uint32)
    """
    if k < 0:
        raise ValueError(f"k: expected at least 0, got {k}")
    return check_order(drop_zeros(_vector(x).top(k)))


def threshold(x: Any, t: float) -> SparseVector:
    """All entries with magnitude >= t; t = 0 takes the nonzeros.

    Raises:
        ValueError: t negative or NaN, or a NaN among the values taken.

    >>> threshold(np.array([1.0, -3.0, 2.0]), 2.0).values
    array([-3.,  2.])
    """
    if not t >= 0:
        raise ValueError(f"t: expected at least 0, got {t}")
    return check_order(drop_zeros(_vector(x).at_least(t)))


def drop_zeros(x: SparseVector) -> SparseVector:
    """x without explicit zeros; x itself if there are none."""
    held = x.at_least(5e-324, x.nnz)  # the smallest magnitude above zero
    return x if held.nnz == x.nnz else held


def check_order(x: SparseVector) -> SparseVector:
    """x, unless it holds a NaN: then ValueError."""
    if x.has_nan():
        raise ValueError("x: expected values that can be ordered by magnitude, got NaN among the selected entries")
    return x


@dataclass
class ThresholdReuse:
    """A top-k threshold, found exactly every `period` calls and carried over between them (Ok-Topk, section 3.1.3).

    Between exact calls the threshold follows the number it selected: with count ~ threshold^-slope locally,
    log(threshold) += error / slope + drift, where error = log(count / k) and `drift` integrates the error, so that a
    threshold that changes at a steady rate is followed without lag. A count that leaves [k/(1+tolerance),
    k(1+tolerance)] is not used: the call is made exact instead.
    """

    period: int = 32
    tolerance: float = 0.1
    value: float | None = field(default=None, init=False)
    slope: float = field(default=1.0, init=False)
    drift: float = field(default=0.0, init=False)
    age: int = field(default=0, init=False)

    PROBE = 1.1  # the slope is measured between the threshold and PROBE times it
    INTEGRAL = 0.5

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
        self.value = value if usable else None
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

    def forget(self) -> None:
        """Make the next call exact."""
        self.value, self.drift, self.age = None, 0.0, 0

    def select(self, x: Vector, k: int, exact: bool = False) -> SparseVector:
        """About k entries of x (never more than k; exactly k, where x has them, if `exact` or due)."""
        if x.nnz <= k or k == 0:
            return drop_zeros(x.top(k))
        if not (exact or self.due):
            assert self.value is not None
            chosen = x.at_least(self.value, k)
            if self.accepts(chosen.nnz, k):
                self.selected(chosen.nnz, k)
                return chosen.top(k)
        chosen = drop_zeros(x.top(k))
        if chosen.nnz:
            lowest = chosen.kth_magnitude(chosen.nnz)
            self.found(lowest, chosen.nnz, chosen.at_least(lowest * self.PROBE, chosen.nnz).nnz)
        return chosen

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers that `load_state_dict` takes."""
        return {"value": self.value, "slope": self.slope, "drift": self.drift, "age": self.age}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a saved run stopped."""
        self.value, self.slope = state["value"], state["slope"]
        self.drift, self.age = state["drift"], state["age"]
