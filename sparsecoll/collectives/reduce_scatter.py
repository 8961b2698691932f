"""Reduce-scatter: the sum of sparse vectors, or another combination, one region of the coordinates on each rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, overload

from sparsecoll import formats
from sparsecoll.algorithms import Reduction
from sparsecoll.algorithms.dense import sum_of_chunk
from sparsecoll.algorithms.owners import OWNERS, RowOwners
from sparsecoll.algorithms.primitives import halving
from sparsecoll.collectives import convert
from sparsecoll.collectives.options import NOTHING, CallOptions, as_edges, blocking, check_boundaries
from sparsecoll.collectives.signature import AnyComm, Dense, Edges, Given, RegionOptions, T, Triple, Unpack, X, takes
from sparsecoll.select import Vector
from sparsecoll.transport import Transport
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.channel import Channel
from sparsecoll.vector import DenseVector, RowSparse, SparseVector


@overload
def reduce_scatter(
    comm: AnyComm, x: X, boundaries: Edges = None, **options: Unpack[RegionOptions]
) -> SparseVector | X: ...
@overload
def reduce_scatter(
    comm: AnyComm, x: Dense, boundaries: Edges = None, **options: Unpack[RegionOptions]
) -> SparseVector: ...
@overload
def reduce_scatter(comm: AnyComm, x: Given, boundaries: Edges = None, **options: Unpack[RegionOptions]) -> Triple: ...
@overload
def reduce_scatter(comm: AnyComm, x: T, boundaries: Edges = None, **options: Unpack[RegionOptions]) -> T: ...
@takes(RegionOptions)
def reduce_scatter(comm: AnyComm, x: Any, boundaries: Edges = None, **options: Unpack[RegionOptions]) -> Any:
    """Combine sparse vectors, by default as their sum: rank j receives indices boundaries[j] to boundaries[j + 1] - 1.

    Collective. The algorithm is recursive halving for any P, in ceil(log2 P) messages; for op="replace", every rank
    sends each region to its owner, in P - 1 messages.

    Args:
        comm: communicator, as in `sparsecoll.allreduce`.
        x: vector, array or RowSparse as in `sparsecoll.allreduce`; a dense x requires `k` or `density`.
        boundaries: P + 1 ascending indices from 0 to the length, the same on all ranks; None, the default, for P equal
            parts. For a RowSparse, they are row numbers from 0 to n; without them, its parts depend on `owner`.
        owner: for a RowSparse or a hybrid torch.sparse_coo tensor: which rank receives a row. "hash"
            (the default for a RowSparse without `boundaries`) chooses it by a hash of the row number (see
            `sparsecoll.RowSparse.owners`), "range" gives each rank n/P successive rows, and "quantile" gives each rank
            successive rows so that the ranks' stored rows are divided equally. None, the default, for other types.
        **options: k, density, op, missing, format, value_dtype, timeout, check and nonfinite, as in
            `sparsecoll.allreduce`.

    Returns:
        This rank's part, of the type of x (a SparseVector if x is dense), with indices and length of the whole vector.

    Raises:
        ValueError: On every rank, if an argument is invalid on some rank, a value is not finite, or `boundaries` are
            not P + 1 ascending indices from 0 to the length.
        TypeError: On every rank, if an argument has a wrong type on some rank.
        CommunicationError: As in `sparsecoll.allreduce`.

    Volume: 2k(P-1)/P words (identical supports) to k log2 P words (disjoint supports) if entries are distributed evenly
    over the parts, at most 2k(P-1) if not. For a RowSparse with r rows: r(P-1)/P rows, in P - 1 messages (see
    `sparsecoll.RowOwners`).

    See Also:
        `sparsecoll.reduce`, `sparsecoll.allreduce`.

    >>> def program(comm):
    ...     return sparsecoll.reduce_scatter(comm, sparsecoll.SparseVector([0, 5], np.ones(2), 6)).indices.tolist()
    >>> sparsecoll.simulate(3, program).results
    [[0], [], [5]]
    """
    owner = options.pop("owner", None)
    given = CallOptions(**options)  # type: ignore[misc]  # the option that was taken out
    return blocking(comm, "reduce_scatter", given, lambda call: _reduce_scatter(call, x, given, boundaries, owner))


def _reduce_scatter(call: CollectiveCall, x: Any, options: CallOptions, boundaries: Any, owner: Any) -> Any:
    """Agree on the arguments of a reduce-scatter and send the data."""
    transport = call.transport
    rows = convert.to_rows(x) if owner is not None or isinstance(x, RowSparse) else None
    if owner is not None and rows is None:
        raise ValueError(f"owner: expected None unless x consists of rows, got {owner!r} for {type(x).__name__}")
    if owner is not None and boundaries is not None:
        raise ValueError(f"owner, boundaries: expected one of them, got {owner!r} and {boundaries!r}")
    if owner is not None and not isinstance(owner, str):
        raise TypeError(f"owner: expected one of {', '.join(map(repr, OWNERS))}, got {owner!r}")
    edges = as_edges(boundaries, transport.size)
    owners = RowOwners("hash" if owner is None else owner) if rows is not None and edges is None else None
    call.signature |= {"boundaries": edges, "owner": owners and owners.owner}
    channel, entries, back = options.agree(call, x, sums=True, converted=rows)
    if owners is None:
        part = sum_of_region(channel, entries, check_boundaries(edges, entries.length, transport.size))
    else:
        part = owners.reduce_scatter(channel, entries)  # type: ignore[assignment,arg-type]
    transport.waitall()
    return back(options.result(part.astype(entries.dtype)._copy_if_overlapping(entries), transport))


def sum_of_region(channel: Channel, entries: SparseVector, edges: list[int]) -> SparseVector:
    """Return the entries of all ranks from edges[rank] up to edges[rank + 1] combined, in the accumulator dtype."""
    with channel.phase("split"):
        if channel.op.name == "replace" or channel.width:  # partial results of halving are not of successive ranks
            return channel.merge(channel.exchange(entries.split(edges).__getitem__), partial=True)
        whole = channel.merge([entries], partial=True)
        return halving.reduce_scatter(channel, whole, edges, channel.round, pairs=True)


def reduce_scatter_vectors(
    transport: Transport, vector: Vector, options: CallOptions, compared: Mapping[str, Any] = NOTHING
) -> Reduction:
    """Reduce-scatter as the torch adapter uses it, into P equal regions; may be called inside another CollectiveCall.

    A rank sends its own entries only, in P - 1 messages, so that nothing but their rounding is lost.

    Args:
        vector: selected entries, all of which are sent, or a dense vector, of a length that P divides.
        compared: more values that must be the same on all ranks, by their names in errors (default: none).

    Returns:
        Reduction: its value is this rank's region, from index 0 on, in the accumulator dtype.
    """
    with CollectiveCall(transport, "reduce_scatter", options.timeout) as call:
        n, size, rank = vector.length, transport.size, transport.rank
        if n % size:
            raise ValueError(f"x: expected a length that {size} ranks divide, got {n}")
        options.check_dtype(vector.dtype)
        kind = "dense" if isinstance(vector, DenseVector) else "sparse"
        call.signature |= {**compared, **options.signature(vector, transport), "x": kind}
        call.agree()
        channel, edges = options.channel(transport, vector), [n // size * j for j in range(size + 1)]
        channel.limit(vector.dtype)
        if isinstance(vector, DenseVector):
            chunk = sum_of_chunk(channel, vector, edges)
            reduction: Reduction = Reduction(chunk, lambda: formats.rounded(vector, channel.value_dtype))
        else:
            sent = [channel.roundtrip(region) for region in vector.split(edges)]  # a lossy format rounds each by itself
            with channel.phase("split"):
                total = channel.merge(channel.exchange(sent.__getitem__), partial=True)
            reduction = Reduction(total.shifted(-edges[rank], n // size), lambda: SparseVector.concatenate(sent))
        transport.waitall()
        return reduction
