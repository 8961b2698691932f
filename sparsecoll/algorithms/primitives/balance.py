"""Balance: sums move to ranks that have few of them before all are gathered (Ok-Topk, section 3.1.2)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from sparsecoll.transport.channel import Channel, S


def balanced(channel: Channel, x: S, held: Sequence[int], order: Sequence[int]) -> S:
    """Return as many entries, or rows, on each rank, to within one; collective.

    The entries of the ranks in `order` form one list, of which every rank gets an equal part; entries that leave a rank
    go to its neighbours in this list. Volume: the entries that are beyond the mean.

    Args:
        x: this rank's entries, rounded as on the wire; no other rank has one at these indices.
        held: number of entries of each rank, in this order.
    """
    size, position = channel.size, order.index(channel.rank)
    have = [0, *accumulate(held)]
    want = [have[-1] * j // size for j in range(size + 1)]
    for step in range(1, size):
        to = (position + step) % size
        start, stop = max(have[position], want[to]), min(have[position + 1], want[to + 1])
        if start < stop:
            channel.isend(order[to], x.slice_entries(start - have[position], stop - have[position]))
    parts = []
    for source in range(size):
        start, stop = max(have[source], want[position]), min(have[source + 1], want[position + 1])
        if start < stop and source == position:
            parts.append(x.slice_entries(start - have[position], stop - have[position]))
        elif start < stop:
            parts.append(channel.recv(order[source]).astype(x.dtype))  # type: ignore[arg-type]
    return x.join(parts or [x.slice_entries(0, 0)])
