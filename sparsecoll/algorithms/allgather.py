"""Allgather: every rank receives every other rank's entries and sums them itself (TopkA in Ok-Topk's Table 1)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from sparsecoll import formats
from sparsecoll.algorithms.base import Algorithm, Reduction, summed, within
from sparsecoll.algorithms.primitives import pipeline
from sparsecoll.formats import Buffer
from sparsecoll.transport.base import PendingReceive, Transport
from sparsecoll.transport.collectives import allgatherv
from sparsecoll.vector import SparseVector


@dataclass
class Allgather(Algorithm):
    """Exact sum of the given vectors, added in rank order.

    1. Allgather the encoded vectors (Bruck: recursive doubling for any P). Between nodes, vectors of 512 KiB and more
       are sent in chunks of the index space, from every rank to every other, so that one chunk is summed while the next
       ones travel. An object divides the index space so that the chunks of the last sum had equal numbers of entries.
    2. Sum all vectors in one pass.

    Volume: 2k(P-1) words with COO (Ok-Topk, Table 1) in ceil(log2 P) messages, or P - 1 messages per chunk. Memory: the
    entries, never P*n.
    """

    name = "allgather"
    semantics = "exact_sum"
    sends_sums = False

    _edges: list[int] = field(default_factory=list, init=False, repr=False)

    def __call__(self, transport: Transport, x: SparseVector, k: int) -> Reduction:
        stages = pipeline.pieces(k * (x.dtype.itemsize + 1), transport.one_node)
        if stages > 1 and transport.size > 1:
            value = self._in_pieces(transport, x, stages)
            self._edges = value.subdivide([0, x.length], stages)
            return Reduction(value, x)
        with transport.phase("gather"):
            blocks = allgatherv(transport, transport.encode(x))
        with transport.phase("merge"):
            value = summed([formats.decode(block, x.length) for block in blocks], x)
        return Reduction(value, x)

    def _in_pieces(self, transport: Transport, x: SparseVector, stages: int) -> SparseVector:
        rank, size = transport.rank, transport.size
        fits = len(self._edges) == stages + 1 and self._edges[-1] == x.length
        edges = self._edges if fits else [x.length * j // stages for j in range(stages + 1)]
        parts = x.split(edges)
        own: deque[Buffer] = deque()
        sums: list[SparseVector] = []

        def begin(stage: int) -> list[PendingReceive]:
            own.append(transport.encode(parts[stage]))
            for step in range(1, size):
                transport.send((rank + step) % size, own[-1])
            return [transport.expect((rank - step) % size) for step in range(1, size)]

        def finish(arrived: list[Buffer]) -> None:
            blocks = [own.popleft(), *arrived]  # of rank, rank - 1, ...
            low, high = edges[len(sums)], edges[len(sums) + 1]
            arriving = [formats.decode(blocks[(rank - source) % size], x.length) for source in range(size)]
            sums.append(summed([within(part, low, high, source) for source, part in enumerate(arriving)], x))

        with transport.phase("gather"):
            pipeline.run(transport, stages, begin, finish)
            return SparseVector.concatenate(sums)
