"""HiTopKComm (Shi and others, "Towards Scalable Distributed Training ... on Public Cloud Clusters", MLSys 2021)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from sparsecoll.algorithms.base import Algorithm, Loss, Reduction, check_order
from sparsecoll.algorithms.primitives.partition import shares
from sparsecoll.select import Vector
from sparsecoll.transport.channel import Channel
from sparsecoll.transport.collectives import node_members
from sparsecoll.vector import SparseVector, accumulator_dtype


@dataclass
class HiTopK(Algorithm):
    """The sum over nodes of the largest entries of each node's sum: selection comes after the sum inside the node.

    The smallest node has m ranks; the vector has m chunks of equal width, one for each of the first m ranks of a node.

    1. Inside a node: reduce-scatter of the chunks, with all entries.
    2. The owner of a chunk selects its k/m largest entries (with the `selector`, if there is one; shares differ by one
       if m does not divide k, and if k is below m, the k chunks that have a share are others in each call).
    3. Between nodes: allgather of the selected entries among the owners of the same chunk (Bruck), which sum them.
    4. Inside a node: allgather of the summed chunks.

    The algorithms in `ALGORITHMS` select on every rank and then sum; this one is passed as an object,
    `algo=sparsecoll.HiTopK()` or, with the paper's selection, `sparsecoll.torch.compressors.MSTopK(
    algo=sparsecoll.HiTopK())`. x may be dense or sparse.

    Entries that the owner does not select from the node's sum stay in its residual, so that `contributed` may be
    negative at indices that this rank did not have. A sum over N nodes has at most Nk entries. With one rank per node
    this is `allgather`. Messages inside a node are in the smallest format, without rounding; between nodes they are in
    the format that the call asks for.

    Volume for N nodes: each rank receives 2(k/m)(N-1) words from other nodes in ceil(log2 N) messages; inside the node,
    n(m-1)/m words of a dense x, then the result. Any P, also nodes of different sizes. Memory: the entries of a node's
    chunk.

    Args:
        k: as in `sparsecoll.Algorithm`.
        selector: as in `sparsecoll.Algorithm`.

    Raises:
        ValueError: On every rank, if a sum is NaN, which has no order.
    """

    name = "hitopk"
    semantics = "approximate_top_k"

    _calls: int = field(default=0, init=False, repr=False)

    def select(self, x: Vector, k: int, ranks: int = 1) -> Vector:  # type: ignore[override]
        """Return x: entries are selected from the sums of nodes."""
        return x

    def __call__(self, channel: Channel, x: Vector, k: int) -> Reduction:
        with channel.phase("nodes"):
            nodes = node_members(channel.transport)
        mine = next(members for members in nodes if channel.rank in members)
        position, chunks = mine.index(channel.rank), min(len(members) for members in nodes)
        edges = [x.length * j // chunks for j in range(chunks + 1)]
        inside, loss = Channel(channel.transport, x.length), Loss(channel)
        total: SparseVector | None = None
        with channel.phase("inside"):
            chunk = self._reduce_scatter(inside, mine[:chunks], mine, x.to_sparse().split(edges))
        if chunk is not None:
            owners = channel.group([members[position] for members in nodes])
            chosen = super().select(chunk, shares(k, chunks, self._calls)[position])
            total = self._between(owners, chunk, chosen, x, loss)
        with channel.phase("inside"):
            value = self._gather(inside, mine[:chunks], mine, total, x.dtype)
        self._calls += 1
        return Reduction(check_order(value), partial(loss.subtract_from, x))

    @staticmethod
    def _reduce_scatter(
        inside: Channel, owners: list[int], mine: list[int], parts: list[SparseVector]
    ) -> SparseVector | None:
        """Return the own chunk of the node's sum, added in the order of its ranks; None on ranks that own no chunk."""
        for owner, part in zip(owners, parts, strict=True):
            if owner != inside.rank:
                inside.isend(owner, part)
        if inside.rank not in owners:
            return None
        own = parts[owners.index(inside.rank)]
        arrived = [own if peer == inside.rank else inside.recv(peer) for peer in mine]
        return SparseVector.merge(arrived, accumulator_dtype(own.dtype))

    @staticmethod
    def _between(owners: Channel, chunk: SparseVector, chosen: SparseVector, x: Vector, loss: Loss) -> SparseVector:
        """Return the sum of the nodes' selected entries, the same bits on all owners, and record the loss."""
        with owners.phase("between"):
            sent = loss.round(loss.truncate(chunk, chosen))
            total = SparseVector.merge(owners.allgather(sent), chunk.dtype)
        value = total.astype(x.dtype)
        if owners.rank == 0:
            loss.add(total.rounding_error(value.astype(total.dtype)))
        return value.drop_zeros()

    @staticmethod
    def _gather(
        inside: Channel, owners: list[int], mine: list[int], total: SparseVector | None, dtype: np.dtype[Any]
    ) -> SparseVector:
        """Return the summed chunks of all owners."""
        if total is not None:
            message = inside.encode(total)
            for peer in mine:
                if peer != inside.rank:
                    inside.transport.isend(peer, message)
        parts = []
        for owner in owners:
            if owner == inside.rank:
                assert total is not None
                parts.append(total)
            else:
                parts.append(inside.recv(owner).astype(dtype))  # bfloat16 arrives as float32
        return SparseVector.concatenate(parts)
