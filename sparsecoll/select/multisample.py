"""MSTopk (Shi and others, "Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters", 2021)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from sparsecoll.select.base import Selector, Vector, check_k, checked
from sparsecoll.select.randomk import mix
from sparsecoll.select.survey import Survey
from sparsecoll.vector import SMALLEST, SparseVector


@dataclass
class MSTopK(Selector):
    """k entries by a bisection of the threshold that stops after a fixed number of samplings (Algorithm 1).

    1. The threshold lies between the mean magnitude and the largest; each of `samplings` steps halves the interval by
       counting how many entries reach its middle. t1: the lowest threshold tried with at most k entries (k1 of them);
       t2: the highest one with more.
    2. Take the k1 entries >= t1, and k - k1 in a row of those in [t2, t1), from a random one on.

    Args:
        samplings: thresholds tried.
        seed: of the random start.
    """

    name = "mstopk"

    samplings: int = 30
    seed: int = 0
    _calls: int = field(default=0, init=False, repr=False)

    def select(self, x: Vector, k: int) -> SparseVector:
        check_k(k)
        if x.nnz <= k or k == 0:
            return checked(x.top(k))
        self._calls += 1
        survey = Survey(x, k + k // 2)
        if not math.isfinite(survey.largest):
            return checked(survey.at_least(math.inf))
        low, high = 0.0, 1.0
        t1, t2 = math.inf, SMALLEST
        for _ in range(self.samplings):
            middle = (low + high) / 2
            t = max(survey.mean_magnitude + middle * (survey.largest - survey.mean_magnitude), SMALLEST)
            if survey.count(t) <= k:
                high, t1 = middle, t
            else:
                low, t2 = middle, t
        reach = checked(survey.at_least(t2))
        sure = reach.at_least(t1, k) if math.isfinite(t1) else reach.part(0, 0)
        between = reach.without(sure)
        missing = min(k - sure.nnz, between.nnz)
        start = mix(self.seed, self._calls) % (between.nnz - missing + 1)
        return sure.joined(between.part(start, start + missing))

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self._calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._calls = state["calls"]
