"""All-to-all among partners that only the senders know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sparsecoll.algorithms.primitives import halving
from sparsecoll.collectives.messages import exchange_messages, pack_all, unpack
from sparsecoll.collectives.options import CallOptions, blocking
from sparsecoll.collectives.signature import AnyComm, MoveOptions, T, Unpack, takes
from sparsecoll.formats import FORMATS
from sparsecoll.transport import Transport
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.channel import Channel
from sparsecoll.vector import SparseVector


@takes(MoveOptions)
def alltoallv(comm: AnyComm, x: Mapping[int, T], **options: Unpack[MoveOptions]) -> dict[int, T]:
    """Send a vector to each of some ranks, and return what others have sent to this one. Collective.

    A rank need not know who sends to it, as in an assembly of finite elements, or with particles that change ranks:

    1. The ranks find their partners by a reduce-scatter (recursive halving) of the pairs (destination, source): each
       rank receives those with itself as the destination.
    2. Every rank sends one message to each of its destinations.

    NBX (Hoefler, Siebert and Lumsdaine, PPoPP 2010) does the same by synchronous sends and a nonblocking barrier. This
    algorithm takes as many rounds; its messages can be counted, and their order is the same in every run.

    Args:
        comm: communicator, as in `sparsecoll.allreduce`.
        x: dict from rank to the sparse vector, matrix, RowSparse or dense array (as in `sparsecoll.allreduce`) that it
            receives; {} to send none. Lengths, dtypes and types may differ. A rank may send to itself.
        **options: format, value_dtype, timeout and check, as in `sparsecoll.allreduce`.

    Returns:
        Dict from each rank that has sent to this one, ascending, to its vector, of the type and shape that it has
        there, rounded as on the wire. For a type of SciPy, pydata or torch, the receiver needs that library.

    Volume: ceil(log2 P) messages with at most two words for each pair that passes through this rank (about log2 P words
    for each partner), then one message from each partner: its entries and some 100 bytes that describe the type.

    See Also:
        `sparsecoll.alltoall`, `sparsecoll.reduce_scatter`, which sums what a rank receives.

    >>> def program(comm):
    ...     to = (comm.rank + 1) % comm.size
    ...     return list(sparsecoll.alltoallv(comm, {to: sparsecoll.SparseVector([to], np.ones(1), 9)}))
    >>> sparsecoll.simulate(4, program).results
    [[3], [0], [1], [2]]
    """
    given = CallOptions.moving(**options)

    def perform(call: CollectiveCall) -> dict[int, T]:
        transport = call.transport
        call.signature |= given.signature()
        destinations = _destinations(x, transport.size)
        messages = dict(zip(destinations, pack_all(given, list(x.values()), destinations), strict=True))
        call.agree(check=given.check)
        with transport.phase("partners"):
            sources = find_sources(transport, destinations)
            transport.waitall()
        return {source: unpack(message) for source, message in exchange_messages(transport, messages, sources).items()}

    return blocking(comm, "alltoallv", given, perform)


def _destinations(x: Any, P: int) -> list[int]:
    if not isinstance(x, Mapping):
        raise TypeError(f"x: expected a dict from rank to vector, got {type(x).__name__}")
    for rank in x:
        if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)) or not 0 <= rank < P:
            raise ValueError(f"x: expected keys that are ranks from 0 to {P - 1}, got {rank!r}")
    return [int(rank) for rank in x]


def find_sources(transport: Transport, destinations: list[int]) -> list[int]:
    """Return the ranks that have this rank among their destinations, ascending. Collective.

    The pair (destination, source) is entry number destination * P + source of a vector of P * P coordinates.
    """
    rank, P = transport.rank, transport.size
    channel = Channel(transport, P * P, FORMATS["coo"])
    indices = np.sort(np.array(destinations, np.int64)) * P + rank
    pairs = SparseVector(indices, np.ones(indices.size, np.int32), P * P)
    mine = halving.reduce_scatter(channel, pairs, [P * j for j in range(P + 1)], channel.round, pairs=True)
    return (mine.indices.astype(np.int64) - rank * P).tolist()  # type: ignore[no-any-return]
