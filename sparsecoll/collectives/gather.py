"""Gather: every rank's sparse vector on one rank."""

from __future__ import annotations

from sparsecoll.collectives.messages import rows_of
from sparsecoll.collectives.options import CallOptions, blocking, check_root
from sparsecoll.collectives.signature import AnyComm, MoveOptions, T, Unpack, takes
from sparsecoll.transport.call import CollectiveCall


@takes(MoveOptions)
def gather(comm: AnyComm, x: T, root: int = 0, **options: Unpack[MoveOptions]) -> list[T] | None:
    """Gather every rank's sparse vector on one rank. Collective.

    Every other rank sends its vector to the root, in one message. For the sum of the vectors use `sparsecoll.reduce`,
    which sends fewer bytes.

    Args:
        comm: communicator, as in `sparsecoll.allreduce`.
        x: sparse vector, matrix, RowSparse or dense array as in `sparsecoll.allreduce`, with the same length (shape of
            an array) and dtype on all ranks.
        root: rank that receives the vectors (default: 0).
        **options: format, value_dtype, timeout and check, as in `sparsecoll.allreduce`.

    Returns:
        On the root, a list of P vectors of the same type as x, in rank order; None on the other ranks. All are rounded
        as on the wire, the root's own too.

    Volume: the root receives the entries of the other ranks, 2k(P-1) words of COO, in P - 1 messages.

    See Also:
        `sparsecoll.allgather`, `sparsecoll.scatter`, `sparsecoll.reduce`.

    >>> def program(comm):
    ...     parts = sparsecoll.gather(comm, sparsecoll.SparseVector([comm.rank], np.ones(1), 3))
    ...     return None if parts is None else [int(part.indices[0]) for part in parts]
    >>> sparsecoll.simulate(3, program).results
    [[0, 1, 2], None, None]
    """
    given = CallOptions.moving(**options)

    def perform(call: CollectiveCall) -> list[T] | None:
        transport = call.transport
        call.signature["root"] = at = check_root(root, transport)
        channel, entries, back = given.agree(call, x, sums=False, converted=rows_of(given, x))
        with channel.phase("gather"):
            if transport.rank != at:
                channel.isend(at, entries)
                return None
            requests = [None if rank == at else channel.irecv(rank) for rank in range(transport.size)]
            parts = [entries.copy() if request is None else request.wait() for request in requests]
        return [back(part.astype(entries.dtype)) for part in parts]

    return blocking(comm, "gather", given, perform)
