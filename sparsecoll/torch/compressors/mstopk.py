"""MSTopK (Shi and others, "Towards Scalable Distributed Training ... on Public Cloud Clusters", MLSys 2021)."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparsecoll import select
from sparsecoll.algorithms import Algorithm
from sparsecoll.select import Selector
from sparsecoll.torch.compressors.topk import TopK


@dataclass
class MSTopK(TopK):
    """The k entries between two thresholds found by multiple sampling.

    `algo=sparsecoll.HiTopK()` is the paper's exchange, HiTopKComm: gradients are summed inside a node, entries are
    selected from chunks of that sum, and only those travel between nodes.
    """

    name = "mstopk"

    algo: str | Algorithm = "allgather"
    selector: Selector | None = field(default_factory=select.MSTopK)
