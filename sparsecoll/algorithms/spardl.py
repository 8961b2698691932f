"""SparDL (Zhao and others, "SparDL: Distributed Deep Learning Training with Efficient Sparse Communication", 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from sparsecoll import formats
from sparsecoll.algorithms.base import Algorithm, Reduction, check_order, less
from sparsecoll.algorithms.halving import reduce_scatter
from sparsecoll.select import Vector, topk
from sparsecoll.transport.base import Transport
from sparsecoll.transport.collectives import allgatherv
from sparsecoll.vector import DenseVector, SparseVector, accumulator


@dataclass
class SparDL(Algorithm):
    """Approximate top k of the sum: every block of the vector yields its k/P largest, cut again after every merge.

    1. Select the k/P largest of each of P blocks of equal width (`select`; shares differ by one where P does not divide
       k, as widths do).
    2. Spar-Reduce-Scatter: ceil(log2 P) messages with distances P/2, ..., 1; after each merge a block is cut to its
       k/P largest again, so that messages do not grow.
    3. Global residual collection: what a merge cuts stays with the rank that merges, so `contributed` may be negative
       at indices that this rank did not hold.
    4. Spar-All-Gather of the blocks (Bruck).

    Volume: 2k(P-1)/P words each for steps 2 and 4: 4k(P-1)/P in all, exactly where blocks are full; 2 ceil(log2 P)
    messages, any P. Memory: the entries. With a `selector` entries beyond a block's share are cut before step 2.

    Raises:
        ValueError: on every rank, if NaN (which has no order) arises in a sum.
    """

    name = "spardl"
    semantics = "approximate_top_k"

    def select(self, x: Vector, k: int, ranks: int = 1) -> SparseVector:
        """The top k/P of each block."""
        if self.selector is not None:
            return self.selector.select(x, k)
        edges, parts = self._edges(x.length, ranks), []
        for block in range(ranks):
            start, stop = edges[block], edges[block + 1]
            if isinstance(x, DenseVector):
                part = topk(x.chunk(start, stop), self._share(k, block, ranks)).shifted(start, x.length)
            else:
                part = topk(x.split([start, stop])[0], self._share(k, block, ranks))
            parts.append(part)
        return SparseVector.concatenate(parts)

    @staticmethod
    def _edges(length: int, ranks: int) -> list[int]:
        return [length * j // ranks for j in range(ranks + 1)]

    @staticmethod
    def _share(k: int, block: int, ranks: int) -> int:
        return k * (block + 1) // ranks - k * block // ranks

    def __call__(self, transport: Transport, x: SparseVector, k: int) -> Reduction:
        size = transport.size
        lost: list[SparseVector] = []

        def cut(region: int, part: SparseVector) -> SparseVector:
            kept = part.top(self._share(k, region, size))
            lost.append(part.without(kept) if kept.nnz < part.nnz else part.part(0, 0))
            return kept

        def leave(part: SparseVector) -> SparseVector:
            arriving = transport.rounded(part)
            lost.append(part.rounding_error(arriving))
            return arriving

        def merge(region: int, own: SparseVector, arrived: SparseVector) -> SparseVector:
            return cut(region, SparseVector.sum([own, arrived], own.dtype))

        with transport.phase("split"):
            whole = SparseVector.sum([x], accumulator(x.dtype))
            parts = [cut(block, part) for block, part in enumerate(whole.split(self._edges(x.length, size)))]
            total = reduce_scatter(transport, parts, merge, leave)
        with transport.phase("gather"):
            mine = transport.rounded(total.astype(x.dtype))
            lost.append(total.rounding_error(mine))
            blocks = allgatherv(transport, transport.encode(mine))
            value = SparseVector.concatenate([formats.decode(block, x.length) for block in blocks])
        return Reduction(check_order(value.astype(x.dtype)), partial(less, x, lost))
