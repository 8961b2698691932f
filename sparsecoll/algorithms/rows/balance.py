"""Balance: sums move to ranks that have few of them before all are gathered, as in Ok-Topk (section 3.1.2)."""

from __future__ import annotations

import numpy as np

from sparsecoll.transport.channel import Channel
from sparsecoll.transport.collectives import allgather
from sparsecoll.vector import RowSparse

MOST = 1.1  # times the mean, up to which the largest number of rows is accepted


def balanced(channel: Channel, x: RowSparse) -> RowSparse:
    """Return as many rows on each rank, to within one, if some rank has more than MOST times the mean; collective.

    The rows of rank 0, rank 1 and so on are taken for one list, of which every rank gets an equal part; what leaves a
    rank goes to its neighbours in this list. Volume: the rows that are beyond the mean.

    Args:
        channel: of the call.
        x: this rank's rows, rounded as on the wire, of which no other rank has one.
    """
    rank, size = channel.rank, channel.size
    counts = allgather(channel.transport, np.array([x.nnz]))[:, 0]
    total = int(counts.sum())
    if counts.max() * size <= MOST * total + size:
        return x
    ends = np.concatenate([[0], np.cumsum(counts)]).tolist()
    edges = [total * j // size for j in range(size + 1)]
    for step in range(1, size):
        to = (rank + step) % size
        low, high = max(edges[to], ends[rank]), min(edges[to + 1], ends[rank + 1])
        if low < high:
            channel.isend(to, x._slice_entries(low - ends[rank], high - ends[rank]))
    parts = [RowSparse.empty(x.n, x.d, x.dtype)]
    for source in range(size):
        low, high = max(edges[rank], ends[source]), min(edges[rank + 1], ends[source + 1])
        if low < high and source == rank:
            parts.append(x._slice_entries(low - ends[rank], high - ends[rank]))
        elif low < high:
            parts.append(channel.recv(source).astype(x.dtype))  # type: ignore[arg-type]
    return RowSparse.join(parts)
