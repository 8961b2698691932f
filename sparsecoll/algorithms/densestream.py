"""DenseStream (Li, Chao, Liao, Lv, "DenseStream: A Novel Data Representation for Gradient Sparsification")."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from sparsecoll import formats
from sparsecoll.algorithms.base import Algorithm, Reduction, less
from sparsecoll.algorithms.primitives import partition
from sparsecoll.algorithms.primitives.halving import reduce_scatter
from sparsecoll.formats import FORMATS, Format
from sparsecoll.select import Vector
from sparsecoll.transport.base import Transport
from sparsecoll.transport.collectives import allgatherv
from sparsecoll.vector import DenseVector, SparseVector, accumulator_dtype

BLOCKS = formats.DenseStream()


@dataclass
class DenseStream(Algorithm):
    """Exact sum: Algorithm 2 of the paper, lines 14-20, for any P.

    1. Balanced split: P regions with similar numbers of entries (section III.B.1).
    2. Scatter-reduce: recursive halving; each rank receives the partial sums of its region (section III.B.2). In pairs
       where P is a power of two, as published; by offsets for other P (see `halving`).
    3. Allgatherv of the summed regions, recursive doubling (Bruck's for any P).

    Messages are DenseStream blocks, unless a format other than "auto" is asked for (`formats.Auto()` for the smallest).

    Volume: between 2 * 2k(P-1)/P and 2k[(log2(P)/2 + 1)P - 1] words of COO (equation (6); k entries are 2k words),
    plus 3P words for the boundaries. Messages: 2 ceil(log2 P), as in the paper, and at most 2 ceil(log2 P) for
    averaged boundaries ("even" needs none). Memory: the entries.

    Args:
        repartition: "average" is the paper's; it needs similar supports on all ranks. "histogram" cuts at quantiles of
            all ranks' entries together; right for every distribution. "even" cuts into equal widths.
        fill: of a dense x send, beside the k entries, the true values that stand between them inside DenseStream
            blocks: zeros would take the same bytes there (end of section IV.B). They are part of what contributed.
    """

    name = "densestream"
    semantics = "exact_sum"

    repartition: str = "average"
    fill: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.repartition not in partition.HOW:
            raise ValueError(f"repartition: expected one of {', '.join(partition.HOW)}, got {self.repartition!r}")

    def select(self, x: Vector, k: int, ranks: int = 1) -> SparseVector:
        """The k entries, and with `fill` what lies inside their blocks."""
        chosen = super().select(x, k, ranks)
        return BLOCKS.filled(chosen, x) if self.fill and isinstance(x, DenseVector) else chosen

    def __call__(self, transport: Transport, x: SparseVector, k: int) -> Reduction:
        form: Format = BLOCKS if transport.format is FORMATS["auto"] else transport.format
        lost: list[SparseVector] = []

        def leave(part: SparseVector) -> SparseVector:
            arriving = transport.rounded(part)
            lost.append(part.rounding_error(arriving))
            return arriving

        with transport.phase("repartition"):
            edges = partition.boundaries(transport, x, self.repartition)
        with transport.phase("split"):
            whole = SparseVector.sum([x], accumulator_dtype(x.dtype))
            total = reduce_scatter(transport, whole, edges, leave, format=form, pairs=True)
        with transport.phase("gather"):
            mine = transport.rounded(total.astype(x.dtype))
            lost.append(total.rounding_error(mine))
            blocks = allgatherv(transport, form.encode(mine, transport.value_dtype))
            value = SparseVector.concatenate([formats.decode(block, x.length) for block in blocks])
        return Reduction(value.astype(x.dtype), partial(less, x, lost))
