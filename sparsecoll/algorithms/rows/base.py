"""The base of algorithms that sum rows alone, and the balance of sums before they are gathered."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sparsecoll.algorithms.base import Algorithm
from sparsecoll.algorithms.primitives.balance import balanced
from sparsecoll.select import Selector
from sparsecoll.transport.channel import Channel
from sparsecoll.transport.collectives import allgather
from sparsecoll.vector import RowSparse

MOST = 1.1  # times the mean, up to which the largest number of rows is accepted


@dataclass
class RowAlgorithm(Algorithm):
    """Exact sum of rows: derive a dataclass of its options, and define `__call__`, whose x is a RowSparse."""

    semantics = "exact_sum"
    takes_ops = True
    takes_rows = True
    takes_vectors = False

    k: int | None = field(default=None, init=False, repr=False, compare=False)
    selector: Selector | None = field(default=None, init=False, repr=False, compare=False)


def balanced_rows(channel: Channel, x: RowSparse) -> RowSparse:
    """Return as many rows on each rank, if some rank has more than MOST times the mean; see `balanced`."""
    counts: list[int] = allgather(channel.transport, np.array([x.nnz]))[:, 0].tolist()
    if max(counts) * channel.size <= MOST * sum(counts) + channel.size:
        return x
    return balanced(channel, x, counts, range(channel.size))
