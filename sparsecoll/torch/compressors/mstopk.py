"""MSTopK (Shi and others, "Towards Scalable Distributed Training ... on Public Cloud Clusters", MLSys 2021)."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparsecoll import select
from sparsecoll.algorithms import Algorithm
from sparsecoll.select import Selector
from sparsecoll.torch.compressors.topk import TopK


@dataclass
class MSTopK(TopK):
    """The k entries between two thresholds found by multiple sampling."""

    name = "mstopk"

    algo: str | Algorithm = "allgather"
    selector: Selector | None = field(default_factory=select.MSTopK)
