"""gTopk (Shi and others, "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification", ICDCS 2019)."""

from __future__ import annotations

from dataclasses import dataclass

from sparsecoll.algorithms.base import Algorithm, Loss, Reduction
from sparsecoll.select.base import check_order
from sparsecoll.transport.all_ranks import joined, separated
from sparsecoll.transport.channel import Channel
from sparsecoll.vector import SparseVector, accumulator_dtype


@dataclass
class GTopk(Algorithm):
    """Approximate top k of the sum: partial sums are truncated to k entries at every level of a tree. Any P.

    1. Reduction tree (binomial, root 0): a rank adds the partial sum of rank + 2^t to its own and keeps the top k.
    2. Broadcast tree: the root's k entries go back along the same edges, with one bit for each entry that went up that
       edge: whether it is part of the result or was truncated on the way.
    3. contributed = the own entries that were not truncated on any level. An index can be in the result without this
       rank's contribution, so the indices of the result alone do not show what contributed.

    Volume: the root receives and sends at most 2k log2 P words each, in ceil(log2 P) messages each (Ok-Topk, Table 1,
    gTopk); the bits take k/32 words. Memory: k entries per level.

    Args:
        k: as in `sparsecoll.Algorithm`.
        selector: as in `sparsecoll.Algorithm`.

    Raises:
        ValueError: On every rank, if a sum is NaN, which has no order.
    """

    name = "gtopk"
    semantics = "approximate_top_k"

    def __call__(self, channel: Channel, x: SparseVector, k: int) -> Reduction:
        transport, rank = channel.transport, channel.rank
        with channel.phase("reduce"):
            total, merges = self._reduce(channel, x.topk(k), k)
        with channel.phase("broadcast"):
            loss = Loss(channel)
            sent = loss.round(total, None if rank else x.dtype).drop_zeros()  # some formats do not send zeros
            if rank == 0:
                value, alive = sent, sent
                message = channel.encode(value)
            else:
                parent = rank & (rank - 1)
                channel.isend(parent, sent)
                message, bits = separated(transport.recv(parent), 2)
                value, alive = channel.decode(message).astype(x.dtype), sent.select_mask(bits)
            loss.restrict_to(alive)
            for child, before, theirs in reversed(merges):
                transport.isend(child, joined([message, theirs.mask_of(alive)]))
                alive = before.intersect(alive)
        return Reduction(check_order(value), lambda: loss.subtract_from(x.intersect(alive)))

    @staticmethod
    def _reduce(
        channel: Channel, x: SparseVector, k: int
    ) -> tuple[SparseVector, list[tuple[int, SparseVector, SparseVector]]]:
        """Return this rank's partial sum and, for each merge, (child, own partial sum before it, the child's)."""
        total = SparseVector.merge([x], accumulator_dtype(x.dtype))
        merges, distance = [], 1
        while distance < channel.size and not channel.rank & distance:
            child = channel.rank + distance
            if child < channel.size:
                theirs = channel.recv(child)
                merges.append((child, total, theirs))
                total = SparseVector.merge([total, theirs], total.dtype).topk(k)
            distance *= 2
        return total, merges
