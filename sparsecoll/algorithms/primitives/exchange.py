"""Exchange of the regions of a sparse vector: every rank with every other one, or all with a root."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparsecoll.transport.channel import Channel, S
from sparsecoll.transport.collectives import FEW_RANKS, exchanged
from sparsecoll.vector import SparseVector


def exchange(channel: Channel, region: Callable[[int], S]) -> list[S]:
    """Send region(j) to rank j, and return every rank's entries, or rows, in this rank's region, in rank order.

    P - 1 messages, received in the order in which they arrive.
    """
    parts: dict[int, Any] = {channel.rank: region(channel.rank)}
    for source, message in exchanged(channel.transport, lambda to: channel.encode(region(to))):
        parts[source] = channel.decode(message)
    return [parts[source] for source in range(channel.size)]


def united(channel: Channel, region: SparseVector, root: int) -> SparseVector | None:
    """Return the regions of all ranks as one vector on the root, None elsewhere.

    Up to FEW_RANKS ranks send to the root directly. With more, pairs of neighbouring ranks, then of pairs and so on,
    unite what they hold, on the root if it is among them: each receives at most ceil(log2 P) messages, and an entry is
    sent at most as often.

    Args:
        region: this rank's entries, with higher indices than those of the ranks below.
    """
    rank, size = channel.rank, channel.size
    if size <= FEW_RANKS:
        if rank != root:
            channel.isend(root, region)
            return None
        parts = [region if source == root else channel.recv(source) for source in range(size)]
        return SparseVector.concatenate([part.astype(region.dtype) for part in parts])
    start, count = rank, 1  # of the ranks whose regions are united here
    while count < size:
        first = start // (2 * count) * (2 * count)
        other = first + count if start == first else first
        if other < size:
            keeps = root if first <= root < first + 2 * count else first
            if rank != keeps:
                channel.isend(keeps, region)
                return None
            source = root if other <= root < other + count else other
            arrived = channel.recv(source).astype(region.dtype)
            region = SparseVector.concatenate([region, arrived] if start < other else [arrived, region])
        start, count = first, 2 * count
    return region
