"""Allgather: every rank receives every other rank's entries and sums them itself (TopkA in Ok-Topk's Table 1)."""

from __future__ import annotations

from dataclasses import dataclass

from sparsecoll import formats
from sparsecoll.algorithms.base import Algorithm, Reduction, summed
from sparsecoll.transport.base import Transport
from sparsecoll.transport.collectives import allgatherv
from sparsecoll.vector import SparseVector


@dataclass
class Allgather(Algorithm):
    """Exact sum of the given vectors, added in rank order.

    1. Allgather the encoded vectors (Bruck: recursive doubling for any P).
    2. Sum them in one pass over all parts.

    Volume: 2k(P-1) words with COO (Ok-Topk, Table 1), ceil(log2 P) messages. Memory: the entries, never P*n.
    """

    name = "allgather"
    semantics = "exact_sum"
    sends_sums = False

    def __call__(self, transport: Transport, x: SparseVector, k: int) -> Reduction:
        with transport.phase("gather"):
            blocks = allgatherv(transport, transport.encode(x))
        with transport.phase("merge"):
            value = summed([formats.decode(block, x.length) for block in blocks], x)
        return Reduction(value, x)
