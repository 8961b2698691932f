"""Exchange of the regions of a sparse vector between all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparsecoll.transport.all_ranks import exchanged
from sparsecoll.transport.channel import Channel, S


def exchange(channel: Channel, region: Callable[[int], S]) -> list[S]:
    """Send region(j) to rank j, and return every rank's entries, or rows, in this rank's region, in rank order.

    P - 1 messages, received in the order in which they arrive.
    """
    parts: dict[int, Any] = {channel.rank: region(channel.rank)}
    for source, message in exchanged(channel.transport, lambda to: channel.encode(region(to))):
        parts[source] = channel.decode(message)
    return [parts[source] for source in range(channel.size)]
