"""Broadcast: one rank's sparse vector on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsecoll import formats
from sparsecoll.collectives import convert
from sparsecoll.collectives.options import CallOptions, check_root
from sparsecoll.formats import Format
from sparsecoll.transport import Transport, as_transport
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.collectives import broadcast, spread
from sparsecoll.vector import VALUE_DTYPES, SparseVector


def bcast(
    comm: Any,
    x: Any,
    root: int = 0,
    *,
    format: str | Format = "auto",
    value_dtype: Any = None,
    timeout: float | None = None,
    check: bool = True,
) -> Any:
    """One rank's sparse vector on all ranks. Collective.

    A binomial tree: ceil(log2 P) messages one after the other.

    Args:
        x: on the root as in `sparsecoll.allreduce`, sparse; ignored elsewhere.
        root: the rank that has it.
        format, value_dtype, timeout, check: as there.

    Returns:
        The vector, with values as they travelled: of x's kind on the root, a SparseVector elsewhere.

    Volume: 2k words into each rank.

    Raises:
        ValueError: the root's x is dense.
        ValueError, TypeError, CommunicationError: as `sparsecoll.allreduce`.

    >>> def program(comm):
    ...     x = sparsecoll.SparseVector([2], np.ones(1), 5) if comm.rank == 1 else None
    ...     return int(sparsecoll.bcast(comm, x, root=1).indices[0])
    >>> sparsecoll.simulate(3, program).results
    [2, 2, 2]
    """
    options = CallOptions(format=format, value_dtype=value_dtype, timeout=timeout, check=check, nonfinite="pass")
    transport = as_transport(comm, timeout)
    return transport.in_order(lambda: _bcast(transport, x, root, options))


def _bcast(transport: Transport, x: Any, root: int, options: CallOptions) -> Any:
    with CollectiveCall(transport, "bcast", options.timeout) as call:
        call.signature |= {"root": check_root(root, transport), **options.signature()}
        entries = SparseVector.empty(0, np.float64)
        back: convert.Back = convert.as_is
        if transport.rank == root:
            entries, back = options.to_entries(x, sums=False)
        call.agree(check=options.check)
        transport.format, transport.value_dtype = options.wire_format, options.wire_dtype
        with transport.phase("broadcast"):
            kind = np.array([entries.length, VALUE_DTYPES.index(entries.dtype)], np.int64)
            length, dtype = broadcast(transport, kind, root).tolist()
            message = spread(transport, transport.encode(entries), root)
        return back(formats.decode(message, length).astype(VALUE_DTYPES[dtype]))
