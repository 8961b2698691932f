"""Measure a communicator once: what a message, a byte and an entry cost. `auto` decides by these."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from sparsecoll import formats
from sparsecoll.model import Tuning
from sparsecoll.transport import Transport, as_transport
from sparsecoll.transport.collectives import allgather
from sparsecoll.vector import DenseVector, SparseVector

FILE = "SPARSECOLL_TUNING"
SMALL, LARGE = 8, 1 << 18  # bytes of the messages timed
BURST = 16
REPEATS = 7
ENTRIES = 1 << 15  # of the vectors whose coding and merging is timed


def tune(comm: Any) -> Tuning:
    """Measure alpha, beta and the speed of the kernels; collective, some milliseconds, the same result on every rank.

    Messages go round a ring, all ranks at once. Times are medians, then the largest over the ranks. On the simulator
    computation is free and measures as zero.
    """
    transport = as_transport(comm)
    with transport.phase("tune"):
        times = [_ring(transport, SMALL), _ring(transport, SMALL, BURST), _ring(transport, LARGE), *_kernels(transport)]
        small, burst, large, merge, code, add = allgather(transport, np.array(times)).max(axis=0).tolist()
        transport.flush()
    overhead, beta = max(burst - small, 0.0) / (BURST - 1), max(large - small, 0.0) / (LARGE - SMALL)
    return Tuning(small, overhead, beta, merge / ENTRIES, code / ENTRIES, add / ENTRIES)


def tuning_of(transport: Transport) -> Tuning:
    """What was measured on this transport before, or is in the file that SPARSECOLL_TUNING names, or is measured now.

    Collective in the first call, which is why the file must be there on all ranks or on none.
    """
    if transport.tuning is None:
        path = os.environ.get(FILE)
        transport.tuning = Tuning.load(path) if path else tune(transport)
    return transport.tuning


def _median(transport: Transport, call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(REPEATS):
        start = transport.now()
        call()
        times.append(transport.now() - start)
    return float(np.median(times))


def _ring(transport: Transport, size: int, count: int = 1) -> float:
    rank, ranks = transport.rank, transport.size

    def turn() -> None:
        for _ in range(count):
            transport.send((rank + 1) % ranks, np.zeros(size, np.uint8))
        for _ in range(count):
            transport.receive((rank - 1) % ranks)

    return _median(transport, turn) if ranks > 1 else 0.0


def _kernels(transport: Transport) -> list[float]:
    """Seconds to merge, to code and to add ENTRIES entries."""
    rng = np.random.default_rng(0)
    places = np.flatnonzero(rng.random(100 * ENTRIES) < 0.01)[:ENTRIES]
    x = SparseVector(places, rng.standard_normal(places.size).astype(np.float32), 100 * ENTRIES)
    halves = [x.part(start, ENTRIES + start - ENTRIES // 2) for start in (0, ENTRIES // 2)]
    dense = DenseVector(x.values)
    form = formats.FORMATS["packed"]
    return [
        _median(transport, lambda: SparseVector.sum(halves, x.dtype)),
        _median(transport, lambda: formats.decode(form.encode(x), x.length)),
        _median(transport, lambda: DenseVector(x.values.copy()).add(dense)),
    ]
