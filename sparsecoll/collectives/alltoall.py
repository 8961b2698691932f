"""All-to-all: every rank sends a sparse vector to every rank."""

from __future__ import annotations

from sparsecoll.collectives.messages import exchange_messages, pack_all, unpack
from sparsecoll.collectives.options import CallOptions, blocking
from sparsecoll.collectives.signature import AnyComm, Many, MoveOptions, T, Unpack, takes
from sparsecoll.transport.call import CollectiveCall


@takes(MoveOptions)
def alltoall(comm: AnyComm, x: Many[T], **options: Unpack[MoveOptions]) -> list[T]:
    """Send x[j] to rank j, and return what every rank has sent to this one. Collective.

    Every rank sends one message to every other one, in the order rank + 1, rank + 2, ... If most pairs of ranks have
    nothing to send, `sparsecoll.alltoallv` takes fewer messages.

    Args:
        comm: communicator, as in `sparsecoll.allreduce`.
        x: list or tuple of P sparse vectors, matrices, RowSparse or dense arrays as in `sparsecoll.allreduce`, x[j] for
            rank j. Their lengths, dtypes and types may differ.
        **options: format, value_dtype, timeout and check, as in `sparsecoll.allreduce`.

    Returns:
        List of P vectors, in the order of the ranks that have sent them, each of the type and shape that it has there,
        rounded as on the wire. For a type of SciPy, pydata or torch, every rank needs that library.

    Volume: each rank receives P - 1 messages: the entries, 2 words each in COO, and some 100 bytes for the type.

    See Also:
        `sparsecoll.alltoallv`, `sparsecoll.reduce_scatter`, which sums what a rank receives.

    >>> def program(comm):
    ...     x = [sparsecoll.SparseVector([to], np.array([10.0 * comm.rank + to]), 9) for to in range(comm.size)]
    ...     return [float(y.values[0]) for y in sparsecoll.alltoall(comm, x)]
    >>> sparsecoll.simulate(3, program).results[1]
    [1.0, 11.0, 21.0]
    """
    given = CallOptions.moving(**options)

    def perform(call: CollectiveCall) -> list[T]:
        rank, P = call.transport.rank, call.transport.size
        call.signature |= given.signature()
        if not isinstance(x, (list, tuple)):
            raise TypeError(f"x: expected a list of {P} vectors, one for each rank, got {type(x).__name__}")
        messages = pack_all(given, x, range(P))
        call.agree(check=given.check)
        sources = [(rank - step) % P for step in range(P)]
        arrived = exchange_messages(call.transport, dict(enumerate(messages)), sources)
        return [unpack(arrived[source]) for source in range(P)]

    return blocking(comm, "alltoall", given, perform)
