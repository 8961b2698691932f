"""Owners: each row is summed on the rank that owns it, and all sums are gathered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sparsecoll.algorithms.primitives import partition
from sparsecoll.algorithms.rows.base import RowAlgorithm
from sparsecoll.errors import check_choice
from sparsecoll.kernels.memory import to_host
from sparsecoll.transport.base import Transport
from sparsecoll.transport.row_channel import RowChannel
from sparsecoll.vector import RowSparse, SparseVector

OWNERS = ("hash", "quantile", "range")


@dataclass
class RowOwners(RowAlgorithm):
    """Exact sum of rows, added in rank order by the owner of each row.

    1. Find the owner of each row (see `owner`).
    2. Every rank sends each other one the rows that it owns, in P - 1 messages.
    3. The owners sum them, in rank order, and round the sums as on the wire.
    4. Allgather the sums.

    Volume: r(P-1)/P rows in step 2 and u(P-1)/P in step 4, for r rows on each rank and u rows in the sum: 2r(P-1)/P if
    all ranks have the same rows, r(P-1)/P + r(P-1) if they share none.

    Args:
        owner: "hash" (the default) gives a row to a rank by a hash of its number, which balances rows of any
            distribution, as ZEN does (Wang and others, OSDI 2025). "range" gives each rank n/P successive rows.
            "quantile" gives each rank successive rows of which all ranks together hold as many as of every other
            rank's, found by counting, as Ok-Topk does (Li and Hoefler, PPoPP 2022).

    Raises:
        ValueError: `owner` is none of these.
    """

    name = "owners"

    owner: str = "hash"

    def __post_init__(self) -> None:
        check_choice("owner", self.owner, OWNERS)

    def __call__(self, channel: RowChannel, x: RowSparse, held: Sequence[int]) -> RowSparse:
        total = channel.round(self.reduce_scatter(channel, x).astype(x.dtype))
        with channel.phase("gather"):
            parts = channel.allgather(total, max(held))
        with channel.phase("merge"):
            return RowSparse.join([part.astype(x.dtype) for part in parts])

    def reduce_scatter(self, channel: RowChannel, x: RowSparse) -> RowSparse:
        """Return the rows that this rank owns, combined over all ranks, in the accumulator dtype."""
        with channel.phase("split"):
            positions = positions_of(channel.transport, x, self.owner)
            return channel.merge(channel.exchange(x, positions))


def positions_of(transport: Transport, x: RowSparse, owner: str) -> list[NDArray[np.int64]]:
    """Return for each rank the positions of the rows that it owns, ascending; collective for "quantile"."""
    size = transport.size
    if owner == "hash":
        owners = to_host(x.owners(size)).astype(np.min_scalar_type(max(size - 1, 1)))
        order = np.argsort(owners, kind="stable")  # by radix sort up to 65,536 ranks
        ends = np.searchsorted(owners[order], np.arange(size + 1))
        return [order[a:b] for a, b in pairwise(ends.tolist())]
    edges = [x.n * j // size for j in range(size + 1)]
    if owner == "quantile":
        numbers = SparseVector.from_sorted_unchecked(x._indices, x.rows, x.n)
        edges = partition.boundaries(transport, numbers, "histogram")
    return slices(x, edges)


def slices(x: RowSparse, edges: Sequence[int]) -> list[NDArray[np.int64]]:
    """Return the positions of the rows between consecutive edges."""
    ends = to_host(np.searchsorted(x.rows, np.array(edges, np.int64)))
    return [np.arange(a, b) for a, b in pairwise(ends.tolist())]
