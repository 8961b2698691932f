"""DenseStream (Li, Chao, Liao, Lv, "DenseStream: A Novel Data Representation for Gradient Sparsification")."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from sparsecoll import formats
from sparsecoll.algorithms.base import Algorithm, Loss, Reduction
from sparsecoll.algorithms.primitives import halving, partition, pipeline
from sparsecoll.errors import check_choice, check_flag
from sparsecoll.formats import FORMATS
from sparsecoll.select import Vector
from sparsecoll.transport.channel import Channel
from sparsecoll.vector import DenseVector, SparseVector

BLOCKS = formats.DenseStreamFormat()


@dataclass
class DenseStream(Algorithm):
    """Exact sum: Algorithm 2 of the paper, lines 14-20, for any P.

    1. Balanced split into P regions with similar numbers of entries (section III.B.1).
    2. Reduce-scatter by recursive halving: each rank receives the partial sums of its region (section III.B.2). Ranks
       exchange in pairs if P is a power of two, as published, and by offsets for other P (see `halving`).
    3. Allgatherv of the summed regions by recursive doubling (Bruck's for any P).

    Messages are DenseStream blocks unless the call asks for another format than "auto" (`formats.AutoFormat()` for the
    smallest). Between nodes, regions of 512 KiB and more are divided into chunks, so that one chunk is summed while the
    next ones are in flight.

    Volume: between 2 * 2k(P-1)/P and 2k[(log2(P)/2 + 1)P - 1] words of COO (equation (6); k entries are 2k words), plus
    4(P-1) words for averaged boundaries (up to 12P if P is no power of two; "even": none). Messages: 2 ceil(log2 P),
    as in the paper (ceil(log2 P) + P - 1 per chunk), and as many at most for the boundaries. Memory: the entries.

    Args:
        k: as in `sparsecoll.Algorithm`.
        selector: as in `sparsecoll.Algorithm`.
        repartition: how the boundaries of the regions are found. "average" (the default, as published) averages the
            quantiles of each rank, which requires similar supports. "histogram" uses quantiles of the entries of all
            ranks together, which balances any distribution. "even" makes regions of equal width.
        fill: for a dense x, send true values instead of the zeros inside DenseStream blocks, which takes no more bytes
            of the format "densestream" without `value_dtype` (end of section IV.B); they count as contributed
            (default: False).

    Raises:
        ValueError: `repartition` is none of these.
        TypeError: `fill` is not a bool.
    """

    name = "densestream"
    semantics = "exact_sum"
    takes_ops = True

    repartition: str = "average"
    fill: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("repartition", self.repartition, partition.METHODS)
        check_flag("fill", self.fill)

    def select(self, x: Vector, k: int, ranks: int = 1) -> SparseVector:
        """Select the k entries, and with `fill` also the values inside their blocks."""
        chosen = super().select(x, k, ranks)
        return BLOCKS.filled(chosen, x) if self.fill and isinstance(x, DenseVector) else chosen

    def __call__(self, channel: Channel, x: SparseVector, k: int) -> Reduction:
        if channel.format is FORMATS["auto"]:
            channel = channel.with_format(BLOCKS)
        loss = Loss(channel)
        with channel.phase("repartition"):
            edges = partition.boundaries(channel.transport, x, self.repartition)

        def summed(part: SparseVector) -> pipeline.Program:
            total = yield from halving.program(channel, part, edges, loss.round, None, pairs=True)
            return loss.round(total, x.dtype)

        chunks = pipeline.regions(channel, channel.merge([x], partial=True), edges, k, summed)
        value = SparseVector.concatenate([chunk[rank] for rank in range(channel.size) for chunk in chunks])
        return Reduction(value.astype(x.dtype), partial(loss.subtract_from, x))
