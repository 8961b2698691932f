"""Allgather: every rank receives every other rank's entries and sums them itself (TopkA in Ok-Topk's Table 1)."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from sparsecoll.algorithms.base import Algorithm, Reduction, check_region, merged
from sparsecoll.algorithms.primitives import pipeline
from sparsecoll.formats import Buffer
from sparsecoll.transport.call import AGREEMENT_BYTES
from sparsecoll.transport.channel import Channel
from sparsecoll.transport.collectives import allgatherv, is_direct
from sparsecoll.vector import SparseVector


@dataclass
class Allgather(Algorithm):
    """Exact sum of the given vectors, added in rank order.

    1. Allgather the encoded vectors (Bruck: recursive doubling for any P), in calls without k and density together with
       the arguments that the ranks compare. On one machine, vectors of 128 KiB and more are sent from every rank to
       every other one. Between nodes, those of 512 KiB and more are divided into chunks of the index space for this, so
       that one chunk is summed while the next ones are in flight, unless the format is lossy. The chunks are those in
       which the last sum had equal numbers of entries.
    2. Sum all vectors in one pass.

    Volume: 2k(P-1) words with COO (Ok-Topk, Table 1) in ceil(log2 P) messages, or P - 1 messages per chunk. Memory: the
    entries, never P*n.

    Args:
        k: as in `sparsecoll.Algorithm`.
        selector: as in `sparsecoll.Algorithm`.
    """

    name = "allgather"
    semantics = "exact_sum"
    sends_sums = False
    takes_ops = True

    _edges: list[int] = field(default_factory=list, init=False, repr=False, compare=False)

    def early(self, channel: Channel, x: SparseVector) -> Buffer | None:
        if self._stages(channel, x, x.nnz) > 1:
            return np.empty(AGREEMENT_BYTES, np.uint8)
        return channel.format.encode(x, channel.value_dtype, room=AGREEMENT_BYTES)

    def __call__(self, channel: Channel, x: SparseVector, k: int) -> Reduction:
        stages = self._stages(channel, x, k)
        if stages > 1 and channel.size > 1:
            value = self._pipelined(channel, x, stages)
            self._edges = value._subdivide([0, x.length], stages)
            return Reduction(value, x)
        blocks = channel.gathered
        if not blocks or not all(map(len, blocks)):
            with channel.phase("gather"):
                direct = is_direct(channel.transport, k * (x.indices.itemsize + x.dtype.itemsize))
                blocks = allgatherv(channel.transport, channel.encode(x), direct)
        own = -1 if channel.format.lossy else channel.rank  # a lossy format may change x once more
        parts = [x if rank == own else channel.decode(block) for rank, block in enumerate(blocks)]
        with channel.phase("merge"):
            return Reduction(merged(channel, parts, x), x)

    @staticmethod
    def _stages(channel: Channel, x: SparseVector, entries: int) -> int:
        """Return the number of chunks; one in lossy formats, which would round a part of x anew."""
        if channel.format.lossy:
            return 1
        return pipeline.chunks(entries * (x.dtype.itemsize + 1), channel.transport.one_node)

    def _pipelined(self, channel: Channel, x: SparseVector, stages: int) -> SparseVector:
        fits = len(self._edges) == stages + 1 and self._edges[-1] == x.length
        edges = self._edges if fits else [x.length * j // stages for j in range(stages + 1)]
        with channel.phase("gather"):
            sums = []
            for (low, high), parts in zip(pairwise(edges), pipeline.allgather(channel, x.split(edges)), strict=True):
                checked = [check_region(part, low, high, source) for source, part in enumerate(parts)]
                sums.append(merged(channel, checked, x))
            return SparseVector.concatenate(sums)
