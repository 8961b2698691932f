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
SMALL, LARGE = 8, 1 << 20  # bytes of the messages timed
BURST = 16
WARM, REPEATS = 3, 9  # a connection takes some messages to come up to speed
ENTRIES = 1 << 15  # of the vectors whose coding and merging is timed
VALUES = 1 << 21  # of the dense vector


def tune(comm: Any) -> Tuning:
    """Measure alpha, beta and the speed of the kernels; collective, 0.2 s on 1 Gb/s, the same result on every rank.

    Messages go round a ring, all ranks at once, each after a little work, as in an allreduce: where ranks share cores
    it is the waiting for one that was put aside which costs. Times are lower quartiles (what is above is noise), then
    the largest over the ranks. On the simulator computation is free and measures as zero, unless `simulate` was given
    costs.
    """
    transport = as_transport(comm)
    with transport.phase("tune"):
        one = _uniform(ENTRIES, 100 * ENTRIES).part(0, 1)

        def little() -> None:
            formats.decode(formats.encode(one), one.length)
            SparseVector.sum([one, one], one.dtype)

        calls = _quartile(transport, little)
        times = [
            _ring(transport, SMALL, work=little),
            _ring(transport, SMALL),
            _ring(transport, SMALL, BURST),
            _ring(transport, LARGE),
            calls,
            *_kernels(transport),
        ]
        table = allgather(transport, np.array(times)).max(axis=0).tolist()
        transport.flush()
    worked, small, burst, large, call, merge, code, dense = table
    alpha = max(worked - call, small) if transport.size > 1 else 0.0
    overhead, beta = max(burst - small, 0.0) / (BURST - 1), max(large - small, 0.0) / (LARGE - SMALL)
    return Tuning(alpha, overhead, beta, call / 3, merge / ENTRIES, code / ENTRIES, dense / VALUES)


def tuning_of(transport: Transport) -> Tuning:
    """What was measured on this transport before, or is in the file that SPARSECOLL_TUNING names, or is measured now.

    Collective in the first call, which is why the file must be there on all ranks or on none.
    """
    if transport.tuning is None:
        path = os.environ.get(FILE)
        transport.tuning = Tuning.load(path) if path else tune(transport)
    return transport.tuning


def _quartile(transport: Transport, call: Callable[[], object]) -> float:
    for _ in range(WARM):
        call()
    times = []
    for _ in range(REPEATS):
        start = transport.now()
        call()
        times.append(transport.now() - start)
    return float(np.percentile(times, 25))


def _ring(transport: Transport, size: int, count: int = 1, work: Callable[[], object] | None = None) -> float:
    rank, ranks = transport.rank, transport.size

    def turn() -> None:
        if work is not None:
            work()
        for _ in range(count):
            transport.send((rank + 1) % ranks, np.zeros(size, np.uint8))
        for _ in range(count):
            transport.receive((rank - 1) % ranks)

    return _quartile(transport, turn) if ranks > 1 else 0.0


def _kernels(transport: Transport) -> list[float]:
    """Seconds to merge and to code ENTRIES entries, and to handle VALUES dense values."""
    x, wide = _uniform(ENTRIES, 100 * ENTRIES), _uniform(VALUES // 16, VALUES)
    form = formats.FORMATS["packed"]
    halves = [x.at(np.arange(start, x.nnz, 2)) for start in (0, 1)]

    def dense() -> SparseVector:
        total = DenseVector(wide.to_dense())
        return total.plus(total, total.dtype, here=True).to_sparse()

    return [
        _quartile(transport, lambda: SparseVector.sum(halves, x.dtype)),
        _quartile(transport, lambda: formats.decode(form.encode(x), x.length)),
        _quartile(transport, dense),
    ]


def _uniform(entries: int, length: int) -> SparseVector:
    rng = np.random.default_rng(0)
    places = np.flatnonzero(rng.random(length) < entries / length)[:entries]
    return SparseVector(places, rng.standard_normal(places.size).astype(np.float32), length)
