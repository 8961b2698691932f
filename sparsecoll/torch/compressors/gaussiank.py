"""Gaussian-k (Shi, Chu, Cheung, See, "Understanding Top-k Sparsification in Distributed Deep Learning", 2019)."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparsecoll import select
from sparsecoll.algorithms import Algorithm
from sparsecoll.select import Selector
from sparsecoll.torch.compressors.topk import TopK


@dataclass
class GaussianK(TopK):
    """About k entries, above a threshold from the mean and the deviation; sizes differ from rank to rank."""

    name = "gaussiank"

    algo: str | Algorithm = "allgather"
    selector: Selector | None = field(default_factory=select.GaussianK)
