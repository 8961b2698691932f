"""Reduce-scatter of sparse regions in ceil(log2 P) messages for any P: recursive halving by offsets.

Rank r holds a partial sum of every region, region r + o under offset o (mod P). In the step of distance d = 2^t, from
the largest below P down to 1, it sends the regions of offsets d .. 2d-1 to rank r + d, to which they have offsets
0 .. d-1, and takes in those of rank r - d. For P = 2^m these are the messages of recursive halving (Rabenseifner 2004);
for any P a rank sends and receives P - 1 regions in all. (Bruck's allgather run backwards; SparDL, section III.B.)
"""

from __future__ import annotations

from collections.abc import Callable

from sparsecoll import formats
from sparsecoll.formats import Format
from sparsecoll.transport.base import Transport
from sparsecoll.transport.collectives import joined, separated
from sparsecoll.vector import SparseVector

Merge = Callable[[int, SparseVector, SparseVector], SparseVector]  # (region, own partial, arrived) -> partial
Leave = Callable[[SparseVector], SparseVector]  # a partial -> what of it arrives


def reduce_scatter(
    transport: Transport, regions: list[SparseVector], merge: Merge, leave: Leave, format: Format | None = None
) -> SparseVector:
    """The own region (number `rank`) over all ranks.

    Args:
        regions: this rank's P parts.
        merge: called as regions arrive, in the order of the steps.
        leave: called on each partial sum before it is sent: rounds it as the wire does, and takes note of the loss.
        format: of the messages; None: the transport's.
    """
    rank, size = transport.rank, transport.size
    held = {offset: regions[(rank + offset) % size] for offset in range(size)}
    distance = 1 << max((size - 1).bit_length() - 1, 0)
    form = format or transport.format
    while distance and size > 1:
        leaving = [leave(held.pop(offset)) for offset in range(distance, min(2 * distance, size)) if offset in held]
        if leaving:
            message = joined([form.encode(part, transport.value_dtype) for part in leaving])
            transport.send((rank + distance) % size, message)
            blocks = separated(transport.receive((rank - distance) % size), len(leaving))
            for offset, block in enumerate(blocks):
                arrived = formats.decode(block, regions[0].length)
                held[offset] = merge((rank + offset) % size, held[offset], arrived)
        distance //= 2
    return held[0]
