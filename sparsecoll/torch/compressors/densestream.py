"""DenseStream's allreduce as a compressor (Algorithm 2 of the paper: TopkDSA with DenseStream blocks)."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparsecoll import algorithms
from sparsecoll.algorithms import Algorithm
from sparsecoll.formats import Format
from sparsecoll.torch.compressors.topk import TopK


@dataclass
class DenseStream(TopK):
    """The exact sum of all ranks' top k by balanced split, recursive halving and allgatherv, in DenseStream blocks.

    Zeros inside blocks carry true values, which take the same bytes (`fill`, the end of section IV.B); not with a
    selector or a density by layer. `format="auto"` sends fewer bytes. Volume: equation (6) of the paper.
    """

    name = "densestream"

    algo: str | Algorithm = field(default_factory=lambda: algorithms.DenseStream(fill=True))
    format: str | Format = "densestream"
