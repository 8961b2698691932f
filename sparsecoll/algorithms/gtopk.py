"""gTopk (Shi and others, "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification", ICDCS 2019)."""

from __future__ import annotations

from dataclasses import dataclass

from sparsecoll import formats
from sparsecoll.algorithms.base import Algorithm, Reduction, check_order, less
from sparsecoll.transport.base import Transport
from sparsecoll.transport.collectives import joined, separated
from sparsecoll.vector import SparseVector, accumulator_dtype


@dataclass
class GTopk(Algorithm):
    """Approximate top k of the sum: partial sums are cut to their k largest at every level of a tree. Any P.

    1. Reduction tree (binomial, root 0): a rank adds the partial sum of rank + 2^t to its own and keeps the top k.
    2. Broadcast tree: the root's k entries go back along the same edges, with one bit for each entry that went up that
       edge: whether it is part of the result or was truncated on the way.
    3. contributed = the own entries that were not truncated on any level. An index can be in the result without this
       rank's contribution, so that the indices of the result alone would lose mass.

    Volume: the root receives and sends at most 2k log2 P words each, in ceil(log2 P) messages each (Ok-Topk, Table 1,
    gTopk); the bits take k/32 words. Memory: k entries per level.

    Raises:
        ValueError: On every rank, if a sum is NaN, which has no order.
    """

    name = "gtopk"
    semantics = "approximate_top_k"

    def __call__(self, transport: Transport, x: SparseVector, k: int) -> Reduction:
        with transport.phase("reduce"):
            partial, merges = self._reduce(transport, x.topk(k), k)
        with transport.phase("broadcast"):
            arriving = transport.rounded(partial if transport.rank else partial.astype(x.dtype))
            lost = partial.rounding_error(arriving)
            arriving = arriving.drop_zeros()  # some formats do not send zeros
            if transport.rank == 0:
                value, alive = arriving, arriving
                message = transport.encode(value)
            else:
                parent = transport.rank & (transport.rank - 1)
                transport.send(parent, transport.encode(arriving))
                message, bits = separated(transport.receive(parent), 2)
                value = formats.decode(message, x.length).astype(x.dtype)
                alive = arriving.select_mask(bits)
            lost = lost.intersect(alive)
            for child, before, theirs in reversed(merges):
                transport.send(child, joined([message, theirs.mask_of(alive)]))
                alive = before.intersect(alive)
        return Reduction(check_order(value), lambda: less(x.intersect(alive), [lost]))

    @staticmethod
    def _reduce(
        transport: Transport, x: SparseVector, k: int
    ) -> tuple[SparseVector, list[tuple[int, SparseVector, SparseVector]]]:
        """(this rank's partial sum; for each merge: the child, the own partial before, the child's)."""
        partial = SparseVector.sum([x], accumulator_dtype(x.dtype))
        merges, distance = [], 1
        while distance < transport.size and not transport.rank & distance:
            child = transport.rank + distance
            if child < transport.size:
                theirs = formats.decode(transport.receive(child), x.length)
                merges.append((child, partial, theirs))
                partial = SparseVector.sum([partial, theirs], partial.dtype).topk(k)
            distance *= 2
        return partial, merges
