"""Exscan: the sum of the sparse vectors of all ranks before each one, or another combination."""

from __future__ import annotations

from typing import Any

from sparsecoll.collectives.keyed import on_vectors
from sparsecoll.collectives.options import CallOptions
from sparsecoll.collectives.scan import scan_vectors
from sparsecoll.formats import Format


def exscan(
    comm: Any,
    x: Any,
    op: Any = "sum",
    *,
    missing: str = "ignore",
    k: int | None = None,
    density: float | None = None,
    format: str | Format = "auto",
    value_dtype: Any = None,
    timeout: float | None = None,
    check: bool = True,
    nonfinite: str = "raise",
) -> Any:
    """Combine the sparse vectors of ranks 0 to r - 1 on each rank r, by default as their sum. Collective.

    Rank 0 gets a vector without entries.

    The algorithm is that of `sparsecoll.scan`, in ceil(log2 P) messages.

    Args:
        comm: communicator, as in `sparsecoll.allreduce`.
        x: vector or array as in `sparsecoll.allreduce`; a dense x requires `k` or `density`.
        op: operation, as in `sparsecoll.allreduce` (default: "sum"), but not "mean" or "replace".
        missing: "ignore" (the default) or "zero", as in `sparsecoll.allreduce`.
        k: number of entries that each rank selects; None, the default, for all entries of x.
        density: k as a fraction of the length, in (0, 1], instead of `k`.
        format: wire format, a name or a lossless Format (default: "auto").
        value_dtype: dtype of the values on the wire, "float16", "bfloat16" or "float32"; None, the default, for that of
            x.
        timeout: seconds to wait for a message before CommunicationError is raised; None, the default, for no limit.
        check: compare the arguments of all ranks (default: True).
        nonfinite: "raise" (the default) or "pass" values that are NaN or infinite.

    Returns:
        The result for the ranks before this one, of the same type as x (a SparseVector if x is dense). On rank 0 it has
        no entries, where MPI leaves the result undefined and mpi4py returns None.

    Raises:
        ValueError: On every rank, if an argument is invalid on some rank, or a value is not finite.
        TypeError: On every rank, if an argument has a wrong type on some rank.
        CommunicationError: As in `sparsecoll.allreduce`.

    Volume: as of `sparsecoll.scan`.

    See Also:
        `sparsecoll.scan`.

    >>> def program(comm):
    ...     return sparsecoll.exscan(comm, sparsecoll.SparseVector([4], np.ones(1), 5))[4].item()
    >>> sparsecoll.simulate(3, program).results
    [0.0, 1.0, 2.0]
    """
    options = CallOptions(
        k=k,
        density=density,
        format=format,
        value_dtype=value_dtype,
        op=op,
        missing=missing,
        timeout=timeout,
        check=check,
        nonfinite=nonfinite,
    )
    return on_vectors(comm, "exscan", x, options, lambda call, x: scan_vectors(call, x, options, inclusive=False))
