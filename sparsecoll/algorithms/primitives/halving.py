"""Reduce-scatter of the regions of a sparse vector in ceil(log2 P) messages for any P.

Rank r has a partial sum of every region; region r + o (mod P) has offset o. In the step of distance d = 2^t, from the
largest below P down to 1, it sends the regions of offsets d .. 2d-1 to rank r + d, where they have offsets 0 .. d-1,
and adds those that it receives from rank r - d. Each rank sends and receives P - 1 regions in total. (This is Bruck's
allgather run backwards; SparDL, section III.B.) If P is a power of two, `pairs` lets ranks r and r XOR d exchange
instead: recursive halving as in Rabenseifner 2004, with the same number of regions in each step.

The regions of one message are adjacent, so they are sent as one vector, or as two if they wrap around the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from sparsecoll.algorithms.primitives.pipeline import Program, interleaved
from sparsecoll.transport.all_ranks import joined, separated
from sparsecoll.transport.channel import Channel
from sparsecoll.vector import SparseVector
from sparsecoll.vector.operation import Operation

Merge = Callable[[list[SparseVector]], SparseVector]
Round = Callable[[SparseVector], SparseVector]
Regions = tuple[int, int]  # (first region, number of regions); after the last region comes region 0


def reduce_scatter(
    channel: Channel, x: SparseVector, edges: list[int], round: Round, merge: Merge | None = None, pairs: bool = False
) -> SparseVector:
    """Return region number `rank` of the sum over all ranks.

    Args:
        x: this rank's entries, in the dtype in which they are summed.
        edges: P + 1 boundaries of the regions.
        round: function that rounds partial sums, before they are sent, to the values that arrive, as `Loss.round`.
        merge: function that combines, in every step, the regions that this rank keeps and those that arrived; None, the
            default, for `Channel.merge`.
        pairs: whether ranks exchange in pairs if P is a power of two.
    """
    return next(interleaved(channel.transport, [program(channel, x, edges, round, merge, pairs)]))


def program(
    channel: Channel, x: SparseVector, edges: Sequence[int], round: Round, merge: Merge | None, pairs: bool
) -> Program:
    """Return the program of `reduce_scatter`, whose steps may be interleaved with others."""
    transport = channel.transport
    for to, source, sent, own, arriving in _schedule(channel.rank, channel.size, pairs):
        blocks = [channel.encode(round(part)) for part in _split(x, edges, sent)]
        transport.isend(to, blocks[0] if len(blocks) == 1 else joined(blocks))
        rest = SparseVector.concatenate(_split(x, edges, own))
        [message] = yield [transport.irecv(source)]
        count = len(_ranges(arriving, channel.size))
        parts = [channel.decode(block) for block in ([message] if count == 1 else separated(message, count))]
        if merge is not None:
            x = merge([rest, *parts])
        elif channel.op.zeros:
            x = _merge_where_both(channel, rest, edges, own, arriving, parts)
        else:
            x = channel.merge([rest, *parts], partial=True)
    return x


def _merge_where_both(
    channel: Channel, x: SparseVector, edges: Sequence[int], own: Regions, arriving: Regions, parts: list[SparseVector]
) -> SparseVector:
    """Return x merged with what arrived, so that entries count as missing only in the regions that were sent."""
    arrived = SparseVector.concatenate([part.astype(x.dtype) for part in parts])
    both = channel.merge([SparseVector.concatenate(_split(x, edges, arriving)), arrived], partial=True)
    others = (own[0] + arriving[1]) % channel.size, own[1] - arriving[1]
    return SparseVector.merge([both, *_split(x, edges, others)], x.dtype, Operation("replace"))  # without overlap


def _schedule(rank: int, size: int, pairs: bool) -> Iterator[tuple[int, int, Regions, Regions, Regions]]:
    """Return (destination, source, regions sent, regions kept, regions received) for each step."""
    distance = 1 << max((size - 1).bit_length() - 1, 0)
    while distance and size > 1:
        if pairs and size & (size - 1) == 0:
            partner, own = rank ^ distance, (rank & -distance, distance)
            yield partner, partner, (partner & -distance, distance), own, own
        else:
            count, to = min(2 * distance, size) - distance, (rank + distance) % size
            yield to, (rank - distance) % size, (to, count), (rank, distance), (rank, count)
        distance //= 2


def _ranges(regions: Regions, size: int) -> list[tuple[int, int]]:
    """Return (first, last + 1) of the one or two contiguous ranges of regions, in the order of the index space."""
    first, stop = regions[0], sum(regions)
    return [(first, stop)] if stop <= size else [(0, stop - size), (first, size)]


def _split(x: SparseVector, edges: Sequence[int], regions: Regions) -> list[SparseVector]:
    """Return the entries in the regions, in ascending order."""
    return [x.split([edges[a], edges[b]])[0] for a, b in _ranges(regions, len(edges) - 1)]
