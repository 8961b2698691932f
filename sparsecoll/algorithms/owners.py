"""Owners: each row is summed on the rank that owns it, and all sums are gathered; and `auto` for rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsecoll.algorithms.allgather import Allgather
from sparsecoll.algorithms.base import Algorithm, Loss, Reduction
from sparsecoll.algorithms.primitives import partition
from sparsecoll.algorithms.primitives.balance import balanced
from sparsecoll.algorithms.primitives.estimates import OVERHEAD, rounds
from sparsecoll.errors import check_choice
from sparsecoll.formats import wire_dtype
from sparsecoll.kernels.memory import to_host
from sparsecoll.select import Selector
from sparsecoll.transport.all_ranks import allgather
from sparsecoll.transport.channel import Channel
from sparsecoll.vector import RowSparse, SparseVector
from sparsecoll.vector.rows import hash_owners

RowGather = Allgather  # which takes rows, too
OWNERS = ("hash", "quantile", "range")
BYTE = 5e-11  # seconds to copy or add a byte of a row
DISTINCT = 0.8  # of the rows of all ranks together, as ids by Zipf's law have them between 4 and 16 ranks
MOST = 1.1  # times the mean, up to which the largest number of rows of a rank is accepted


@dataclass
class RowAlgorithm(Algorithm):
    """Exact sum of rows: derive a dataclass of its options, and define `__call__`, whose x is a RowSparse."""

    semantics = "exact_sum"
    takes_ops = True
    takes_rows = True
    takes_vectors = False

    k: int | None = field(default=None, init=False, repr=False, compare=False)
    selector: Selector | None = field(default=None, init=False, repr=False, compare=False)


@dataclass
class RowOwners(RowAlgorithm):
    """Exact sum of rows, added in rank order by the owner of each row.

    1. Every rank sends each other one the rows that it owns, in P - 1 messages.
    2. The owners sum them, in rank order, and round the sums as on the wire.
    3. Balance the sums if a rank has a tenth more than the mean (Ok-Topk, section 3.1.2), and allgather them.

    Volume: r(P-1)/P rows in step 1 and u(P-1)/P in step 3, for r rows on each rank and u rows in the sum: 2r(P-1)/P if
    all ranks have the same rows, r(P-1)/P + r(P-1) if they share none.

    Args:
        owner: "hash" (the default) gives a row to a rank by a hash of its number, which balances rows of any
            distribution, as ZEN does (Wang and others, OSDI 2025). "range" gives each rank n/P successive rows.
            "quantile" gives each rank successive rows, so that the ranks' stored rows are divided equally, by counting
            them as Ok-Topk does (Li and Hoefler, PPoPP 2022).

    Raises:
        ValueError: `owner` is none of these.
    """

    name = "owners"

    owner: str = "hash"

    def __post_init__(self) -> None:
        check_choice("owner", self.owner, OWNERS)

    def __call__(self, channel: Channel, x: RowSparse, k: int) -> Reduction:  # type: ignore[override]
        found = self.reduce_scatter(channel, x)
        with channel.phase("gather"):
            rounded = channel.round(found.astype(x.dtype))
            counts: list[int] = allgather(channel.transport, np.array([rounded.nnz]))[:, 0].tolist()
            uneven = max(counts) * channel.size > MOST * sum(counts) + channel.size
            even = balanced(channel, rounded, counts, range(channel.size)) if uneven else rounded
            value = RowSparse.join([part.astype(x.dtype) for part in channel.allgather(even)])
            lost: Any = found.rounding_error
            return Reduction(value, lambda: Loss(channel, lost(rounded)).subtract_from(x))  # type: ignore[arg-type]

    def reduce_scatter(self, channel: Channel, x: RowSparse) -> RowSparse:
        """Return the rows that this rank owns, combined over all ranks, in the accumulator dtype."""
        rows, size = to_host(x.indices), channel.size
        with channel.phase("split"):
            if self.owner == "hash":
                owners = hash_owners(rows, size)
            else:
                entries = SparseVector.from_sorted_unchecked(rows, rows, x.n)
                method = "even" if self.owner == "range" else "histogram"
                edges = partition.boundaries(channel.transport, entries, method)
                owners = np.searchsorted(np.array(edges[1:-1], np.uint64), rows, side="right")
            positions = split(owners, size)
            return channel.merge(channel.exchange(lambda owner: x.take(positions[owner])), partial=True)


def split(owners: NDArray[np.int64], size: int) -> list[NDArray[np.int64]]:
    """Return for each of `size` ranks the positions at which it is in `owners`, ascending."""
    narrow = owners.astype(np.min_scalar_type(max(size - 1, 1)))  # sorted by radix up to 65,536 ranks
    order = np.argsort(narrow, kind="stable")
    return [order[a:b] for a, b in pairwise(np.searchsorted(narrow[order], np.arange(size + 1)).tolist())]


@dataclass
class RowAuto(RowAlgorithm):
    """Runs `RowGather` or `RowOwners(owner)`, whichever the alpha-beta model predicts to be faster.

    It assumes that four fifths of the rows of all ranks together are distinct, as ids that follow Zipf's law are on few
    ranks, and the costs of messages that `sparsecoll.Auto` assumes. So long calls on 6 ranks and more go to owners.
    Pass `RowOwners` where all ranks have nearly the same rows.

    It never forms a dense sum: even with every row on every rank, `RowOwners` moves less than a byte a row more.

    Args:
        owner: as in `RowOwners` (default: "hash").
    """

    name = "auto"

    owner: str = "hash"

    def __post_init__(self) -> None:
        RowOwners(self.owner)

    def __call__(self, channel: Channel, x: RowSparse, k: int) -> Reduction:  # type: ignore[override]
        row_bytes = x.d * wire_dtype(x.dtype, channel.value_dtype).stored.itemsize + 1.5
        P, total, network = channel.size, sum(channel.held) * row_bytes, channel.transport.network
        union = min(max(DISTINCT * total, k * row_bytes), x.n * row_bytes)  # bytes of the rows of the sum
        byte = network.beta * (P - 1) / P + BYTE  # seconds
        gather = rounds(P) * network.alpha + total * byte
        owners = (1 + rounds(P)) * network.alpha + (P - 2) * OVERHEAD + (total / P + union) * byte + total / P * BYTE
        chosen = Allgather() if P == 1 or gather <= owners else RowOwners(self.owner)
        return chosen(channel, x, k)  # type: ignore[arg-type]
