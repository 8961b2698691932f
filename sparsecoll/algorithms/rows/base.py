"""The base of algorithms that sum rows alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparsecoll.algorithms.base import Algorithm
from sparsecoll.select import Selector


@dataclass
class RowAlgorithm(Algorithm):
    """Exact sum of rows: derive a dataclass of its options, and define `__call__`, whose x is a RowSparse."""

    semantics = "exact_sum"
    takes_ops = True
    takes_rows = True
    takes_vectors = False

    k: int | None = field(default=None, init=False, repr=False, compare=False)
    selector: Selector | None = field(default=None, init=False, repr=False, compare=False)
