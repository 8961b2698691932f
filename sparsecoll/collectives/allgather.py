"""Allgather: every rank's sparse vector on every rank."""

from __future__ import annotations

from typing import Any

from sparsecoll.collectives.keyed import on_vectors
from sparsecoll.collectives.messages import rows_of
from sparsecoll.collectives.options import CallOptions
from sparsecoll.collectives.rows import allgather_rows
from sparsecoll.formats import Format
from sparsecoll.transport.call import CollectiveCall


def allgather(
    comm: Any,
    x: Any,
    *,
    format: str | Format = "auto",
    value_dtype: Any = None,
    timeout: float | None = None,
    check: bool = True,
) -> list[Any]:
    """Gather every rank's sparse vector on every rank. Collective.

    Bruck's algorithm takes ceil(log2 P) messages.

    Args:
        comm: communicator, as in `sparsecoll.allreduce`.
        x: sparse vector, matrix, RowSparse or dense array as in `sparsecoll.allreduce`, with the same length (shape of
            an array) and dtype on all ranks.
        format: wire format, a name or a Format (default: "auto").
        value_dtype: dtype of the values on the wire, "float16", "bfloat16" or "float32"; None, the default, for that of
            x.
        timeout: seconds to wait for a message before CommunicationError is raised; None, the default, for no limit.
        check: compare the arguments of all ranks (default: True).

    Returns:
        List of P vectors of the same type as x, in rank order. All are rounded as on the wire, this rank's own too.

    Raises:
        ValueError: On every rank, if an argument is invalid on some rank.
        TypeError: On every rank, if an argument has a wrong type on some rank.
        CommunicationError: As in `sparsecoll.allreduce`.

    Volume: the entries of the other ranks, 2k(P-1) words of COO.

    See Also:
        `sparsecoll.bcast`, `sparsecoll.allreduce`.

    >>> def program(comm):
    ...     parts = sparsecoll.allgather(comm, sparsecoll.SparseVector([comm.rank], np.ones(1), 3))
    ...     return [int(part.indices[0]) for part in parts]
    >>> sparsecoll.simulate(3, program).results[2]
    [0, 1, 2]
    """
    options = CallOptions(format=format, value_dtype=value_dtype, timeout=timeout, check=check, nonfinite="pass")
    return on_vectors(comm, "allgather", x, options, lambda call, x: _allgather(call, x, options))


def _allgather(call: CollectiveCall, x: Any, options: CallOptions) -> list[Any]:
    """Agree on the arguments of an allgather and send the data."""
    rows = rows_of(options, x)
    if rows is not None:
        return allgather_rows(call, *rows, options)
    channel, entries, back = options.agree(call, x, sums=False)

    with channel.phase("gather"):
        parts = channel.allgather(entries)
        call.transport.waitall()
    return [back(part.astype(entries.dtype)) for part in parts]
