"""Prefix sums over the ranks, by recursive doubling in ceil(log2 P) steps for any P (Hillis and Steele 1986).

Before the step of distance d = 1, 2, 4, ..., a rank has the sum of the d ranks that end with itself, fewer at the
start. It sends this sum to rank r + d, and adds the one of rank r - d in front of its own, so that ranks are added in
their order. Other operations than the sum combine values in the same order.
"""

from __future__ import annotations

from sparsecoll.transport.channel import Channel
from sparsecoll.vector import SparseVector


def prefix(channel: Channel, x: SparseVector, inclusive: bool) -> SparseVector:
    """Return the entries of the ranks up to this one, without its own unless `inclusive`, by `Channel.merge`."""
    rank, size, distance = channel.rank, channel.size, 1
    before = x.slice_entries(0, 0)
    while distance < size:
        if rank + distance < size:
            channel.isend(rank + distance, channel.round(x))
        if rank >= distance:
            arrived = channel.recv(rank - distance).astype(x.dtype)
            if not inclusive:
                before = arrived if distance == 1 else channel.merge([arrived, before], partial=True)
            if inclusive or rank + 2 * distance < size:
                x = channel.merge([arrived, x], partial=True)
        distance *= 2
    return x if inclusive else before
