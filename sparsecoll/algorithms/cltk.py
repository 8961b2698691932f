"""CLT-k, cyclic local top-k (Chen and others, "ScaleCom: Scalable Sparsified Gradient Compression", NeurIPS 2020)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsecoll.algorithms.base import Algorithm, Reduction
from sparsecoll.algorithms.primitives.agreed import INDICES, AtAgreedIndices, sum_at
from sparsecoll.select import Vector
from sparsecoll.transport.all_ranks import spread
from sparsecoll.transport.channel import Channel


@dataclass
class CLTk(AtAgreedIndices):
    """The exact sum of all ranks' values at the k largest entries of one rank, the leader; ranks lead in turn.

    1. The leader, rank t mod P in call t, selects its k largest entries (with the `selector`, if there is one) and
       broadcasts their indices.
    2. All ranks sum the values that they have at these indices, as `dense` does: no rank sends an index.

    The result has k entries however many ranks there are, and no rank but the leader selects. It approximates the top k
    of the sum as far as ranks have their large entries at the same indices, as accumulated gradients do. x may be
    dense or sparse.

    Volume: at most k words of indices, and 2k(P-1)/P of values, in ceil(log2 P) messages of the broadcast and those of
    `dense`.
    Memory: k entries.

    Args:
        k: as in `sparsecoll.Algorithm`.
        selector: as in `sparsecoll.Algorithm`; used by the leader.
    """

    name = "cltk"

    def __call__(self, channel: Channel, x: Vector, k: int) -> Reduction:
        leader, message = self._calls % channel.size, np.empty(0, np.uint8)
        with channel.phase("indices"):
            if channel.rank == leader:
                chosen = Algorithm.select(self, x, k)
                message = INDICES.encode(chosen)
            indices = INDICES.decode(spread(channel.transport, message, leader), x.length).indices
        with channel.phase("values"):
            reduction = sum_at(channel, x, indices)
        self._calls += 1
        return reduction
