"""Dense: the sum of all n values, in a fixed order on any transport."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from sparsecoll.algorithms.base import Algorithm, Loss, Reduction
from sparsecoll.select import Vector
from sparsecoll.transport.all_ranks import exchanged, sum_counts
from sparsecoll.transport.channel import Channel
from sparsecoll.vector import DenseVector, SparseVector, accumulator_dtype

SHORT_CHUNK_BYTES = 1 << 15  # below this, few messages in turn are faster than many at once
PIECE_BYTES = 1 << 18  # at least, of a message in the ring, in which longer chunks pass from host to host
LARGEST_PIECE = 1 << 20


def is_short(size: float, P: int) -> bool:
    """Return whether a dense vector of `size` bytes is summed in 2 ceil(log2 P) messages."""
    return P > 3 and size < SHORT_CHUNK_BYTES * P


@dataclass
class Dense(Algorithm):
    """Exact sum of all n values.

    1. Reduce-scatter: rank j receives chunk j of every rank (pairwise, destinations rotated) and adds the chunks as
       they arrive, in the cyclic order j, j - 1, j - 2, ...
    2. Every rank sends its summed chunk to every other rank.

    Vectors whose chunks are shorter than 32 KiB take ceil(log2 P) messages in each of the two steps: recursive halving
    by offsets (see `halving`), which adds in the order of its steps, and Bruck's allgather.

    Between more than two hosts, chunks above 256 KiB pass round a ring in pieces of that size, and are added in the
    same cyclic order, if their values are added in their own dtype and not rounded. Each link then carries one stream
    in a direction; with those of all ranks at once, the sum takes 1.15 to 1.25 times as long on four hosts of 1 Gb/s.

    The sum of sparse vectors has an entry at every index at which some rank has one, even if it is zero: -0.0 marks a
    missing entry of float32 and float64, since a sum is -0.0 only if all its terms are. For other dtypes and
    operations, and if values are rounded on the wire, the ranks also combine one bit per coordinate; in operations
    other than the sum, a missing entry counts as the neutral element.

    Volume: 2n(P-1)/P words of float32 (Ok-Topk, Table 1, Dense) in 2(P-1) messages, 2(P-1) for each piece of a chunk in
    the ring, or 2 ceil(log2 P). The bits of sparse vectors take another n/16 words and 2 log2 P messages (3n/32 and
    2 log2 P + 2 if P is not a power of two). Memory: 2n values.

    Args:
        k: as in `sparsecoll.Algorithm`.
        selector: as in `sparsecoll.Algorithm`.
    """

    name = "dense"
    semantics = "exact_sum"
    takes_dense = True
    takes_ops = True

    def __call__(self, channel: Channel, x: Vector, k: int) -> Reduction:
        marked = x.dtype.char in "fd" and channel.op.sums and not channel.rounds(x.dtype)  # added in their own dtype
        if isinstance(x, DenseVector):
            local = x
        else:
            local = DenseVector.marked(x) if marked else DenseVector(x.to_dense(channel.op.neutral(x.dtype)))
        edges = [x.length * j // channel.size for j in range(channel.size + 1)]
        size, messages = x.length * x.dtype.itemsize, _pairwise
        if is_short(size, channel.size):
            messages = _by_halving
        elif size > PIECE_BYTES * channel.size and _in_own_dtype(channel, x) and not x.on_gpu:
            messages = _pairwise if channel.size == 2 or channel.transport.one_node else _ring
        reduction = messages(channel, x, local, edges)
        if isinstance(x, SparseVector) and marked:
            reduction.value = reduction.value.stored()  # type: ignore[union-attr]
        elif isinstance(x, SparseVector):
            with channel.phase("pattern"):
                bits = sum_counts(channel.transport, x.mask(), np.bitwise_or)
            reduction.value = reduction.value.select_mask(bits)
        return reduction


def _in_own_dtype(channel: Channel, x: Vector) -> bool:
    """Return whether values are added, and sent, in their own dtype."""
    return accumulator_dtype(x.dtype) == x.dtype and not channel.rounds(x.dtype)


def sum_of_chunk(channel: Channel, x: DenseVector, edges: list[int], into: DenseVector | None = None) -> DenseVector:
    """Return chunk number `rank` of the sum, in the accumulator dtype; x itself is not altered (step 1 of `Dense`).

    `into`, of this dtype, is memory for the chunk; None, the default, for memory of its own.
    """
    total = mine = x.slice(edges[channel.rank], edges[channel.rank + 1])
    with channel.phase("split"):
        for _, message in exchanged(channel.transport, lambda to: channel.pack(x.slice(edges[to], edges[to + 1]))):
            arrived = channel.unpack(message, x.dtype, mine.length)
            total = total.combine(arrived, accumulator_dtype(x.dtype), into if total is mine else total, channel.op)
    return total


def _pairwise(channel: Channel, x: Vector, local: DenseVector, edges: list[int]) -> Reduction:
    rank, size = channel.rank, channel.size
    value = DenseVector.empty(x.length, x.dtype, x)
    regions = [value.slice(a, b) for a, b in pairwise(edges)]
    total = sum_of_chunk(channel, local, edges, regions[rank] if _in_own_dtype(channel, x) else None)
    with channel.phase("gather"):
        own = channel.pack(total.astype(x.dtype))
        for step in range(1, size):
            channel.transport.isend((rank + step) % size, own)
        regions[rank].copy_from(channel.unpack(own, x.dtype, total.length))
        for step in range(1, size):
            source = (rank - step) % size
            channel.recv_into(source, regions[source])
    if _in_own_dtype(channel, x):
        channel.transport.waitall()  # the caller may change the value, from whose memory the own chunk is sent
        return Reduction(value, x)

    def contributed() -> Vector:
        error = total.subtract(regions[rank]).to_sparse()
        return Loss(channel, error.shifted(edges[rank], x.length)).subtract_from(x)

    return Reduction(value, contributed)


def _ring(channel: Channel, x: Vector, local: DenseVector, edges: list[int]) -> Reduction:
    """Run the two steps in pieces; chunk j begins at rank j and passes ranks j - 1, j - 2, ... to j + 1, and on."""
    rank, size = channel.rank, channel.size
    above, below = (rank + 1) % size, (rank - 1) % size
    value = DenseVector.empty(x.length, x.dtype, x)
    eighth = x.length * x.dtype.itemsize // (8 * size)  # of a chunk
    step = min(max(eighth, PIECE_BYTES), LARGEST_PIECE) // x.dtype.itemsize

    def pieces(chunk: int) -> Iterator[tuple[DenseVector, DenseVector]]:
        start, stop = edges[chunk % size], edges[chunk % size + 1]
        for a in range(start, stop, step):
            yield local.slice(a, min(a + step, stop)), value.slice(a, min(a + step, stop))

    with channel.phase("split"):
        for mine, _ in pieces(rank):
            channel.isend_dense(below, mine)
        for later in range(1, size):
            for mine, region in pieces(rank + later):
                total = channel.recv_dense(above, x.dtype, mine.length).combine(mine, x.dtype, None, channel.op)
                channel.isend_dense(below, total)
                if later == size - 1:
                    region.copy_from(total)
    with channel.phase("gather"):
        for later in range(size - 1):
            for _, region in pieces(rank + later):
                channel.recv_into(above, region)
                if later < size - 2:
                    channel.isend_dense(below, region)
        channel.transport.waitall()  # as in `_pairwise`
    return Reduction(value, x)


def _by_halving(channel: Channel, x: Vector, local: DenseVector, edges: list[int]) -> Reduction:
    """Run the two steps on a copy that begins with the own chunk, so that each message is one contiguous slice."""
    rank, size, own = channel.rank, channel.size, edges[channel.rank]
    starts = [edge - own for edge in edges[rank:]] + [x.length - own + edge for edge in edges[1 : rank + 1]]
    sums, dtype = _rotated(local.astype(accumulator_dtype(x.dtype)), own), accumulator_dtype(x.dtype)
    error = DenseVector.zeros(x.length, dtype, x) if channel.rounds(x.dtype) or dtype != x.dtype else None
    with channel.phase("split"):
        distance = 1 << ((size - 1).bit_length() - 1)
        while distance:
            start, stop = starts[distance], starts[min(2 * distance, size)]
            sent = sums.slice(start, stop)
            message = channel.pack(sent)
            channel.transport.isend((rank + distance) % size, message)
            if error is not None:
                error.slice(start, stop).copy_from(sent.subtract(channel.unpack(message, dtype, sent.length)))
            rest = sums.slice(0, starts[min(distance, size - distance)])
            rest.combine(channel.recv_dense((rank - distance) % size, dtype, rest.length), dtype, rest, channel.op)
            distance //= 2
    total = sums.slice(0, starts[1])
    with channel.phase("gather"):
        gathered = _gathered(channel, total.astype(x.dtype), starts)
    value = _rotated(gathered, x.length - own)
    if error is None:
        return Reduction(value, x)
    error.slice(0, starts[1]).copy_from(total.subtract(gathered.slice(0, starts[1])))
    errors = _rotated(error, x.length - own)
    return Reduction(value, lambda: Loss(channel, errors.to_sparse()).subtract_from(x))


def _gathered(channel: Channel, mine: DenseVector, starts: list[int]) -> DenseVector:
    """Allgather the chunks (Bruck), the own one first; `starts` are the offsets of the chunks in this order."""
    rank, size = channel.rank, channel.size
    gathered, have = DenseVector.empty(starts[-1], mine.dtype, mine), 1
    gathered.slice(0, starts[1]).copy_from(channel.unpack(channel.pack(mine), mine.dtype, mine.length))
    while have < size:
        count = min(have, size - have)
        channel.isend_dense((rank - have) % size, gathered.slice(0, starts[count]))
        channel.recv_into((rank + have) % size, gathered.slice(starts[have], starts[have + count]))
        have += count
    return gathered


def _rotated(x: DenseVector, first: int) -> DenseVector:
    """Return a copy that begins with the value at index `first`, as np.roll(x, -first)."""
    rotated = DenseVector.empty(x.length, x.dtype, x)
    rotated.slice(0, x.length - first).copy_from(x.slice(first, x.length))
    rotated.slice(x.length - first, x.length).copy_from(x.slice(0, first))
    return rotated
