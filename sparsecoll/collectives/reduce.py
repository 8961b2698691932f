"""Reduce: the sum of sparse vectors, or another combination, on one rank."""

from __future__ import annotations

from typing import Any, overload

from sparsecoll.collectives import convert, keyed
from sparsecoll.collectives.options import CallOptions, blocking, check_boundaries, check_root
from sparsecoll.collectives.reduce_scatter import sum_of_region
from sparsecoll.collectives.signature import AnyComm, Dense, Given, ReduceOptions, T, Triple, Unpack, X, takes
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.vector import SparseVector


@overload
def reduce(comm: AnyComm, x: X, root: int = 0, **options: Unpack[ReduceOptions]) -> SparseVector | X | None: ...
@overload
def reduce(comm: AnyComm, x: Dense, root: int = 0, **options: Unpack[ReduceOptions]) -> SparseVector | None: ...
@overload
def reduce(comm: AnyComm, x: Given, root: int = 0, **options: Unpack[ReduceOptions]) -> Triple | None: ...
@overload
def reduce(comm: AnyComm, x: T, root: int = 0, **options: Unpack[ReduceOptions]) -> T | None: ...
@takes(ReduceOptions)
def reduce(comm: AnyComm, x: Any, root: int = 0, **options: Unpack[ReduceOptions]) -> Any:
    """Combine sparse vectors on one rank, by default as their sum. Collective.

    1. Reduce-scatter by recursive halving: rank j receives the result for the j-th of P equal parts of the coordinates.
    2. Every rank sends its part to the root.

    Args:
        comm: communicator, as in `sparsecoll.allreduce`.
        x: vector or array as in `sparsecoll.allreduce`; a dense x requires `k` or `density`.
        root: rank that receives the result (default: 0).
        **options: k, density, op, missing, format, value_dtype, timeout, check and nonfinite, as in
            `sparsecoll.allreduce`.

    Returns:
        On the root, the result, of the same type as x (a SparseVector if x is dense); None on the other ranks.

    Volume: each rank receives 2k(P-1)/P words (identical supports) to k log2 P words (disjoint supports) if entries are
    distributed evenly over the P parts, and at most 2k(P-1) if not; then the root receives the sum, in P - 1 messages.
    Keys that are strings go to all ranks, as in `sparsecoll.allreduce`.

    See Also:
        `sparsecoll.allreduce`, `sparsecoll.reduce_scatter`.

    >>> def program(comm):
    ...     y = sparsecoll.reduce(comm, sparsecoll.SparseVector([comm.rank, 4], np.ones(2), 6), root=1)
    ...     return None if y is None else y.to_dense()
    >>> sparsecoll.simulate(2, program).results
    [None, array([1., 1., 0., 0., 2., 0.])]
    """
    given = CallOptions(**options)

    def perform(call: CollectiveCall) -> Any:
        call.signature["root"] = at = check_root(root, call.transport)
        converted = None
        if convert.has_keys(x):
            vector, keys, combined = keyed.to_vector(call, x, given, at_once={})
            if combined:
                return keys(given.result(vector, call.transport)) if call.transport.rank == at else None
            converted = vector, keys
        channel, entries, back = given.agree(call, x, sums=True, converted=converted)
        P = channel.size
        mine = sum_of_region(channel, entries, check_boundaries(None, entries.length, P))
        with channel.phase("gather"):
            mine = mine.astype(entries.dtype)
            if channel.rank != at:
                channel.isend(at, mine)
                return None
            parts = [mine if source == at else channel.recv(source).astype(mine.dtype) for source in range(P)]
        return back(given.result(SparseVector.concatenate(parts)._copy_if_overlapping(entries), call.transport))

    return blocking(comm, "reduce", given, perform)
