"""Broadcast: one rank's sparse vector on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsecoll.collectives.messages import packed, unpack
from sparsecoll.collectives.options import CallOptions, blocking, check_root
from sparsecoll.formats import Format
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.collectives import spread


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
    """Send one rank's sparse vector, or dense array, to all ranks. Collective.

    A binomial tree takes ceil(log2 P) successive messages.

    Args:
        comm: communicator, as in `sparsecoll.allreduce`.
        x: on the root, a sparse vector, matrix, RowSparse or dense array as in `sparsecoll.allreduce`; ignored on the
            other ranks.
        root: rank that has the vector (default: 0).
        format: wire format, a name or a Format (default: "auto").
        value_dtype: dtype of the values on the wire, "float16", "bfloat16" or "float32"; None, the default, for that of
            x.
        timeout: seconds to wait for a message before CommunicationError is raised; None, the default, for no limit.
        check: compare the arguments of all ranks (default: True).

    Returns:
        The vector, rounded as on the wire, of the type and shape of the root's x on every rank. Where that is a type of
        SciPy, pydata, pandas or torch, every rank needs the library.

    Raises:
        ValueError: On every rank, if an argument is invalid on some rank.
        TypeError: On every rank, if an argument has a wrong type on some rank.
        CommunicationError: As in `sparsecoll.allreduce`.

    Volume: each rank receives 2k words, or the values of a dense array, and some 100 bytes that say the type.

    See Also:
        `sparsecoll.allgather`.

    >>> def program(comm):
    ...     x = sparsecoll.SparseVector([2], np.ones(1), 5) if comm.rank == 1 else None
    ...     return int(sparsecoll.bcast(comm, x, root=1).indices[0])
    >>> sparsecoll.simulate(3, program).results
    [2, 2, 2]
    """
    options = CallOptions(format=format, value_dtype=value_dtype, timeout=timeout, check=check, nonfinite="pass")
    return blocking(comm, "bcast", options, lambda call: _bcast(call, x, options, root))


def _bcast(call: CollectiveCall, x: Any, options: CallOptions, root: Any) -> Any:
    """Agree on the arguments of a broadcast and send the data."""
    transport, message = call.transport, np.empty(0, np.uint8)
    call.signature["root"] = root = check_root(root, transport)
    call.signature |= options.signature()
    if transport.rank == root:
        message = packed(options, x)
    call.agree(check=options.check)

    with transport.phase("broadcast"):
        return unpack(spread(transport, message, root))
