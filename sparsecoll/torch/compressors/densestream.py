"""DenseStream's allreduce as a compressor (Algorithm 2 of the paper: TopkDSA with DenseStream blocks)."""

from __future__ import annotations

from dataclasses import dataclass

from sparsecoll.algorithms import Algorithm
from sparsecoll.formats import Format
from sparsecoll.torch.compressors.topk import TopK


@dataclass
class DenseStream(TopK):
    """The exact sum of all ranks' top k by balanced split, recursive halving and allgatherv, in DenseStream blocks.

    `format="auto"` sends fewer bytes. Volume: equation (6) of the paper.
    """

    name = "densestream"

    algo: str | Algorithm = "densestream"
    format: str | Format = "densestream"
