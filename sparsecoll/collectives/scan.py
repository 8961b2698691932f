"""Scan: the sum of the sparse vectors of all ranks up to each one, or another combination."""

from __future__ import annotations

from typing import Any, overload

from sparsecoll.collectives.options import CallOptions, blocking
from sparsecoll.collectives.signature import AnyComm, Dense, Given, Operator, ScanOptions, T, Triple, Unpack, X, takes
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.channel import Channel
from sparsecoll.vector import SparseVector


@overload
def scan(comm: AnyComm, x: X, op: Operator = "sum", **options: Unpack[ScanOptions]) -> SparseVector | X: ...
@overload
def scan(comm: AnyComm, x: Dense, op: Operator = "sum", **options: Unpack[ScanOptions]) -> SparseVector: ...
@overload
def scan(comm: AnyComm, x: Given, op: Operator = "sum", **options: Unpack[ScanOptions]) -> Triple: ...
@overload
def scan(comm: AnyComm, x: T, op: Operator = "sum", **options: Unpack[ScanOptions]) -> T: ...
@takes(ScanOptions)
def scan(comm: AnyComm, x: Any, op: Operator = "sum", **options: Unpack[ScanOptions]) -> Any:
    """Combine the sparse vectors of ranks 0 to r on each rank r, by default as their sum. Collective.

    The algorithm is recursive doubling for any P, in ceil(log2 P) messages. Vectors are combined in rank order, grouped
    in a way that depends on r and P alone, so that the same input gives the same bits.

    Args:
        comm: communicator, as in `sparsecoll.allreduce`.
        x: vector or array as in `sparsecoll.allreduce`; a dense x requires `k` or `density`.
        op: operation, as in `sparsecoll.allreduce` (default: "sum"), but not "mean" or "replace".
        **options: k, density, missing, format, value_dtype, timeout, check and nonfinite, as in `sparsecoll.allreduce`.

    Returns:
        The result for the ranks up to and including this one, of the same type as x (a SparseVector if x is dense).

    Volume: rank r receives from 2k log2 P words (identical supports) to 2kr words (disjoint supports), in at most
    ceil(log2 P) messages.

    See Also:
        `sparsecoll.exscan`, `sparsecoll.allreduce`.

    >>> def program(comm):
    ...     return sparsecoll.scan(comm, sparsecoll.SparseVector([comm.rank, 4], np.ones(2), 5)).to_dense().tolist()
    >>> sparsecoll.simulate(2, program).results
    [[1.0, 0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 0.0, 0.0, 2.0]]
    """
    given = CallOptions(op=op, **options)
    return blocking(comm, "scan", given, lambda call: scan_vectors(call, x, given))


def scan_vectors(call: CollectiveCall, x: Any, options: CallOptions, inclusive: bool = True) -> Any:
    """Agree on the arguments of a scan, without this rank's x unless `inclusive`, and send the data."""
    if options.operation.name in ("mean", "replace"):
        raise ValueError(f"op: expected neither 'mean' nor 'replace' for a scan, got {options.operation.name!r}")
    channel, entries, back = options.agree(call, x, sums=True)

    with channel.phase("scan"):
        own = channel.merge([entries], partial=True)
        result = prefix(channel, own, inclusive)
        call.transport.waitall()
    return back(result.astype(entries.dtype)._copy_if_overlapping(entries))


def prefix(channel: Channel, x: SparseVector, inclusive: bool) -> SparseVector:
    """Return the entries of the ranks up to this one combined in their order, without its own unless `inclusive`.

    Recursive doubling (Hillis and Steele 1986): before the step of distance d = 1, 2, 4, ..., a rank has the sum of the
    d ranks that end with itself, fewer at the start. It sends this sum to rank r + d, and adds that of rank r - d in
    front of its own.
    """
    rank, size, distance = channel.rank, channel.size, 1
    before = x.slice_entries(0, 0)
    while distance < size:
        if rank + distance < size:
            channel.isend(rank + distance, channel.round(x))
        if rank >= distance:
            arrived = channel.recv(rank - distance).astype(x.dtype)
            if not inclusive:
                before = arrived if distance == 1 else channel.merge([arrived, before], partial=True)
            if inclusive or rank + 2 * distance < size:
                x = channel.merge([arrived, x], partial=True)
        distance *= 2
    return x if inclusive else before
