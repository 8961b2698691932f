"""Exscan: the sum of the sparse vectors of all ranks before each one, or another combination."""

from __future__ import annotations

from typing import Any, overload

from sparsecoll.collectives.options import CallOptions, blocking
from sparsecoll.collectives.scan import scan_vectors
from sparsecoll.collectives.signature import AnyComm, Dense, Given, Operator, ScanOptions, T, Triple, Unpack, X, takes
from sparsecoll.vector import SparseVector


@overload
def exscan(comm: AnyComm, x: X, op: Operator = "sum", **options: Unpack[ScanOptions]) -> SparseVector | X: ...
@overload
def exscan(comm: AnyComm, x: Dense, op: Operator = "sum", **options: Unpack[ScanOptions]) -> SparseVector: ...
@overload
def exscan(comm: AnyComm, x: Given, op: Operator = "sum", **options: Unpack[ScanOptions]) -> Triple: ...
@overload
def exscan(comm: AnyComm, x: T, op: Operator = "sum", **options: Unpack[ScanOptions]) -> T: ...
@takes(ScanOptions)
def exscan(comm: AnyComm, x: Any, op: Operator = "sum", **options: Unpack[ScanOptions]) -> Any:
    """Combine the sparse vectors of ranks 0 to r - 1 on each rank r, by default as their sum. Collective.

    Rank 0 gets a vector without entries.

    The algorithm is that of `sparsecoll.scan`, in ceil(log2 P) messages.

    Args:
        comm: communicator, as in `sparsecoll.allreduce`.
        x: vector or array as in `sparsecoll.allreduce`; a dense x requires `k` or `density`.
        op: operation, as in `sparsecoll.allreduce` (default: "sum"), but not "mean" or "replace".
        **options: k, density, missing, format, value_dtype, timeout, check and nonfinite, as in `sparsecoll.allreduce`.

    Returns:
        The result for the ranks before this one, of the same type as x (a SparseVector if x is dense). On rank 0 it has
        no entries, where MPI leaves the result undefined and mpi4py returns None.

    Volume: as of `sparsecoll.scan`.

    See Also:
        `sparsecoll.scan`.

    >>> def program(comm):
    ...     return sparsecoll.exscan(comm, sparsecoll.SparseVector([4], np.ones(1), 5))[4].item()
    >>> sparsecoll.simulate(3, program).results
    [0.0, 1.0, 2.0]
    """
    given = CallOptions(op=op, **options)
    return blocking(comm, "exscan", given, lambda call: scan_vectors(call, x, given, inclusive=False))
