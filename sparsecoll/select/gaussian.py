"""Gaussian-k (Shi, Chu, Cheung, See, "Understanding Top-k Sparsification in Distributed Deep Learning", 2019)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from sparsecoll.errors import check_integer
from sparsecoll.select.base import Selector, Vector, checked
from sparsecoll.select.stats import MagnitudeStats
from sparsecoll.vector import SMALLEST, SparseVector


@dataclass
class GaussianK(Selector):
    """Select all entries above the threshold that would select k of normally distributed values (Algorithm 1).

    1. t is the magnitude that k of n values of a normal distribution with x's mean and deviation exceed (both tails).
    2. Up to `adjustments` times, t is halved if fewer than 2k/3 entries reach it, and multiplied by 3/2 if more than
       4k/3 do. A threshold beyond one that is known to select too few or too many is not tried: the geometric mean of
       the two limits is. (The published steps go back and forth between far too few and far too many entries where
       values are far from normal.)
    3. Take all entries of magnitude >= t, or, if no t has selected between 2k/3 and 4k/3, the k largest.

    The number selected differs from k by up to a third, between ranks, and between sets of kernels (by their samples).

    Args:
        adjustments: largest number of times that the threshold is adjusted (default: 4).
    """

    name = "gaussian"

    adjustments: int = 4

    def __post_init__(self) -> None:
        check_integer("adjustments", self.adjustments, 0)

    def select(self, x: Vector, k: int) -> SparseVector:
        k = check_integer("k", k, 0)
        if x.nnz <= k or k == 0:
            return checked(x.topk(k))
        stats = MagnitudeStats(x, 2 * k)
        normal = stats.mean + NormalDist().inv_cdf(1 - k / x.nnz / 2) * stats.deviation
        if not math.isfinite(normal):
            return checked(stats.topk(k) if math.isfinite(stats.largest) else stats.threshold(math.inf))
        few, many = math.inf, stats.reached_by(4 * k // 3)  # thresholds that select too few and too many entries
        t = max(normal, many, SMALLEST)
        for _ in range(self.adjustments + 1):
            count = stats.count(t)
            if 2 * k <= 3 * count <= 4 * k:
                return checked(stats.threshold(t))
            few, many, t = (t, many, t * 0.5) if 3 * count < 2 * k else (few, t, t * 1.5)
            if not many < t < few:
                t = math.sqrt(many * few)
        return checked(stats.topk(k))
