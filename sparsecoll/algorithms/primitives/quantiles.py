"""Exact quantiles of a multiset that is distributed over the ranks, without gathering it.

Ok-Topk needs two kinds: the indices that divide all selected entries into P equal regions, and the k-th largest
magnitude of the reduced entries. Both are the item of a given rank R in sorted unsigned integers. Each round counts, on
all ranks, the items below some edges inside the brackets that contain an answer, and keeps the sub-brackets.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsecoll.kernels.memory import asarray_like, to_host
from sparsecoll.transport.base import Transport
from sparsecoll.transport.collectives import sum_counts

EDGES_PER_RANK = 8  # edges counted a round, times P: O(P) words a round, log(range) / log(8P) rounds


@dataclass
class _Bracket:
    """low <= answer < high; `below_*` are the numbers of items below low and below high, over all ranks."""

    rank: int
    low: int
    high: int
    below_low: int
    below_high: int

    def open(self, tolerance: int) -> bool:
        missing = min(self.rank - self.below_low, self.below_high - self.rank)
        return self.high - self.low > 1 and missing > tolerance

    def nearest(self) -> tuple[int, int]:
        """Return (edge, items below it): the end of the bracket whose count is nearer to the rank."""
        if self.high - self.low == 1 or self.rank - self.below_low <= self.below_high - self.rank:
            return self.low, self.below_low
        return self.high, self.below_high


def quantiles(
    transport: Transport, items: NDArray[Any], ranks: list[int], stop: int, total: int, tolerance: int = -1
) -> list[tuple[int, int]]:
    """Return, for each of `ranks` (ascending, 0 <= R < total), an edge e and the number of items below it.

    Args:
        items: this rank's items, ascending unsigned integers below `stop`.
        total: number of items on all ranks together.
        tolerance: largest difference between the number of items below e and R. -1 asks for the item of rank R itself:
            then at most R items are below e, and more than R are below e + 1.

    Volume: at most 3 * 8P words per round (see `collectives.sum_counts`), O(P) in total.
    """
    counter = np.uint32 if total < 2**32 else np.int64
    brackets = [_Bracket(rank, 0, stop, 0, total) for rank in ranks]
    budget = EDGES_PER_RANK * transport.size
    while True:
        spans = sorted({(b.low, b.high) for b in brackets if b.open(tolerance)})
        if not spans:
            return [bracket.nearest() for bracket in brackets]
        each = max(1, budget // len(spans))
        edges = sorted({e for low, high in spans for e in _inner_edges(low, high, each)})
        own = asarray_like(np.array(edges, np.uint64).astype(items.dtype), items)
        below = to_host(np.searchsorted(items, own)).astype(counter)
        counts = sum_counts(transport, below).tolist()
        for bracket in brackets:
            _narrow(bracket, edges, counts)


def _inner_edges(low: int, high: int, count: int) -> list[int]:
    """Return up to `count` edges that divide [low, high) into equal parts."""
    parts = min(count + 1, high - low)
    return [low + (high - low) * i // parts for i in range(1, parts)]


def _narrow(bracket: _Bracket, edges: list[int], counts: list[int]) -> None:
    first, last = bisect_right(edges, bracket.low), bisect_left(edges, bracket.high)
    inside = bisect_right(counts, bracket.rank, first, last)  # the first edge with more than `rank` items below
    if inside > first:
        bracket.low, bracket.below_low = edges[inside - 1], counts[inside - 1]
    if inside < last:
        bracket.high, bracket.below_high = edges[inside], counts[inside]
