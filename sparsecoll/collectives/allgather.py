"""Allgather: every rank's sparse vector on every rank."""

from __future__ import annotations

from typing import Any

from sparsecoll import formats
from sparsecoll.collectives.options import CallOptions
from sparsecoll.formats import Format
from sparsecoll.transport import Transport, as_transport
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.collectives import allgatherv


def allgather(
    comm: Any,
    x: Any,
    *,
    format: str | Format = "auto",
    value_dtype: Any = None,
    timeout: float | None = None,
    check: bool = True,
) -> list[Any]:
    """Every rank's sparse vector on every rank. Collective.

    Bruck's algorithm: ceil(log2 P) messages.

    Args:
        x: as in `sparsecoll.allreduce`, sparse; of one length and dtype on all ranks.
        format, value_dtype, timeout, check: as there.

    Returns:
        P vectors of x's own kind, in rank order; values are as they travelled, on this rank too.

    Volume: the entries of the others, 2k(P-1) words of COO.

    Raises:
        ValueError: x is dense.
        ValueError, TypeError, CommunicationError: as `sparsecoll.allreduce`.

    >>> def program(comm):
    ...     parts = sparsecoll.allgather(comm, sparsecoll.SparseVector([comm.rank], np.ones(1), 3))
    ...     return [int(part.indices[0]) for part in parts]
    >>> sparsecoll.simulate(3, program).results[2]
    [0, 1, 2]
    """
    options = CallOptions(format=format, value_dtype=value_dtype, timeout=timeout, check=check, nonfinite="pass")
    transport = as_transport(comm, timeout)
    return transport.in_order(lambda: _allgather(transport, x, options))


def _allgather(transport: Transport, x: Any, options: CallOptions) -> list[Any]:
    with CollectiveCall(transport, "allgather", options.timeout) as call:
        entries, back = options.agree(call, x, sums=False)
        with transport.phase("gather"):
            blocks = allgatherv(transport, transport.encode(entries))
            transport.flush()
        return [back(formats.decode(block, entries.length).astype(entries.dtype)) for block in blocks]
