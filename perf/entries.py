"""Sparse vectors for calls that are timed, and calls timed in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsecoll import SparseVector
from sparsecoll.cli import bench
from sparsecoll.transport import Transport, as_transport
from sparsecoll.transport.collectives import allgather

Run = Callable[[Any], object]


class Entries:
    """Sparse vectors of one rank with nearly k (at most k) uniform indices below n, a different one for every call."""

    def __init__(self, n: int, k: int, rank: int, count: int = 3) -> None:
        rng = np.random.default_rng([8, rank])
        self._vectors = []
        for _ in range(count):
            indices = np.cumsum(rng.geometric(k / n, k)) - 1
            indices = indices[indices < n]
            self._vectors.append(SparseVector(indices, rng.standard_normal(indices.size, dtype=np.float32), n))
        self._calls = 0

    def __call__(self) -> SparseVector:
        """Return the next vector."""
        self._calls += 1
        return self._vectors[self._calls % len(self._vectors)]


def compare(
    comm: Any, choices: Sequence[tuple[bench.Call, Callable[[], Any]]], repeat: int = 7, warm: int = 2
) -> list[float]:
    """Return the median seconds of several calls, each given with a function that returns its next vector; collective.

    They are timed `in_turns`.
    """
    runs = [(bench.runner(comm, call), vectors) for call, vectors in choices]
    return in_turns(as_transport(comm), runs, repeat, warm)


def in_turns(
    transport: Transport, runs: Sequence[tuple[Run, Callable[[], Any]]], repeat: int = 7, warm: int = 2
) -> list[float]:
    """Return the median seconds of several functions on the slowest rank; see `times_in_turns`."""
    return [float(np.median(times)) for times in times_in_turns(transport, runs, [repeat] * len(runs), warm)]


def times_in_turns(
    transport: Transport, runs: Sequence[tuple[Run, Callable[[], Any]]], repeats: Sequence[int], warm: int = 2
) -> list[NDArray[np.float64]]:
    """Return the seconds of several functions on the slowest rank, an array for each; collective.

    They are called in random order. Each is called twice in a row and the second call is timed, so that every one finds
    its own data in the caches.

    Args:
        transport: connects the ranks before each call and after the last one; the functions may use another.
        runs: the functions, each with one that returns its next vector.
        repeats: number of timed calls of each, spread evenly over the turns.
        warm: number of rounds before them.
    """
    times: list[list[float]] = [[] for _ in runs]
    turns = max(repeats)
    for turn in range(-warm, turns):
        for number in np.random.default_rng(turn + warm).permutation(len(runs)):
            run, vectors = runs[number]
            if turn >= 0 and turn * repeats[number] // turns == (turn + 1) * repeats[number] // turns:
                continue
            run(vectors())
            vector = vectors()
            bench.barrier(transport)
            start = transport.now()
            run(vector)
            if turn >= 0:
                times[number].append(transport.now() - start)
    return [allgather(transport, np.array(some)).max(axis=0) for some in times]
