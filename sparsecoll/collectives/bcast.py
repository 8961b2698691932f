"""Broadcast: one rank's sparse vector on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsecoll.collectives.messages import packed, unpack
from sparsecoll.collectives.options import CallOptions, blocking, check_root
from sparsecoll.collectives.signature import AnyComm, MoveOptions, T, Unpack, takes
from sparsecoll.transport.all_ranks import spread
from sparsecoll.transport.call import CollectiveCall


@takes(MoveOptions)
def bcast(comm: AnyComm, x: T | None, root: int = 0, **options: Unpack[MoveOptions]) -> T:
    """Send one rank's sparse vector, or dense array, to all ranks. Collective.

    A binomial tree takes ceil(log2 P) successive messages.

    Args:
        comm: communicator, as in `sparsecoll.allreduce`.
        x: on the root, a sparse vector, matrix, RowSparse or dense array as in `sparsecoll.allreduce`; ignored on the
            other ranks.
        root: rank that has the vector (default: 0).
        **options: format, value_dtype, timeout and check, as in `sparsecoll.allreduce`.

    Returns:
        The vector, rounded as on the wire, of the type and shape of the root's x on every rank. Where that is a type of
        SciPy, pydata or torch, every rank needs the library.

    Volume: each rank receives 2k words, or the values of a dense array, and some 100 bytes that say the type.

    >>> def program(comm):
    ...     x = sparsecoll.SparseVector([2], np.ones(1), 5) if comm.rank == 1 else None
    ...     return int(sparsecoll.bcast(comm, x, root=1).indices[0])
    >>> sparsecoll.simulate(3, program).results
    [2, 2, 2]
    """
    given = CallOptions.moving(**options)

    def perform(call: CollectiveCall) -> Any:
        transport = call.transport
        call.signature["root"] = at = check_root(root, transport)
        call.signature |= given.signature()
        message = packed(given, x) if transport.rank == at else np.empty(0, np.uint8)
        call.agree(check=given.check)
        with transport.phase("broadcast"):
            return unpack(spread(transport, message, at))

    return blocking(comm, "bcast", given, perform)  # type: ignore[no-any-return]
