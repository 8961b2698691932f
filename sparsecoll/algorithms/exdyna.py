"""ExDyna (Yoon and Oh, "Preserving Near-Optimal Gradient Sparsification Cost for Scalable Distributed Deep Learning",
CCGrid 2024): each rank selects in a partition of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sparsecoll.algorithms.base import Reduction, digest
from sparsecoll.algorithms.primitives.agreed import INDICES, AtAgreedIndices, sum_at
from sparsecoll.algorithms.primitives.global_topk import global_topk
from sparsecoll.errors import NonFiniteError
from sparsecoll.select import ThresholdReuse, Vector
from sparsecoll.transport.all_ranks import allgather, allgatherv
from sparsecoll.transport.channel import Channel
from sparsecoll.vector import SparseVector

MAX_K_RATIO = 2.0  # the threshold is reused if k changes by at most this factor


@dataclass
class ExDyna(AtAgreedIndices):
    """The exact sum of all ranks' values at about k entries, of which each rank selects those in its own partition.

    1. The vector has P partitions. In call t, rank r selects the entries of partition (r + t) mod P whose magnitude
       reaches a threshold, the same on all ranks: each rank's pass over memory is n/P values.
    2. The ranks gather the indices. No index is selected twice, so that there are k of them however many ranks there
       are.
    3. All ranks sum the values that they have at these indices, as `dense` does.
    4. The threshold is scaled by the number selected, and the boundaries of the partitions move so that all have had
       equal numbers of entries.

    Where the paper adjusts a threshold by fixed factors, and moves blocks between adjacent partitions, this uses the
    controller and the exact start of `ThresholdReuse`, and the quantiles of the gathered indices, which all ranks have.
    The number selected is counted before indices are sent; outside of [k/(1+tolerance), k(1+tolerance)], exactly k
    entries are selected. x may be dense or sparse.

    Volume: at most k(P-1)/P words of indices and 2k(P-1)/P of values, with k for the number selected, and 3P words of
    counts (O(P) more in calls that find the threshold exactly). Memory: k entries.

    Args:
        k: as in `sparsecoll.Algorithm`.
        selector: must be None: the selection is part of the algorithm.
        tau_prime: number of calls from one exact threshold to the next (default: 32).
        tolerance: relative deviation of the number selected from k, above which the call finds the exact threshold
            (default: 0.2).

    Raises:
        ValueError: An option is out of range; or, on every rank, a value is NaN, which has no order.
    """

    name = "exdyna"

    tau_prime: int = 32
    tolerance: float = 0.2

    _key: list[int] = field(default_factory=lambda: [-1, -1], init=False, repr=False)  # length and k of the last call
    _edges: list[int] = field(default_factory=list, init=False, repr=False)
    _threshold: ThresholdReuse = field(default_factory=ThresholdReuse, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse_selector()
        if self.tau_prime < 1 or not self.tolerance >= 0:
            raise ValueError(
                f"tau_prime, tolerance: expected at least 1 and 0, got {self.tau_prime} and {self.tolerance}"
            )
        self._threshold.period, self._threshold.tolerance = self.tau_prime, self.tolerance

    def replicated_state(self) -> tuple[int, int]:
        return self._calls, digest(self._edges)

    def __call__(self, channel: Channel, x: Vector, k: int) -> Reduction:
        P = channel.size
        self._adapt_state_to(x.length, k, P)
        first = self._calls % P  # the partition of rank 0
        own = (channel.rank + first) % P
        with channel.phase("threshold"):
            chosen = self._selected(channel, self._part(x, own), k, first)
        with channel.phase("indices"):
            message = INDICES.encode(chosen.shifted(self._edges[own] if chosen.length < x.length else 0, x.length))
            rows = [INDICES.decode(row, x.length) for row in allgatherv(channel.transport, message)]
            agreed = SparseVector.concatenate([rows[(partition - first) % P] for partition in range(P)])
        with channel.phase("values"):
            reduction = sum_at(channel, x, agreed.indices)
        if agreed.nnz >= P:
            self._edges = agreed.subdivide([0, x.length], P)
        self._calls += 1
        return reduction

    def _adapt_state_to(self, length: int, k: int, P: int) -> None:
        """Adjust the threshold to k, or discard the state if the length or k differs too much from the last call's."""
        before, self._key = self._key, [length, k]
        if length != before[0] or len(self._edges) != P + 1:
            self._edges = [length * j // P for j in range(P + 1)]
            self._threshold.reset()
        elif 0 < k <= MAX_K_RATIO * before[1] and before[1] <= MAX_K_RATIO * k:
            self._threshold.aim(k / before[1])
        else:
            self._threshold.reset()

    def _part(self, x: Vector, partition: int) -> Vector:
        """Return one partition: of a dense x a vector of its own, with indices from 0."""
        if isinstance(x, SparseVector):
            return x.split(self._edges)[partition]
        return x.slice(self._edges[partition], self._edges[partition + 1])

    def _selected(self, channel: Channel, part: Vector, k: int, first: int) -> SparseVector:
        """Return the entries of the own partition that are among about k of all; ties go to lower indices."""
        reuse = self._threshold
        if not reuse.due:
            assert reuse.value is not None
            chosen = part.threshold(reuse.value, k // channel.size)
            total = sum(self._counts(channel, chosen)[0])
            if reuse.accepts(total, k):
                reuse.selected(total, k)
                return chosen
        chosen = part.topk(k).drop_zeros()
        sizes, largest = self._counts(channel, chosen)
        if sum(sizes) <= k or k == 0:
            reuse.reset()
            return chosen
        order = [(partition - first) % channel.size for partition in range(channel.size)]
        return global_topk(channel.transport, chosen, k, sum(sizes), largest, order, reuse)[0]

    @staticmethod
    def _counts(channel: Channel, chosen: SparseVector) -> tuple[list[int], int]:
        """Return the number of entries that each rank has selected, and their largest key; raise on a NaN."""
        row = np.array([chosen.nnz, chosen.key_range()[1], int(chosen.has_nan())], np.uint64)
        sizes, keys, invalid = allgather(channel.transport, row).T.tolist()
        if any(invalid):
            ranks = [rank for rank, nan in enumerate(invalid) if nan]
            raise NonFiniteError(f"x: expected values that can be ordered by magnitude, got NaN on ranks {ranks}")
        return sizes, max(keys)
