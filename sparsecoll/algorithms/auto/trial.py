"""Trials of the algorithms between which predictions do not decide."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import numpy as np
from numpy.typing import NDArray

from sparsecoll.algorithms.auto.costmodel import CHOICES
from sparsecoll.transport.channel import Channel
from sparsecoll.transport.collectives import allgather
from sparsecoll.transport.network import Measured
from sparsecoll.vector import SparseVector

CLOSE = 1.4  # predictions are wrong by up to so much: one that is longer by less may be of the fastest algorithm
TURNS = 4  # at most so many, of which the shortest counts: the first one also asks for memory
FEWEST = 2  # turns without which a trial decides nothing
SECONDS = 0.2  # all trials of the same processes together
GAIN = 0.95  # an algorithm must be so much faster than the predicted one to be taken instead
LONGER = 2.0  # times as long as predicted a trial is assumed to take


def close(predicted: Mapping[str, float]) -> list[str]:
    """Return the algorithms that may be the fastest, in the order of their predictions."""
    names, limit = sorted(predicted, key=lambda name: predicted[name]), CLOSE * min(predicted.values())
    return [name for name in names if predicted[name] <= limit]


def fastest(
    channel: Channel,
    x: SparseVector,
    k: int,
    predicted: Mapping[str, float],
    saved: Mapping[str, float],
    call: Hashable,
) -> str:
    """Return the algorithm that takes the least time on these entries, the same on all ranks; collective.

    Those whose predictions are close are tried, once for all communicators of the same processes, unless that takes
    longer than what is left of SECONDS: then it is the one with the shortest prediction. Messages are counted as
    `Traffic.set_up`.

    Args:
        channel: as in a call of the algorithms, after the communicator has been measured (`tune.tuning_of`).
        x: as in a call of the algorithms.
        k: as in a call of the algorithms.
        predicted: seconds of each of the algorithms, the same on all ranks.
        saved: by how many seconds some algorithms are faster in a call than in a trial.
        call: what identifies calls that take as long as this one.
    """
    names, known = close(predicted), channel.transport.known
    if len(names) == 1 or known is None or channel.transport.virtual:
        return names[0]
    tried = repr((call, names))
    if tried not in known.trials:
        left = SECONDS - known.trial_seconds
        turns = int(left / (LONGER * sum(predicted[name] for name in names)))
        if turns < FEWEST:
            return names[0]
        gains = [saved.get(name, 0.0) for name in names]
        name, seconds = _tried(channel, x, k, names, gains, min(turns, TURNS), left)
        known = Measured(known.tuning, known.trials | {tried: name}, known.trial_seconds + seconds)
        channel.transport.known = channel.transport.measured = known
    return known.trials[tried]


def _tried(
    channel: Channel, x: SparseVector, k: int, names: list[str], saved: list[float], turns: int, left: float
) -> tuple[str, float]:
    """Return the fastest of these algorithms, the first one unless another is much faster, and the seconds of all."""
    transport = channel.transport
    slowest: list[NDArray[np.float64]] = []
    with transport.set_up():
        while len(slowest) < turns and np.sum(slowest) < left:
            own = np.array([_seconds(channel, name, x, k) for name in names])
            slowest.append(allgather(transport, own).max(axis=0))
    least = np.min(slowest, axis=0) - saved
    best = int(least.argmin())
    decides = len(slowest) >= FEWEST and least[best] < GAIN * least[0]
    return names[best if decides else 0], float(np.sum(slowest))


def _seconds(channel: Channel, name: str, x: SparseVector, k: int) -> float:
    """Return the seconds of a call on this rank, after all ranks have met."""
    transport = channel.transport
    allgather(transport, np.zeros(1, np.uint8))
    start = transport.now()
    CHOICES[name]()(channel, x, k).value.to_sparse()
    transport.waitall()
    return transport.now() - start
