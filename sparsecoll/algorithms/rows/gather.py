"""Gather: every rank receives every other rank's rows and sums them itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparsecoll.algorithms.rows.base import RowAlgorithm, RowSum
from sparsecoll.transport.row_channel import RowChannel
from sparsecoll.vector import RowSparse


@dataclass
class RowGather(RowAlgorithm):
    """Exact sum of rows, added in rank order.

    1. Allgather the encoded rows.
    2. Sum all of them in one pass.

    Volume: r(P-1) rows received, in ceil(log2 P) messages; on one machine, rows of 128 KiB and more in P - 1 messages.
    """

    name = "allgather"

    def __call__(self, channel: RowChannel, x: RowSparse, held: Sequence[int]) -> RowSum:
        with channel.phase("gather"):
            parts = channel.allgather(x, max(held))
        with channel.phase("merge"):
            return RowSum(channel.merge(parts).astype(x.dtype))
