"""Allgather: every rank's sparse vector on every rank."""

from __future__ import annotations

from sparsecoll.collectives.messages import rows_of
from sparsecoll.collectives.options import CallOptions, blocking
from sparsecoll.collectives.signature import AnyComm, MoveOptions, T, Unpack, takes
from sparsecoll.transport.call import CollectiveCall


@takes(MoveOptions)
def allgather(comm: AnyComm, x: T, **options: Unpack[MoveOptions]) -> list[T]:
    """Gather every rank's sparse vector on every rank. Collective.

    Bruck's algorithm takes ceil(log2 P) messages.

    Args:
        comm: communicator, as in `sparsecoll.allreduce`.
        x: sparse vector, matrix, RowSparse or dense array as in `sparsecoll.allreduce`, with the same length (shape of
            an array) and dtype on all ranks.
        **options: format, value_dtype, timeout and check, as in `sparsecoll.allreduce`.

    Returns:
        List of P vectors of the same type as x, in rank order. All are rounded as on the wire, this rank's own too.

    Volume: the entries of the other ranks, 2k(P-1) words of COO.

    See Also:
        `sparsecoll.bcast`, `sparsecoll.allreduce`.

    >>> def program(comm):
    ...     parts = sparsecoll.allgather(comm, sparsecoll.SparseVector([comm.rank], np.ones(1), 3))
    ...     return [int(part.indices[0]) for part in parts]
    >>> sparsecoll.simulate(3, program).results[2]
    [0, 1, 2]
    """
    given = CallOptions.moving(**options)

    def perform(call: CollectiveCall) -> list[T]:
        channel, entries, back = given.agree(call, x, sums=False, converted=rows_of(given, x))
        with channel.phase("gather"):
            parts = channel.allgather(entries)
        return [back(part.astype(entries.dtype)) for part in parts]

    return blocking(comm, "allgather", given, perform)
