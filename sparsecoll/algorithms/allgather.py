"""Allgather: every rank receives every other rank's entries and sums them itself (TopkA in Ok-Topk's Table 1)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from sparsecoll.algorithms.base import Algorithm, Loss, Reduction
from sparsecoll.algorithms.primitives import partition, pipeline
from sparsecoll.formats import Buffer
from sparsecoll.transport.all_ranks import allgatherv
from sparsecoll.transport.call import AGREEMENT_BYTES
from sparsecoll.transport.channel import Channel
from sparsecoll.vector import SparseVector
from sparsecoll.vector.values import accumulator_dtype


@dataclass
class Allgather(Algorithm):
    """Exact sum of the given vectors, added in rank order.

    1. Allgather the encoded vectors (Bruck: recursive doubling for any P), in calls without k and density together with
       the arguments that the ranks compare. Between nodes, vectors of 512 KiB and more are divided into chunks of the
       index space and sent from every rank to every other one, so that one chunk is summed while the next ones are in
       flight, unless the format is lossy; rows into parts of equal number, which are decoded meanwhile.
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

    def early(self, channel: Channel, x: SparseVector) -> Buffer | None:
        if pipeline.chunks_of(channel, x.dtype, x.nnz) > 1:
            return np.empty(AGREEMENT_BYTES, np.uint8)
        return channel.format.encode(x, channel.value_dtype, room=AGREEMENT_BYTES)

    def __call__(self, channel: Channel, x: SparseVector, k: int) -> Reduction:
        stages = pipeline.chunks_of(channel, x.dtype, k)
        if stages > 1 and not channel.width:
            return self._pipelined(channel, x, k, stages)
        if stages > 1 and channel.op.sums:
            return self._of_rows(channel, x, stages)
        blocks = channel.gathered
        if not blocks or not all(map(len, blocks)):
            with channel.phase("gather"):
                blocks = allgatherv(channel.transport, channel.encode(x))
        own = -1 if channel.format.lossy else channel.rank  # a lossy format may change x once more
        parts = [x if rank == own else channel.decode(block) for rank, block in enumerate(blocks)]
        if channel.deferred and not _widens(channel, x):
            return Reduction(lambda: channel.merge(parts), x, [parts])
        with channel.phase("merge"):
            return _rounded(channel, x, channel.merge(parts, partial=_widens(channel, x)))

    @staticmethod
    def _of_rows(channel: Channel, x: Any, stages: int) -> Reduction:
        """Decode parts of the stored rows, which are not of the same rows on all ranks, while others are in flight."""
        parts = [x.slice_entries(a, b) for a, b in pairwise(partition.even(x.nnz, stages))]
        with channel.phase("gather"):
            arrived = list(pipeline.allgather(channel, parts, rounded=True))
        with channel.phase("merge"):
            rows = [part for parts in zip(*arrived, strict=True) for part in parts]
            return _rounded(channel, x, channel.merge(rows, partial=_widens(channel, x)))

    @staticmethod
    def _pipelined(channel: Channel, x: SparseVector, k: int, stages: int) -> Reduction:
        parts = x.split(partition.even(x.length, stages))
        with channel.phase("gather"):
            arriving = pipeline.allgather(channel, parts, rounded=True)
            if channel.deferred and not _widens(channel, x):
                chunks = list(arriving)
                return Reduction(lambda: SparseVector.concatenate([channel.merge(c) for c in chunks]), x, chunks)
            sums = (channel.merge(chunk, partial=_widens(channel, x)) for chunk in arriving)
            return _rounded(channel, x, SparseVector.collect(sums, min(channel.size * k, x.length)))


def _widens(channel: Channel, x: SparseVector) -> bool:
    """Return whether sums of values are formed in a wider dtype of floats, and what rounding takes is accounted for."""
    dtype = channel.dtype or x.dtype
    return channel.op.sums and accumulator_dtype(dtype) != dtype


def _rounded(channel: Channel, x: SparseVector, total: SparseVector) -> Reduction:
    value = total.astype(channel.dtype or total.dtype)
    if value.dtype == total.dtype or channel.rank > 0:  # of the ranks, one records what rounding takes
        return Reduction(value, x)
    return Reduction(value, lambda: Loss(channel, total.rounding_error(value)).subtract_from(x))
