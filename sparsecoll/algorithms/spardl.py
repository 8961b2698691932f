"""SparDL (Zhao and others, "SparDL: Distributed Deep Learning Training with Efficient Sparse Communication", 2024)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from sparsecoll.algorithms.base import Algorithm, Loss, Reduction
from sparsecoll.algorithms.primitives.halving import reduce_scatter
from sparsecoll.algorithms.primitives.partition import shares
from sparsecoll.select import Vector, topk
from sparsecoll.select.base import check_order
from sparsecoll.transport.channel import Channel
from sparsecoll.vector import DenseVector, SparseVector, accumulator_dtype


@dataclass
class SparDL(Algorithm):
    """Approximate top k of the sum: the largest entries of every block, truncated again after every merge.

    The P ranks form d teams of T = P/d. The vector has T blocks of equal width, one for each rank of a team.

    1. Select the k/T largest entries of each block (`select`; shares differ by one if T does not divide k, and if k is
       below T, the k blocks that have a share are others in each call).
    2. Spar-Reduce-Scatter in each team: ceil(log2 T) messages with distances T/2, ..., 1; after each merge a block is
       truncated to its k/T largest entries, so that messages do not grow.
    3. Spar-All-Gather: the d ranks that hold the same block in different teams exchange and sum it, and truncate it to
       its k/T largest entries after every merge, by recursive doubling (R-SAG) if d is a power of two, otherwise by one
       allgather of all d blocks (B-SAG with whole blocks).
    4. Allgather of the T blocks in each team (Bruck).
    5. Global residual collection: entries that a merge truncates stay in the residual of the rank that merges (of the
       first one if several merge the same), so `contributed` may be negative at indices that this rank did not have.

    Volume: 2k(P - d)/P words each for steps 2 and 4, and 2kd/P for each of the log2 d merges of step 3 (for each of the
    other d - 1 teams if d is not a power of two), exactly if blocks are full. One team takes 4k(P-1)/P. Messages:
    2 ceil(log2 T) + ceil(log2 d). Any P. Memory: the entries. With a `selector`, entries beyond a block's share are
    truncated before step 2.

    Args:
        k: as in `sparsecoll.Algorithm`.
        selector: as in `sparsecoll.Algorithm`.
        teams: upper bound of d, the largest divisor of P that is not above it (default: 1; d is 1 if P is prime). More
            teams take fewer messages and, from four on, more words.

    Raises:
        ValueError: `teams` is below 1; or, on every rank, a sum is NaN, which has no order.
    """

    name = "spardl"
    semantics = "approximate_top_k"

    teams: int = 1

    _calls: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teams < 1:
            raise ValueError(f"teams: expected at least 1, got {self.teams}")

    def select(self, x: Vector, k: int, ranks: int = 1) -> SparseVector:
        """Select the top k/T of each block."""
        if self.selector is not None:
            return super().select(x, k)
        blocks, parts = self._blocks(ranks), []
        edges = self._edges(x.length, blocks)
        for (start, stop), share in zip(pairwise(edges), shares(k, blocks, self._calls), strict=True):
            if isinstance(x, DenseVector):
                part = topk(x.slice(start, stop), share).shifted(start, x.length)
            else:
                part = topk(x.split([start, stop])[0], share)
            parts.append(part)
        return SparseVector.concatenate(parts)

    def _blocks(self, ranks: int) -> int:
        """Return T, the number of blocks and of ranks in a team."""
        return ranks // max(count for count in range(1, min(self.teams, ranks) + 1) if ranks % count == 0)

    @staticmethod
    def _edges(length: int, blocks: int) -> list[int]:
        return [length * j // blocks for j in range(blocks + 1)]

    def __call__(self, channel: Channel, x: SparseVector, k: int) -> Reduction:
        width = self._blocks(channel.size)
        first, position = channel.rank // width * width, channel.rank % width
        team = channel.group(list(range(first, first + width)))
        peers = channel.group(list(range(position, channel.size, width)))
        edges, loss = self._edges(x.length, width), Loss(channel)

        def truncate(part: SparseVector, own: bool = True) -> SparseVector:
            return loss.truncate(part, self._largest(part, edges, k), own)

        with team.phase("split"):
            whole = truncate(SparseVector.merge([x], accumulator_dtype(x.dtype)))
            block = reduce_scatter(
                team, whole, edges, loss.round, lambda parts: truncate(SparseVector.merge(parts, parts[0].dtype))
            )
        with peers.phase("teams"):
            block = self._across(peers, block, loss, truncate)
        with team.phase("gather"):
            mine = loss.round(block, x.dtype, own=peers.rank == 0)
            value = SparseVector.concatenate(team.allgather(mine))
        self._calls += 1
        return Reduction(check_order(value.astype(x.dtype)), partial(loss.subtract_from, x))

    def _largest(self, part: SparseVector, edges: list[int], k: int) -> SparseVector:
        """Return the k/T largest entries of each block; the part itself if no block has more."""
        positions, allowed = part.searchsorted(edges).tolist(), shares(k, len(edges) - 1, self._calls)
        ranges = [(start, stop, share) for (start, stop), share in zip(pairwise(positions), allowed, strict=True)]
        if all(stop - start <= share for start, stop, share in ranges):
            return part
        return SparseVector.concatenate([part.slice_entries(start, stop).topk(share) for start, stop, share in ranges])

    @staticmethod
    def _across(
        peers: Channel, block: SparseVector, loss: Loss, truncate: Callable[[SparseVector, bool], SparseVector]
    ) -> SparseVector:
        """Return the sum of the block over all teams, the same bits in each; the first of them records the loss."""
        if peers.size & (peers.size - 1):
            sent = loss.round(block).drop_zeros()
            return truncate(SparseVector.merge(peers.allgather(sent), block.dtype), peers.rank == 0)
        distance = 1
        while distance < peers.size:
            partner = peers.rank ^ distance
            sent = loss.round(block, own=peers.rank % distance == 0).drop_zeros()  # some formats do not send zeros
            peers.isend(partner, sent)
            theirs = peers.recv(partner)
            pair = [sent, theirs] if peers.rank < partner else [theirs, sent]
            distance *= 2
            block = truncate(SparseVector.merge(pair, block.dtype), peers.rank % distance == 0)
        return block
