"""Moments of a vector, and the entries among which a threshold is likely to lie, from one pass over memory."""

from __future__ import annotations

import math

from sparsecoll.select.base import Vector
from sparsecoll.vector import SMALLEST, SparseVector


class MagnitudeStats:
    """Moments of x, and counts of its entries above a threshold.

    The constructor makes one pass over x, which also selects the entries above a bound, estimated on a sample so that
    about `expected_nnz` entries exceed it. A threshold above the bound is counted and selected among these; one below
    it costs another pass over x.

    Args:
        x: vector with at least one entry.
        expected_nnz: about the number of entries that will be selected.

    Attributes:
        mean: mean of the values; NaN if a value is NaN, as are the others.
        deviation: standard deviation of the values.
        mean_magnitude: mean of the magnitudes.
        largest: largest magnitude.
    """

    def __init__(self, x: Vector, expected_nnz: int) -> None:
        moments, self._candidates, self._bound = x.magnitude_stats(min(expected_nnz, x.nnz))
        total, squares, magnitudes, largest = moments
        self._x, self.mean = x, total / x.nnz
        self.mean_magnitude = magnitudes / x.nnz
        self.deviation = math.sqrt(max(squares / x.nnz - self.mean**2, 0.0)) if math.isfinite(squares) else math.nan
        self.largest = math.nan if math.isnan(magnitudes) else largest

    def count(self, t: float) -> int:
        """Return the number of entries of magnitude >= t."""
        return self._holding(t).count_at_least(t)

    def threshold(self, t: float) -> SparseVector:
        """Return the entries of magnitude >= t."""
        return self._holding(t).threshold(t)

    def reached_by(self, count: int) -> float:
        """Return a threshold that more than `count` entries are known to reach: the bound, or else 0."""
        return self._bound if self._candidates.nnz > count else 0.0

    def topk(self, k: int) -> SparseVector:
        """Return the k entries of largest magnitude."""
        enough = self._bound == 0 or self._candidates.nnz >= k  # with a bound of 0 they are all nonzeros
        return (self._candidates if enough else self._x).topk(k)

    def _holding(self, t: float) -> Vector:
        return self._candidates if t >= max(self._bound, SMALLEST) else self._x
