"""Ok-Topk's allreduce as a compressor (Li and Hoefler, PPoPP 2022)."""

from __future__ import annotations

from dataclasses import dataclass

from sparsecoll.algorithms import Algorithm
from sparsecoll.torch.compressors.topk import TopK


@dataclass
class OkTopk(TopK):
    """The top k of the sum of all ranks' top k. See `sparsecoll.OkTopk`; pass one as `algo` for its options.

    Volume: 2k(P-1)/P to 6k(P-1)/P words.
    """

    name = "oktopk"

    algo: str | Algorithm = "oktopk"
