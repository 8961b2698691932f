"""Division of the index space into P regions: equal widths, averaged boundaries, or a histogram of all entries."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from sparsecoll.algorithms.primitives.quantiles import quantiles
from sparsecoll.transport.all_ranks import allgather, sum_counts
from sparsecoll.transport.base import Transport
from sparsecoll.vector import SparseVector

METHODS = ("histogram", "average", "even")


def even(length: int, parts: int) -> list[int]:
    """Return the boundaries of parts of equal width."""
    return [length * j // parts for j in range(parts + 1)]


def boundaries(transport: Transport, x: SparseVector, method: str) -> list[int]:
    """Return P + 1 boundaries of regions, the same on every rank; collective.

    Args:
        method: "histogram" for regions with equal numbers of entries, counted over all ranks, which balances any
            distribution; "average" for the mean over the ranks of each rank's own quantiles, which balances only
            similar supports (Ok-Topk, section 3.1.1; DenseStream, III.B.1); "even" for equal widths, without messages.
    """
    size, length = transport.size, x.length
    if method == "even" or size == 1:
        return even(length, size)
    if method == "average":
        return _averaged(transport, x) or even(length, size)
    if not (total := sum(allgather(transport, np.array([x.nnz]))[:, 0].tolist())):
        return even(length, size)
    targets = [total * j // size for j in range(1, size)]
    slack = total // (100 * size) if size > 3 else 0  # for P <= 3 Ok-Topk's bound leaves nothing to waste
    return [0, *(edge for edge, _ in quantiles(transport, x.indices, targets, length, total, slack)), length]


def shares(k: int, parts: int, call: int) -> list[int]:
    """Return how many of k entries each of several parts of the index space may have, which differ by at most one.

    With fewer entries than parts, the parts that have one change from call to call, so that each has its turn.
    """
    each = [above - below for below, above in pairwise(even(k, parts))]
    first = call % parts if k < parts else 0
    return each[first:] + each[:first]


def _averaged(transport: Transport, x: SparseVector) -> list[int]:
    """Return the mean of the quantiles of all ranks that have entries; [] if none has."""
    size, length = transport.size, x.length
    own = [int(x.indices[x.nnz * j // size]) if x.nnz else 0 for j in range(1, size)]
    spare = max(length.bit_length() + size.bit_length() - 63, 0)  # bits by which a sum might not fit
    row = np.array([int(x.nnz > 0), *(edge >> spare for edge in own)], np.int64)
    holders, *total = sum_counts(transport, row).tolist()
    return [0, *((edge << spare) // holders for edge in total), length] if holders else []


def owners(transport: Transport, x: SparseVector, edges: list[int]) -> list[int]:
    """Assign a rank to each region: each rank asks for the region of which it has most, the largest request first."""
    counts = np.array([b - a for a, b in pairwise(x.searchsorted(edges).tolist())])
    wish = int(counts.argmax())
    wishes = allgather(transport, np.array([wish, counts[wish]])).tolist()
    owner = [-1] * transport.size
    for rank in sorted(range(transport.size), key=lambda r: (-wishes[r][1], r)):
        if owner[wishes[rank][0]] < 0:
            owner[wishes[rank][0]] = rank
    spare = iter(sorted({*range(transport.size)}.difference(owner)))
    return [rank if rank >= 0 else next(spare) for rank in owner]
