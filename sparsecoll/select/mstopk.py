"""MSTopk (Shi and others, "Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters", 2021)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

from sparsecoll.select.base import Selector, Vector, check_k, checked
from sparsecoll.select.randomk import mix
from sparsecoll.select.stats import MagnitudeStats
from sparsecoll.vector import SMALLEST, SparseVector


@dataclass
class MSTopK(Selector):
    """Select k entries by bisection of the threshold in a fixed number of steps (Algorithm 1).

    1. The threshold lies between the mean magnitude and the largest one. Each of `samplings` steps halves the interval
       by counting the entries that reach its middle. t1 is the lowest threshold tried that at most k entries reach (k1
       of them), t2 the highest one that more entries reach. If a magnitude, or the sum of all, is infinite, the k
       largest entries are found exactly instead.
    2. Take the k1 entries of magnitude >= t1, and k - k1 consecutive ones of those in [t2, t1), from a random one on.

    Args:
        samplings: number of thresholds tried (default: 30).
        seed: seed of the random start (default: 0).
    """

    name = "mstopk"

    samplings: int = 30
    seed: int = 0
    _calls: int = field(default=0, init=False, repr=False)

    def select(self, x: Vector, k: int) -> SparseVector:
        check_k(k)
        if x.nnz <= k or k == 0:
            return checked(x.topk(k))
        self._calls += 1
        stats = MagnitudeStats(x, k + k // 2)
        if not math.isfinite(stats.largest) or not math.isfinite(stats.mean_magnitude):
            return checked(stats.topk(k))
        low, high, count = 0.0, 1.0, functools.cache(stats.count)  # of integers and ties many t are equal
        t1, t2 = math.inf, SMALLEST
        for _ in range(self.samplings):
            middle = (low + high) / 2
            t = max(stats.mean_magnitude + middle * (stats.largest - stats.mean_magnitude), SMALLEST)
            if count(t) <= k:
                high, t1 = middle, t
            else:
                low, t2 = middle, t
        candidates = checked(stats.threshold(t2))
        sure = candidates.threshold(t1, k) if math.isfinite(t1) else candidates.slice_entries(0, 0)
        others = candidates.difference(sure)
        missing = min(k - sure.nnz, others.nnz)
        start = mix(self.seed, self._calls) % (others.nnz - missing + 1)
        rest = others.slice_entries(start, start + missing)
        return SparseVector.merge([sure, rest], sure.dtype) if rest.nnz else sure
