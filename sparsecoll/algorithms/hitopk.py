"""HiTopKComm (Shi and others, "Towards Scalable Distributed Training ... on Public Cloud Clusters", MLSys 2021)."""

from __future__ import annotations

from dataclasses import dataclass

from sparsecoll import formats
from sparsecoll.algorithms.base import Algorithm, Reduction, check_order, less
from sparsecoll.formats import FORMATS
from sparsecoll.select import Vector, topk
from sparsecoll.transport.base import Transport
from sparsecoll.transport.collectives import allgatherv, node_members
from sparsecoll.transport.group import group
from sparsecoll.vector import DenseVector, SparseVector, accumulator_dtype


@dataclass
class HiTopK(Algorithm):
    """The sum over nodes of the largest entries of each node's sum: selection comes after the sum inside the node.

    The smallest node has m ranks; the vector has m chunks of equal width, one for each of the first m ranks of a node.

    1. Inside a node: reduce-scatter of the chunks, with all entries.
    2. The owner of a chunk selects its k/m largest entries (with the `selector`, if there is one; shares differ by one
       if m does not divide k).
    3. Between nodes: allgather of the selected entries among the owners of the same chunk (Bruck), which sum them.
    4. Inside a node: allgather of the summed chunks.

    The algorithms in `ALGORITHMS` select on every rank and then sum; this one is passed as an object,
    `algo=sparsecoll.HiTopK()` or, with the paper's selection, `sparsecoll.torch.compressors.MSTopK(
    algo=sparsecoll.HiTopK())`. x may be dense or sparse.

    What the owner does not select from the node's sum stays with it, so that `contributed` may be negative at indices
    that this rank did not have. A sum over N nodes has at most Nk entries. With one rank per node this is `allgather`.
    Messages inside a node are in the smallest format, without rounding; between nodes they are in the format that the
    call asks for.

    Volume for N nodes: each rank receives 2(k/m)(N-1) words from other nodes in ceil(log2 N) messages; inside the node,
    n(m-1)/m words of a dense x, then the result. Any P, also nodes of different sizes. Memory: the entries of a node's
    chunk.

    Raises:
        ValueError: On every rank, if a sum is NaN, which has no order.
    """

    name = "hitopk"
    semantics = "approximate_top_k"

    def select(self, x: Vector, k: int, ranks: int = 1) -> Vector:  # type: ignore[override]
        """All of x: entries are selected from the sums of nodes."""
        return x

    def __call__(self, transport: Transport, x: Vector, k: int) -> Reduction:
        with transport.phase("nodes"):
            nodes = node_members(transport)
        mine = next(members for members in nodes if transport.rank in members)
        place, chunks = mine.index(transport.rank), min(len(members) for members in nodes)
        local = x if isinstance(x, SparseVector) else x.to_sparse()
        edges = [x.length * j // chunks for j in range(chunks + 1)]
        lost: list[SparseVector] = []
        total: SparseVector | None = None
        with transport.phase("inside"):
            chunk = self._reduce_scatter(transport, mine[:chunks], mine, local.split(edges))
        if chunk is not None:
            owners = group(transport, [members[place] for members in nodes])
            share = k * (place + 1) // chunks - k * place // chunks
            chosen = topk(chunk, share) if self.selector is None else self.selector.select(chunk, share)
            total = self._between(owners, chunk, chosen, x, lost)
        with transport.phase("inside"):
            value = self._gather(transport, mine[:chunks], mine, total, x)
        return Reduction(check_order(value), lambda: self._contributed(x, local, lost))

    @staticmethod
    def _reduce_scatter(
        transport: Transport, owners: list[int], mine: list[int], parts: list[SparseVector]
    ) -> SparseVector | None:
        """The own chunk of the node's sum, added in the order of its ranks; None on ranks that own none."""
        rank = transport.rank
        for owner, part in zip(owners, parts, strict=True):
            if owner != rank:
                transport.send(owner, FORMATS["auto"].encode(part))
        if rank not in owners:
            return None
        own = parts[owners.index(rank)]
        arrived = [own if peer == rank else formats.decode(transport.receive(peer), own.length) for peer in mine]
        return SparseVector.sum(arrived, accumulator_dtype(own.dtype))

    @staticmethod
    def _between(
        owners: Transport, chunk: SparseVector, chosen: SparseVector, x: Vector, lost: list[SparseVector]
    ) -> SparseVector:
        """The sum over nodes of what each selected, the same bits on all owners; notes what does not enter it."""
        with owners.phase("between"):
            sent = owners.rounded(chosen)
            lost += [chunk.difference(chosen), chosen.rounding_error(sent)]
            blocks = allgatherv(owners, owners.encode(sent))
            total = SparseVector.sum([formats.decode(block, x.length) for block in blocks], chunk.dtype)
        value = total.astype(x.dtype)
        if owners.rank == 0:
            lost.append(total.rounding_error(value.astype(total.dtype)))
        return value.drop_zeros()

    @staticmethod
    def _gather(
        transport: Transport, owners: list[int], mine: list[int], total: SparseVector | None, x: Vector
    ) -> SparseVector:
        if total is not None:
            message = FORMATS["auto"].encode(total)
            for peer in mine:
                if peer != transport.rank:
                    transport.send(peer, message)
        parts = []
        for owner in owners:
            if owner == transport.rank:
                assert total is not None
                parts.append(total)
            else:
                parts.append(formats.decode(transport.receive(owner), x.length))
        return SparseVector.concatenate(parts)

    @staticmethod
    def _contributed(x: Vector, local: SparseVector, lost: list[SparseVector]) -> Vector:
        if isinstance(x, SparseVector):
            return less(local, lost)
        rest = DenseVector(x.values.astype(accumulator_dtype(x.dtype)))
        for part in lost:
            rest.subtract_at(part)
        return rest
