"""Allgather: every rank receives every other rank's entries and sums them itself (TopkA in Ok-Topk's Table 1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from sparsecoll.algorithms.base import Algorithm, Reduction, check_region
from sparsecoll.algorithms.primitives import pipeline
from sparsecoll.formats import Buffer
from sparsecoll.transport.all_ranks import allgatherv
from sparsecoll.transport.call import AGREEMENT_BYTES
from sparsecoll.transport.channel import Channel
from sparsecoll.vector import SparseVector


@dataclass
class Allgather(Algorithm):
    """Exact sum of the given vectors, added in rank order.

    1. Allgather the encoded vectors (Bruck: recursive doubling for any P), in calls without k and density together with
       the arguments that the ranks compare. On one machine, vectors of 128 KiB and more are sent from every rank to
       every other one. Between nodes, those of 512 KiB and more are divided into chunks of the index space for this, so
       that one chunk is summed while the next ones are in flight, unless the format is lossy. The chunks are those in
       which the last vectors had equal numbers of entries, as far as their chunks show.
    2. Sum all vectors in one pass, or leave that to the caller who wants dense values (`Channel.deferred`).

    Volume: 2k(P-1) words with COO (Ok-Topk, Table 1) in ceil(log2 P) messages, or P - 1 messages per chunk; r(P-1) rows
    of a RowSparse with r. Memory: the entries, never P*n.

    Args:
        k: as in `sparsecoll.Algorithm`.
        selector: as in `sparsecoll.Algorithm`.
    """

    name = "allgather"
    semantics = "exact_sum"
    sends_sums = False
    takes_ops = True
    takes_rows = True

    _edges: list[int] = field(default_factory=list, init=False, repr=False, compare=False)

    def early(self, channel: Channel, x: SparseVector) -> Buffer | None:
        if self._stages(channel, x.dtype, x.nnz) > 1:
            return np.empty(AGREEMENT_BYTES, np.uint8)
        return channel.format.encode(x, channel.value_dtype, room=AGREEMENT_BYTES)

    def __call__(self, channel: Channel, x: SparseVector, k: int) -> Reduction:
        stages = self._stages(channel, x.dtype, k)
        if stages > 1 and channel.size > 1:
            return self._pipelined(channel, x, k, stages)
        blocks = channel.gathered
        if not blocks or not all(map(len, blocks)):
            with channel.phase("gather"):
                blocks = allgatherv(channel.transport, channel.encode(x), channel.is_direct(x, k))
        own = -1 if channel.format.lossy else channel.rank  # a lossy format may change x once more
        parts = [x if rank == own else channel.decode(block) for rank, block in enumerate(blocks)]
        if channel.deferred:
            return Reduction(lambda: channel.merge(parts), x, [parts])
        with channel.phase("merge"):
            return Reduction(channel.merge(parts), x)

    @staticmethod
    def _stages(channel: Channel, dtype: np.dtype[Any], entries: int) -> int:
        """Return the number of chunks; one in lossy formats, which would round a part of x anew, and of rows."""
        if channel.format.lossy or channel.width:
            return 1
        return pipeline.chunks(entries * (dtype.itemsize + 1), channel.transport.one_node)

    def _pipelined(self, channel: Channel, x: SparseVector, k: int, stages: int) -> Reduction:
        fits = len(self._edges) == stages + 1 and self._edges[-1] == x.length
        edges = self._edges if fits else [x.length * j // stages for j in range(stages + 1)]
        with channel.phase("gather"):
            arriving = self._arriving(channel, x, edges)
            if channel.deferred:
                chunks = list(arriving)
                return Reduction(lambda: SparseVector.concatenate([channel.merge(c) for c in chunks]), x, chunks)
            sums = (channel.merge(chunk) for chunk in arriving)
            return Reduction(SparseVector.collect(sums, min(channel.size * k, x.length)), x)

    def _arriving(self, channel: Channel, x: SparseVector, edges: list[int]) -> Iterator[list[SparseVector]]:
        """Yield the vectors of all ranks in each chunk, and then balance the chunks for the next call."""
        counts = []
        for (low, high), parts in zip(pairwise(edges), pipeline.allgather(channel, x.split(edges)), strict=True):
            counts.append(sum(part.nnz for part in parts))
            yield [check_region(part, low, high, source) for source, part in enumerate(parts)]
        self._edges = rebalanced(edges, counts)


def rebalanced(edges: list[int], counts: list[int]) -> list[int]:
    """Return edges of as many chunks with equal numbers of entries, if those of each chunk are spread evenly."""
    total, found, below, chunk = sum(counts), [edges[0]], 0, 0
    for number in range(1, len(counts)):
        wanted = total * number // len(counts)
        while chunk < len(counts) - 1 and below + counts[chunk] < wanted:
            below += counts[chunk]
            chunk += 1
        low, high = edges[chunk : chunk + 2]
        found.append(low + (high - low) * (wanted - below) // max(counts[chunk], 1))
    return [*found, edges[-1]]
