"""Owners: each row is summed on the rank that owns it, and all sums are gathered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsecoll.algorithms.base import Loss, Reduction
from sparsecoll.algorithms.primitives import partition
from sparsecoll.algorithms.rows import hot_rows
from sparsecoll.algorithms.rows.base import RowAlgorithm, balanced_rows
from sparsecoll.errors import check_choice
from sparsecoll.kernels.memory import to_host
from sparsecoll.transport.channel import Channel
from sparsecoll.transport.collectives import exchanged
from sparsecoll.vector import RowSparse, SparseVector
from sparsecoll.vector.rows import hash_owners

OWNERS = ("hash", "quantile", "range")
FEW_ROWS = 4  # up to so many times P^2 rows a rank, a row that all ranks have makes a hash uneven


@dataclass
class RowOwners(RowAlgorithm):
    """Exact sum of rows, added in rank order by the owner of each row.

    1. Find the hot rows, where that pays (see `hot`), and the owner of each other row (see `owner`).
    2. Every rank sends each other one the rows that it owns, and a part of the block of hot rows, in P - 1 messages.
    3. The owners sum them, in rank order, and round the sums as on the wire.
    4. Balance the sums if a rank has a tenth more than the mean (Ok-Topk, section 3.1.2), and allgather them.

    Volume: r(P-1)/P rows in step 2 and u(P-1)/P in step 4, for r rows on each rank and u rows in the sum: 2r(P-1)/P if
    all ranks have the same rows, r(P-1)/P + r(P-1) if they share none.

    Args:
        owner: "hash" (the default) gives a row to a rank by a hash of its number, which balances rows of any
            distribution, as ZEN does (Wang and others, OSDI 2025). "range" gives each rank n/P successive rows.
            "quantile" gives each rank successive rows of which all ranks together hold as many as of every other
            rank's, found by counting, as Ok-Topk does (Li and Hoefler, PPoPP 2022).
        hot: whether rows that at least half of the ranks have are summed as a dense block, of which every rank sums an
            equal part. They are found by counting in P - 1 + log2 P short messages. None, the default, does so for
            "quantile" and "range", whose hot rows would be those of few ranks, and for "hash" if a rank has fewer than
            4 P^2 rows; never on two ranks, where it saves nothing, for "replace", for products of complex values, and
            for arrays on the GPU.

    Raises:
        ValueError: `owner` is none of these.
    """

    name = "owners"

    owner: str = "hash"
    hot: bool | None = None

    def __post_init__(self) -> None:
        check_choice("owner", self.owner, OWNERS)

    def __call__(self, channel: Channel, x: RowSparse, k: int) -> Reduction:  # type: ignore[override]
        with channel.phase("split"):
            found, _ = self._sums(channel, x)
        with channel.phase("gather"):
            if isinstance(found, hot_rows.Sums):
                return hot_rows.allgather(channel, x, found, k)
            rounded = channel.round(found.astype(x.dtype))
            parts = channel.allgather(balanced_rows(channel, rounded), k)
            value = RowSparse.join([part.astype(x.dtype) for part in parts])
            lost: Any = found.rounding_error
            return Reduction(value, lambda: Loss(channel, lost(rounded)).subtract_from(x))  # type: ignore[arg-type]

    def reduce_scatter(self, channel: Channel, x: RowSparse) -> RowSparse:
        """Return the rows that this rank owns, combined over all ranks, in the accumulator dtype."""
        with channel.phase("split"):
            found, edges = self._sums(channel, x, delivered=True)
            if not isinstance(found, hot_rows.Sums):
                return found
            return hot_rows.to_owners(channel, found, owners_of(found.hot.rows, channel.size, edges))

    def _sums(
        self, channel: Channel, x: RowSparse, delivered: bool = False
    ) -> tuple[RowSparse | hot_rows.Sums, list[int] | None]:
        """Return the sums that this rank forms, of hot rows apart if they are looked for, and the owners' edges.

        Quantiles count a hot row once if its sum is delivered to its owner, otherwise not.
        """
        rows, size = to_host(x.indices), channel.size
        places, hot = np.arange(x.nnz), None
        if self._looks_for_hot_rows(channel, x):
            hot = hot_rows.find(channel, x, split(places, owners_of(rows, size), size))
            places = np.flatnonzero(~hot.among(rows))
        counted = rows[places]
        if hot is not None and delivered:
            counted = np.sort(np.concatenate([counted, hot.rows[channel.rank :: size]]))
        edges = None
        if self.owner != "hash":
            entries = SparseVector.from_sorted_unchecked(counted, counted, x.n)
            edges = partition.boundaries(channel.transport, entries, "even" if self.owner == "range" else "histogram")
        positions = split(places, owners_of(rows[places], size, edges), size)
        if hot is not None:
            return hot_rows.reduce_scatter(channel, x, hot, positions), edges
        parts: dict[int, Any] = {channel.rank: x.take(positions[channel.rank])}
        for source, message in exchanged(channel.transport, lambda to: channel.encode(x.take(positions[to]))):
            parts[source] = channel.decode(message)
        return channel.merge([parts[rank] for rank in range(size)], partial=True), edges

    def _looks_for_hot_rows(self, channel: Channel, x: RowSparse) -> bool:
        op = channel.op  # of which a value that stands for a missing one must not change others: 1 + 0j turns -0 to 0
        has_neutral = op.name != "replace" and (op.sums or x.dtype.kind != "c")
        if not has_neutral or channel.size <= 2 or x.on_gpu:
            return False
        few = FEW_ROWS * channel.size**2 > sum(channel.held) / channel.size
        return (self.owner != "hash" or few) if self.hot is None else self.hot


def owners_of(rows: NDArray[Any], size: int, edges: Sequence[int] | None = None) -> NDArray[np.int64]:
    """Return the owner of each row by the edges of the owners' ranges, or by hash without edges."""
    if edges is None:
        return hash_owners(rows, size)
    return np.searchsorted(np.array(edges[1:-1], np.uint64), rows, side="right")


def split(places: NDArray[np.int64], owners: NDArray[np.int64], size: int) -> list[NDArray[np.int64]]:
    """Return for each of `size` ranks the places that it owns, ascending."""
    narrow = owners.astype(np.min_scalar_type(max(size - 1, 1)))  # sorted by radix up to 65,536 ranks
    order = np.argsort(narrow, kind="stable")
    ends = np.searchsorted(narrow[order], np.arange(size + 1))
    grouped = places[order]
    return [grouped[a:b] for a, b in pairwise(ends.tolist())]
