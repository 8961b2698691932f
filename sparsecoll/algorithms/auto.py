"""Auto: the exact-sum algorithm that the closed forms of `model` say moves the fewest words."""

from __future__ import annotations

from dataclasses import dataclass

from sparsecoll import model
from sparsecoll.algorithms.allgather import Allgather
from sparsecoll.algorithms.base import Algorithm, Reduction
from sparsecoll.algorithms.dense import Dense
from sparsecoll.transport.base import Transport
from sparsecoll.vector import SparseVector


@dataclass
class Auto(Algorithm):
    """Exact sum. `allgather` while 2k(P-1) words are below the dense 2n(P-1)/P, that is kP < n; else `dense`.

    Every rank sees the same k, n and P, so all choose alike.
    """

    name = "auto"
    semantics = "exact_sum"

    def __call__(self, transport: Transport, x: SparseVector, k: int) -> Reduction:
        P = transport.size
        sparse_wins = model.allgather_words(k, P) <= model.dense_words(x.length, P)
        chosen: Algorithm = Allgather() if sparse_wins else Dense()
        return chosen(transport, x, k)
