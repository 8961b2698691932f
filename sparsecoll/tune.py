"""Measure a communicator once: what a message, a byte and an entry cost, and how far that is from whole calls.

`auto` decides by these.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from sparsecoll import formats, model
from sparsecoll.agreement import together
from sparsecoll.algorithms.base import Algorithm
from sparsecoll.algorithms.choices import EXACT, TOP_K_OF_SUM
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
CALLS = [(18, 18), (18, 4), (22, 4), (24, 4)]  # whole calls: log2 of n * P and of n / k
DENSE = CALLS[1:3]  # those of the dense sum, whose time depends on n above all
LENGTH = 1 << 14  # n is at least this
FEW, MANY, LONG = 2, 15, 0.15  # calls repeat MANY times, or until they took LONG seconds, but at least FEW times


def tune(comm: Any) -> Tuning:
    """Measure alpha, beta, the speed of the kernels and whole calls; collective, the same result on every rank.

    Messages go round a ring, all ranks at once, each after a little work, as in an allreduce: where ranks share cores
    it is the waiting for one that was put aside which costs. Times are lower quartiles (what is above is noise), then
    the largest over the ranks. Then each of `auto`'s choices is called with from 1 to 2^20 / P entries a rank: what a
    prediction from the figures misses, waiting and sharing of cores above all, they show. It takes some 2 s on 4 ranks
    with 1 Gb/s. On the simulator, where nothing is missed, there are no such calls, and computation is free and
    measures as zero, unless `simulate` was given costs.
    """
    transport = as_transport(comm)
    with transport.phase("tune", whole=True):
        tuning = _figures(transport)
        if transport.size > 1 and not transport.virtual:
            tuning = replace(tuning, calls=_calls(transport, tuning))
        transport.flush()
    return tuning


def _figures(transport: Transport) -> Tuning:
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
    worked, small, burst, large, call, merge, code, dense = allgather(transport, np.array(times)).max(axis=0).tolist()
    alpha = max(worked - call, small) if transport.size > 1 else 0.0
    overhead, beta = max(burst - small, 0.0) / (BURST - 1), max(large - small, 0.0) / (LARGE - SMALL)
    return Tuning(alpha, overhead, beta, call / 3, merge / ENTRIES, code / ENTRIES, dense / VALUES)


def _calls(transport: Transport, tuning: Tuning) -> dict[str, list[tuple[float, float]]]:
    """For each choice of `auto` (seconds predicted, seconds measured) of calls of growing size."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in EXACT | TOP_K_OF_SUM}
    before = transport.format, transport.value_dtype
    transport.format = formats.Auto(beta=tuning.beta) if tuning.code else formats.Auto()
    transport.value_dtype = None
    for name, make in (EXACT | TOP_K_OF_SUM).items():
        for length, share in DENSE if name == "dense" else CALLS:
            n = max((1 << length) // transport.size, LENGTH)
            k = max(n >> share, 1)
            shape = model.Shape(n, k, transport.size, 4, n, one_node=transport.one_node)
            predicted = model.exact_seconds(shape, tuning) | {"oktopk": model.oktopk_seconds(shape, tuning)}
            inside = predicted[name] - model.FRONT * tuning.call
            found[name].append((inside, _whole(transport, make(), n, k)))
    transport.format, transport.value_dtype = before
    return {name: sorted(calls) for name, calls in found.items()}


def _whole(transport: Transport, algorithm: Algorithm, n: int, k: int) -> float:
    """Median seconds of the slowest rank, from when all ranks have come; the same on every rank."""
    vectors = [_uniform(k, n, transport.rank + transport.size * turn) for turn in range(3)]
    times: list[float] = []
    for turn in range(-2, MANY):
        x = vectors[turn % 3]
        allgather(transport, np.zeros(1, np.uint8))
        start = transport.now()
        with together(transport, "tune", transport.timeout) as conversation:
            conversation.call["algo"] = algorithm.describe()
            conversation.agree()
            value = algorithm(transport, x, k).value
            transport.flush()
        if isinstance(value, DenseVector):
            value.to_sparse()
        took = float(allgather(transport, np.array([transport.now() - start])).max())
        if turn >= 0:
            times.append(took)
        if len(times) >= FEW and sum(times) > LONG:
            break
    return float(np.median(times))


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


def _uniform(entries: int, length: int, seed: int = 0) -> SparseVector:
    rng = np.random.default_rng(seed)
    places = np.flatnonzero(rng.random(length, dtype=np.float32) < entries / length)[:entries]
    return SparseVector(places, rng.standard_normal(places.size).astype(np.float32), length)
