"""Gather: every rank's sparse vector on one rank."""

from __future__ import annotations

from typing import Any

from sparsecoll.collectives.keyed import on_vectors
from sparsecoll.collectives.messages import rows_of
from sparsecoll.collectives.options import CallOptions, check_root
from sparsecoll.collectives.rows import gather_rows
from sparsecoll.formats import Format
from sparsecoll.transport.call import CollectiveCall


def gather(
    comm: Any,
    x: Any,
    root: int = 0,
    *,
    format: str | Format = "auto",
    value_dtype: Any = None,
    timeout: float | None = None,
    check: bool = True,
) -> list[Any] | None:
    """Gather every rank's sparse vector on one rank. Collective.

    Every other rank sends its vector to the root, in one message. For the sum of the vectors use `sparsecoll.reduce`,
    which sends fewer bytes.

    Args:
        comm: communicator, as in `sparsecoll.allreduce`.
        x: sparse vector, matrix, RowSparse or dense array as in `sparsecoll.allreduce`, with the same length (shape of
            an array) and dtype on all ranks.
        root: rank that receives the vectors (default: 0).
        format: wire format, a name or a Format (default: "auto").
        value_dtype: dtype of the values on the wire, "float16", "bfloat16" or "float32"; None, the default, for that of
            x.
        timeout: seconds to wait for a message before CommunicationError is raised; None, the default, for no limit.
        check: compare the arguments of all ranks (default: True).

    Returns:
        On the root, a list of P vectors of the same type as x, in rank order; None on the other ranks. All are rounded
        as on the wire, the root's own too.

    Raises:
        ValueError: On every rank, if an argument is invalid on some rank.
        TypeError: On every rank, if an argument has a wrong type on some rank.
        CommunicationError: As in `sparsecoll.allreduce`.

    Volume: the root receives the entries of the other ranks, 2k(P-1) words of COO, in P - 1 messages.

    See Also:
        `sparsecoll.allgather`, `sparsecoll.scatter`, `sparsecoll.reduce`.

    >>> def program(comm):
    ...     parts = sparsecoll.gather(comm, sparsecoll.SparseVector([comm.rank], np.ones(1), 3))
    ...     return None if parts is None else [int(part.indices[0]) for part in parts]
    >>> sparsecoll.simulate(3, program).results
    [[0, 1, 2], None, None]
    """
    options = CallOptions(format=format, value_dtype=value_dtype, timeout=timeout, check=check, nonfinite="pass")
    return on_vectors(comm, "gather", x, options, lambda call, x: _gather(call, x, options, root))


def _gather(call: CollectiveCall, x: Any, options: CallOptions, root: Any) -> list[Any] | None:
    """Agree on the arguments of a gather and send the data."""
    transport = call.transport
    call.signature["root"] = root = check_root(root, transport)
    rows = rows_of(options, x)
    if rows is not None:
        return gather_rows(call, *rows, options, root)
    channel, entries, back = options.agree(call, x, sums=False)

    with transport.phase("gather"):
        if transport.rank != root:
            channel.isend(root, entries)
            transport.waitall()
            return None
        requests = [None if rank == root else channel.irecv(rank) for rank in range(transport.size)]
        parts = [entries.copy() if request is None else request.wait() for request in requests]
    return [back(part.astype(entries.dtype)) for part in parts]
