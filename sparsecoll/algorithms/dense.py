"""Dense: the sum of all n values, as MPI_Allreduce would form it, in a fixed order on any transport."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from sparsecoll.algorithms.base import Algorithm, Reduction
from sparsecoll.select import Vector
from sparsecoll.transport.base import Transport
from sparsecoll.vector import DenseVector, SparseVector, accumulator


@dataclass
class Dense(Algorithm):
    """Exact sum.

    1. Reduce-scatter: rank j receives everybody's chunk j (pairwise, destinations rotated) and adds them as they come,
       in the cyclic order j, j - 1, j - 2, ...
    2. Every rank sends its summed chunk to every other.

    Volume: 2n(P-1)/P words of float32 (Ok-Topk, Table 1, Dense), 2(P-1) messages. Memory: 2n values.
    """

    name = "dense"
    semantics = "exact_sum"
    takes_dense = True

    def __call__(self, transport: Transport, x: Vector, k: int) -> Reduction:
        rank, size = transport.rank, transport.size
        local = x if isinstance(x, DenseVector) else DenseVector(x.to_dense())
        edges = [x.length * j // size for j in range(size + 1)]
        mine = local.chunk(edges[rank], edges[rank + 1])
        with transport.phase("split"):
            for step in range(1, size):
                to = (rank + step) % size
                transport.send(to, transport.pack(local.chunk(edges[to], edges[to + 1])))
            total = mine
            for step in range(1, size):
                message = transport.receive((rank - step) % size)
                total = total.plus(
                    transport.unpack(message, x.dtype, mine.length), accumulator(x.dtype), total is not mine
                )
        with transport.phase("gather"):
            value = DenseVector.empty(x.length, x.dtype, x)
            own = transport.pack(total.astype(x.dtype))
            for step in range(1, size):
                transport.send((rank + step) % size, own)
            arriving = {rank: own}
            places = [value.chunk(a, b) for a, b in pairwise(edges)]
            for step in range(1, size):
                source = (rank - step) % size
                arriving[source] = transport.receive(source, transport.place(places[source]))
            for source, message in arriving.items():
                places[source].take(transport.unpack(message, x.dtype, places[source].length))
        if total.dtype == x.dtype and not transport.rounds(x.dtype):
            return Reduction(value, x)
        return Reduction(value, lambda: self._contributed(x, local, total.minus(places[rank]), edges[rank]))

    @staticmethod
    def _contributed(x: Vector, local: DenseVector, lost: DenseVector, start: int) -> SparseVector | DenseVector:
        """x less what rounding on the wire took from this rank's chunk of the sum."""
        error = lost.to_sparse().shifted(start, x.length)
        if not error.nnz:
            return x
        if isinstance(x, SparseVector):
            return SparseVector.sum([x, error.scaled(-1)], error.dtype)
        rest = DenseVector(local.values.astype(error.dtype))
        rest.subtract_at(error)
        return rest
