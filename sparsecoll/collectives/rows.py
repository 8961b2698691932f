"""Collectives of rows: what `allreduce`, `reduce_scatter`, `allgather` and `gather` do with RowSparse and types that
consist of rows (see `convert.rows`); a gather takes a dense array as one row."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsecoll.algorithms import Reduction
from sparsecoll.algorithms.rows import OWNERS, ROW_ALGORITHMS, RowAlgorithm, RowOwners, resolve_rows
from sparsecoll.algorithms.rows.owners import owners_of, split
from sparsecoll.collectives import convert
from sparsecoll.collectives.convert.back import Back
from sparsecoll.collectives.convert.rows import ToArray
from sparsecoll.collectives.options import CallOptions, check_boundaries
from sparsecoll.errors import check_choice
from sparsecoll.kernels.memory import to_host
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.row_channel import RowChannel
from sparsecoll.vector import RowSparse


def as_rows(
    x: Any, options: CallOptions, algo: Any = "auto", return_reduction: bool = False
) -> tuple[RowSparse, Back] | None:
    """Return x as rows, and what converts a result to its type; None if a call takes x for a vector.

    Types of other libraries are vectors in calls that select entries or ask for what only vectors have.
    """
    if isinstance(x, RowSparse):
        return convert.to_rows(x)
    plain = options.k is None and options.density is None and options.format == "auto" and not return_reduction
    known = isinstance(algo, RowAlgorithm) or (isinstance(algo, str) and algo in ROW_ALGORITHMS)
    return convert.to_rows(x) if plain and known else None


def allreduce_rows(
    call: CollectiveCall, x: RowSparse, back: Back, algo: Any, options: CallOptions, return_reduction: bool
) -> Any:
    """Return `sparsecoll.allreduce` of rows."""
    if return_reduction and not options.operation.sums:
        raise ValueError(f"return_reduction: expected False unless op is 'sum' or 'mean', got op={options.op!r}")
    transport, algorithm = call.transport, resolve_rows(algo)
    before = transport.traffic.copy() if return_reduction else transport.traffic
    channel, sent, held = agree(call, x, back, options, {"algo": algorithm.describe()})
    found = algorithm(channel, sent, held)
    transport.waitall()
    value = options.result(found.value, transport)
    if not return_reduction:
        return back(value)
    own = found.contributed(sent.copy()).astype(x.dtype)
    reduction = Reduction(value, own)  # type: ignore[arg-type]
    reduction.traffic = transport.traffic.since(before)
    return reduction


def reduce_scatter_rows(
    call: CollectiveCall, x: RowSparse, back: Back, owner: Any, boundaries: Any, options: CallOptions
) -> Any:
    """Return `sparsecoll.reduce_scatter` of rows."""
    if owner is not None and boundaries is not None:
        raise ValueError(f"owner, boundaries: expected one of them, got {owner!r} and {boundaries!r}")
    owner = "hash" if owner is None else owner
    if not isinstance(owner, str):
        raise TypeError(f"owner: expected one of {', '.join(map(repr, OWNERS))}, got {owner!r}")
    check_choice("owner", owner, OWNERS)
    edges = None if boundaries is None else check_boundaries(boundaries, x.n, call.transport.size)
    channel, sent, held = agree(call, x, back, options, {"owner": owner, "boundaries": edges})
    if edges is None:
        total = RowOwners(owner).reduce_scatter(channel, sent, held)
    else:
        with channel.phase("split"):
            owners = owners_of(to_host(sent.rows), x.n, channel.size, edges)
            total = channel.merge(channel.exchange(sent, split(np.arange(sent.nnz), owners, channel.size)))
    call.transport.waitall()
    return back(options.result(total.astype(x.dtype), call.transport))


def allgather_rows(call: CollectiveCall, x: RowSparse, back: Back, options: CallOptions) -> list[Any]:
    """Return `sparsecoll.allgather` of rows."""
    channel, sent, held = agree(call, x, back, options, {})
    with channel.phase("gather"):
        parts = channel.allgather(sent, max(held))
        call.transport.waitall()
    parts[channel.rank] = parts[channel.rank].copy()
    return [back(part.astype(x.dtype)) for part in parts]


def gather_rows(call: CollectiveCall, x: RowSparse, back: Back, options: CallOptions, root: int) -> list[Any] | None:
    """Return `sparsecoll.gather` of rows."""
    channel, sent, _ = agree(call, x, back, options, {})
    with channel.phase("gather"):
        if channel.rank != root:
            call.transport.isend(root, channel.encode(sent))
            call.transport.waitall()
            return None
        requests = [None if rank == root else call.transport.irecv(rank) for rank in range(channel.size)]
        parts = [sent.copy() if request is None else channel.decode(request.wait()) for request in requests]
    return [back(part.astype(x.dtype)) for part in parts]


def agree(
    call: CollectiveCall, x: RowSparse, back: Back, options: CallOptions, arguments: dict[str, Any]
) -> tuple[RowChannel, RowSparse, list[int]]:
    """Validate the options and agree on the arguments; return the channel, what this rank sends, and all counts.

    Args:
        call: the call.
        x: this rank's rows.
        back: what converts a result to the caller's type, whose shape and blocks say where a row's values are.
        options: of the call.
        arguments: those of this collective alone, by name, which must be the same on all ranks.
    """
    channel, sent = contribution(call, x, options)
    layout = {name: list(value) for name, value in back.fields().items() if name in ("shape", "blocksize")}
    if layout.get("blocksize") == [1, x.d] and layout["shape"] == list(x.shape):  # rows, as of any other type
        layout = {}
    call.signature |= {
        "x": "an array" if isinstance(back, ToArray) else "rows",
        "n": x.n,
        "d": x.d,
        "shape": list(x.shape),
        **layout,
        "dtype": x.dtype.name,
        **options.signature(),
        **arguments,
        "k": options.resolve_k(x.n),
    }
    return channel, sent, call.agree(sent.nnz, options.check)


def contribution(call: CollectiveCall, x: RowSparse, options: CallOptions) -> tuple[RowChannel, RowSparse]:
    """Return the channel of a call, and the rows that this rank sends, rounded as on the wire."""
    options.check_rows(x)
    channel = RowChannel(call.transport, x, options.wire_dtype, options.operation)
    with call.transport.phase("select"):
        options.check_finite(x)
        k = options.resolve_k(x.n)
        chosen = x if k is None else x.topk(k)
        return channel, channel.round(options.prepared(chosen, call.transport))
