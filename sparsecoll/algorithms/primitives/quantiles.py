"""Exact quantiles of a multiset that is distributed over the ranks, without gathering it.

Ok-Topk needs two kinds: the indices that divide all selected entries into P equal regions, and the k-th largest
magnitude of the reduced entries. Both are the item of a given rank R in sorted unsigned integers. Each round counts, on
all ranks, the items below some edges inside the brackets that contain an answer, and keeps the sub-brackets.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsecoll.kernels.memory import asarray_like, to_host
from sparsecoll.transport.all_ranks import sum_counts
from sparsecoll.transport.base import Transport

EDGES_PER_RANK = 8  # edges counted a round, times P: O(P) words a round, log(range) / log(8P) rounds
MOST_EDGES = 1024  # a round for a single answer, however many the ranks

Counts = NDArray[np.int64]
Ends = tuple[NDArray[np.uint64], Counts]  # of brackets, and the numbers of items below them


def quantiles(
    transport: Transport,
    items: NDArray[Any],
    ranks: list[int],
    stop: int,
    total: int,
    tolerance: int = -1,
    first_edges: NDArray[np.uint64] | None = None,
) -> list[tuple[int, int]]:
    """Return, for each of `ranks` (ascending, 0 <= R < total), an edge e and the number of items below it.

    Args:
        items: this rank's items, ascending and below `stop`.
        total: number of items on all ranks together.
        tolerance: largest difference between the number of items below e and R. -1 asks for the item of rank R itself:
            then at most R items are below e, and more than R are below e + 1.
        first_edges: edges to count in the first round, ascending, the same on all ranks, where the answer is expected;
            None, the default: edges that divide [0, stop) evenly.

    Volume: at most 3 * 8P words per round (see `all_ranks.sum_counts`), O(P) in total; 3 * 1024 for one rank R.
    """
    counter = np.uint32 if total < 2**32 else np.int64
    wanted = np.array(ranks, np.int64)
    low, last = np.zeros(wanted.size, np.uint64), np.full(wanted.size, stop - 1, np.uint64)  # low <= answer <= last
    below_low, below_high = np.zeros(wanted.size, np.int64), np.full(wanted.size, total, np.int64)
    budget = EDGES_PER_RANK * transport.size
    budget = min(budget, MOST_EDGES) if wanted.size == 1 else budget
    while (open_ := (low < last) & (np.minimum(wanted - below_low, below_high - wanted) > tolerance)).any():
        starts, first = np.unique(low[open_], return_index=True)  # brackets are disjoint or the same
        if first_edges is None or not first_edges.size:
            edges = _inner_edges(starts, last[open_][first], max(1, budget // starts.size))
        else:
            edges, first_edges = first_edges, None
        below = np.searchsorted(items, asarray_like(edges.astype(items.dtype), items))
        counts = sum_counts(transport, to_host(below).astype(counter)).astype(np.int64)
        _narrow(wanted, (low, below_low), (last, below_high), edges, counts)
    nearer_low = (low == last) | (wanted - below_low <= below_high - wanted)
    return [
        (int(low[i]), int(below_low[i])) if nearer else (int(last[i]) + 1, int(below_high[i]))
        for i, nearer in enumerate(nearer_low)
    ]


def _inner_edges(low: NDArray[np.uint64], last: NDArray[np.uint64], count: int) -> NDArray[np.uint64]:
    """Return up to `count` edges inside of each [low, last], ascending, that divide it into equal parts."""
    parts = np.minimum(last - low, np.uint64(count)) + np.uint64(1)
    step, rest = np.divmod(last - low, parts)  # of one item less: there may be 2^64
    number = np.arange(1, count + 1, dtype=np.uint64)[None, :]
    edges = low[:, None] + number * step[:, None] + np.minimum(number, rest[:, None] + np.uint64(1))
    return edges[number < parts[:, None]]  # type: ignore[no-any-return]


def _narrow(wanted: Counts, lower: Ends, upper: Ends, edges: NDArray[np.uint64], counts: Counts) -> None:
    """Narrow the brackets from `lower` (edge, items below it) to `upper` (last, items up to it) by edges inside."""
    first, last = (np.searchsorted(edges, end[0], side="right") for end in (lower, upper))
    inside = np.clip(np.searchsorted(counts, wanted, side="right"), first, last)  # the first with more items below
    for (edge, below), chosen, at in ((lower, inside > first, inside - 1), (upper, inside < last, inside)):
        edge[chosen], below[chosen] = edges[at[chosen]], counts[at[chosen]]
    upper[0][inside < last] -= np.uint64(1)
