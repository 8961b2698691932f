"""Scatter: one of several sparse vectors, or one region of a sparse vector, on each rank."""

from __future__ import annotations

from numbers import Integral
from typing import Any, overload

from sparsecoll.collectives.messages import pack, pack_all, unpack
from sparsecoll.collectives.options import CallOptions, blocking, check_boundaries, check_root
from sparsecoll.collectives.signature import AnyComm, Edges, Given, Many, MoveOptions, T, Triple, Unpack, takes
from sparsecoll.formats import Buffer
from sparsecoll.transport.call import CollectiveCall


@overload
def scatter(
    comm: AnyComm, x: Given, root: int = 0, boundaries: Edges = None, **options: Unpack[MoveOptions]
) -> Triple: ...
@overload
def scatter(
    comm: AnyComm, x: Many[T], root: int = 0, boundaries: Edges = None, **options: Unpack[MoveOptions]
) -> T: ...
@overload
def scatter(
    comm: AnyComm, x: T | None, root: int = 0, boundaries: Edges = None, **options: Unpack[MoveOptions]
) -> T: ...
@takes(MoveOptions)
def scatter(comm: AnyComm, x: Any, root: int = 0, boundaries: Edges = None, **options: Unpack[MoveOptions]) -> Any:
    """Send each rank one vector of the root's list, or one region of the root's vector. Collective.

    The root sends one message to every other rank.

    Args:
        comm: communicator, as in `sparsecoll.allreduce`.
        x: on the root, a list or tuple of P sparse vectors, matrices, RowSparse or dense arrays as in
            `sparsecoll.allreduce`, whose lengths, dtypes and types may differ; or one sparse vector or matrix, which is
            split. Ignored on the other ranks.
        root: rank that has x (default: 0).
        boundaries: on the root, if x is one vector: P + 1 ascending indices from 0 to the length; rank j receives the
            entries from boundaries[j] to boundaries[j + 1], as from `sparsecoll.reduce_scatter`. None: P equal parts.
        **options: format, value_dtype, timeout and check, as in `sparsecoll.allreduce`.

    Returns:
        This rank's vector, of the type and shape that it has on the root, rounded as on the wire; a part of a vector
        has the indices and the length of the whole, and a part of a mapping from strings those keys whose positions are
        in its region. For a type of SciPy, pydata or torch, every rank needs that library.

    Raises:
        ValueError: On every rank, if an argument is invalid on some rank, or x is one dense array:
            use np.array_split(x, P).
        TypeError: On every rank, if an argument has a wrong type on some rank.
        CommunicationError: As in `sparsecoll.allreduce`.

    Volume: each rank receives its own vector, 2k words of COO, and some 100 bytes that describe its type, and
    for a mapping from strings the strings of its own part.

    See Also:
        `sparsecoll.gather`, `sparsecoll.reduce_scatter`, `sparsecoll.bcast`.

    >>> def program(comm):
    ...     whole = sparsecoll.SparseVector([0, 1, 4], np.ones(3), 6) if comm.rank == 0 else None
    ...     return sparsecoll.scatter(comm, whole).indices.tolist()
    >>> sparsecoll.simulate(3, program).results
    [[0, 1], [], [4]]
    """
    given = CallOptions.moving(**options)

    def perform(call: CollectiveCall) -> Any:
        transport, rank, P = call.transport, call.transport.rank, call.transport.size
        call.signature["root"] = at = check_root(root, transport)
        call.signature |= given.signature()
        messages = _messages(x, P, boundaries, given) if rank == at else []
        call.agree(check=given.check)
        with transport.phase("scatter"):
            if rank != at:
                return unpack(transport.recv(at))
            for step in range(1, P):
                transport.isend((at + step) % P, messages[(at + step) % P])
            transport.waitall()
        return unpack(messages[at])

    return blocking(comm, "scatter", given, perform)


def _messages(x: Any, P: int, boundaries: Any, options: CallOptions) -> list[Buffer]:
    """Return the message for each rank."""
    one = isinstance(x, tuple) and len(x) == 3 and isinstance(x[2], Integral)  # (indices, values, length)
    if one or not isinstance(x, (list, tuple)):
        entries, back = options.to_entries(x, sums=False)
        edges = check_boundaries(boundaries, entries.length, P)
        return [pack(options, *back.of_part(part)) for part in entries.split(edges)]
    if boundaries is not None:
        raise ValueError("boundaries: expected None for a list of vectors, which is not split")
    return pack_all(options, x, range(P))
