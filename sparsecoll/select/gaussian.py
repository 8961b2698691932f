"""Gaussian-k (Shi, Chu, Cheung, See, "Understanding Top-k Sparsification in Distributed Deep Learning", 2019)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from sparsecoll.select.base import Selector, Vector, check_k, checked
from sparsecoll.select.stats import MagnitudeStats
from sparsecoll.vector import SMALLEST, SparseVector


@dataclass
class GaussianK(Selector):
    """Select all entries above the threshold that would select k of normally distributed values (Algorithm 1).

    1. t is the magnitude that k of n values of a normal distribution with x's mean and deviation exceed (both tails).
    2. Up to `adjustments` times, t is halved if fewer than 2k/3 entries reach it, and multiplied by 3/2 if more than
       4k/3 do.
    3. Take all entries of magnitude >= t.

    The number selected differs from k and between ranks, by much if values are far from normal.

    Args:
        adjustments: largest number of times that the threshold is adjusted (default: 4).
    """

    name = "gaussian"

    adjustments: int = 4

    def select(self, x: Vector, k: int) -> SparseVector:
        check_k(k)
        if x.nnz <= k or k == 0:
            return checked(x.topk(k))
        stats = MagnitudeStats(x, 2 * k)
        tail = NormalDist().inv_cdf(1 - k / x.nnz / 2)
        t = stats.mean + tail * stats.deviation
        for _ in range(self.adjustments if math.isfinite(t) else 0):
            count = stats.count(t)
            if 3 * count < 2 * k:
                t *= 0.5
            elif 3 * count > 4 * k:
                t *= 1.5
            else:
                break
        return checked(stats.threshold(max(t, SMALLEST) if math.isfinite(t) else math.inf))
