"""One pass that gathers the moments of a vector and the entries a threshold is likely to lie among."""

from __future__ import annotations

import math

from sparsecoll.select.base import Vector
from sparsecoll.vector import SparseVector


class Survey:
    """Moments of x, and how many of its entries reach a threshold.

    The pass also keeps the entries above a bound that about `reach` of them pass (estimated on a sample). Thresholds
    above the bound are then counted and selected among those; one below it costs another pass over x.

    Attributes:
        mean, deviation: of the values. mean_magnitude, largest: of the magnitudes. NaN if a value is NaN.
    """

    def __init__(self, x: Vector, reach: int) -> None:
        (total, squares, magnitudes, self.largest), self._kept, self._bound = x.survey(min(reach, x.nnz))
        self._x = x
        self.mean = total / x.nnz
        self.mean_magnitude = magnitudes / x.nnz
        self.deviation = math.sqrt(max(squares / x.nnz - self.mean**2, 0.0)) if math.isfinite(squares) else math.nan
        if math.isnan(magnitudes):
            self.largest = math.nan

    def count(self, t: float) -> int:
        """Entries with a magnitude >= t."""
        return (self._kept if t >= self._bound else self._x).count_at_least(t)

    def at_least(self, t: float) -> SparseVector:
        """The entries with a magnitude >= t."""
        return self._kept.at_least(t) if t >= self._bound else self._x.at_least(t)
