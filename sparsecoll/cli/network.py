"""Latency and bandwidth between two ranks, in the form in which `sparsecoll.Auto` takes them."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsecoll.transport import Transport, as_transport
from sparsecoll.transport.all_ranks import allgather
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.network import Network

LONG = 4 << 20  # bytes
SECONDS = 60  # to wait for a message


def measured_network(comm: Any) -> Network:
    """Measure messages between rank 0 and the last rank, to two digits; collective, the same on every rank."""
    transport = as_transport(comm)
    with CollectiveCall(transport, "network", SECONDS):
        seconds = np.array([_round_trip(transport, size, count) / 2 for size, count in ((8, 200), (LONG, 10))])
        latency, long = allgather(transport, seconds)[0].tolist()
        transport.waitall()
    return Network(float(f"{latency:.1e}"), float(f"{max(long - latency, 0.0) / LONG:.1e}"))


def _round_trip(transport: Transport, size: int, count: int) -> float:
    """Return the median seconds in which a message comes back to rank 0 from the last rank."""
    message, times, last = np.zeros(size, np.uint8), [], transport.size - 1
    for _ in range(count if transport.rank in (0, last) else 0):
        start = transport.now()
        if transport.rank == 0:
            transport.isend(last, message)
            transport.recv(last)
        else:
            transport.isend(0, transport.recv(0))
        transport.waitall()
        times.append(transport.now() - start)
    return float(np.median(times)) if times else 0.0
