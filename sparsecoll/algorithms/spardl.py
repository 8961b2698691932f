"""SparDL (Zhao and others, "SparDL: Distributed Deep Learning Training with Efficient Sparse Communication", 2024)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from sparsecoll.algorithms.base import Algorithm, Loss, Reduction
from sparsecoll.algorithms.primitives.halving import reduce_scatter
from sparsecoll.algorithms.primitives.partition import even, shares
from sparsecoll.select import Vector, topk
from sparsecoll.select.base import check_order, checked
from sparsecoll.transport.channel import Channel
from sparsecoll.vector import SparseVector, accumulator_dtype


@dataclass
class SparDL(Algorithm):
    """Approximate top k of the sum: the largest entries of every block, truncated again after every merge.

    The vector has P blocks of equal width, one for each rank, which form one team of the paper.

    1. Select the k/P largest entries of each block (`select`; shares differ by one if P does not divide k, and if k is
       below P, the k blocks that have a share are others in each call).
    2. Spar-Reduce-Scatter: ceil(log2 P) messages with distances P/2, ..., 1; after each merge a block is truncated to
       its k/P largest entries, so that messages do not grow.
    3. Allgather of the P blocks (Bruck).
    4. Global residual collection: entries that a merge truncates stay in the residual of the rank that merges, so
       `contributed` may be negative at indices that this rank did not have.

    Volume: 4k(P-1)/P words, exactly if blocks are full. Messages: 2 ceil(log2 P). Any P. Memory: the entries. With a
    `selector`, entries beyond a block's share are truncated before step 2.

    Args:
        k: as in `sparsecoll.Algorithm`.
        selector: as in `sparsecoll.Algorithm`.

    Raises:
        ValueError: On every rank, if a sum is NaN, which has no order.
    """

    name = "spardl"
    semantics = "approximate_top_k"

    _calls: int = field(default=0, init=False, repr=False)

    def select(self, x: Vector, k: int, ranks: int = 1) -> SparseVector:
        """Select the top k/P of each block."""
        if self.selector is not None:
            return super().select(x, k)
        edges = even(x.length, ranks)
        if isinstance(x, SparseVector):
            return checked(self._largest(x, edges, k))
        blocks = zip(pairwise(edges), shares(k, ranks, self._calls), strict=True)
        return SparseVector.concatenate([topk(x.slice(a, b), share).shifted(a, x.length) for (a, b), share in blocks])

    def __call__(self, channel: Channel, x: SparseVector, k: int) -> Reduction:
        edges, loss = even(x.length, channel.size), Loss(channel)

        def truncate(part: SparseVector) -> SparseVector:
            return loss.truncate(part, self._largest(part, edges, k))

        with channel.phase("split"):
            whole = truncate(SparseVector.merge([x], accumulator_dtype(x.dtype)))
            block = reduce_scatter(
                channel, whole, edges, loss.round, lambda parts: truncate(SparseVector.merge(parts, parts[0].dtype))
            )
        with channel.phase("gather"):
            value = SparseVector.concatenate(channel.allgather(loss.round(block, x.dtype)))
        self._calls += 1
        return Reduction(check_order(value.astype(x.dtype)), partial(loss.subtract_from, x))

    def _largest(self, part: SparseVector, edges: list[int], k: int) -> SparseVector:
        """Return the k/P largest entries of each block; the part itself if no block has more."""
        positions, allowed = part.searchsorted(edges).tolist(), shares(k, len(edges) - 1, self._calls)
        ranges = [(start, stop, share) for (start, stop), share in zip(pairwise(positions), allowed, strict=True)]
        if all(stop - start <= share for start, stop, share in ranges):
            return part
        return SparseVector.concatenate([part.slice_entries(start, stop).topk(share) for start, stop, share in ranges])
