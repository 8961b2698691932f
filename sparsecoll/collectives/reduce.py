"""Reduce: the sum of sparse vectors, or another combination, on one rank."""

from __future__ import annotations

from typing import Any

from sparsecoll.algorithms.primitives.exchange import united
from sparsecoll.collectives.keyed import with_keys
from sparsecoll.collectives.options import CallOptions, blocking, check_root
from sparsecoll.collectives.reduce_scatter import sum_of_region
from sparsecoll.formats import Format
from sparsecoll.transport.call import CollectiveCall


def reduce(
    comm: Any,
    x: Any,
    root: int = 0,
    *,
    k: int | None = None,
    density: float | None = None,
    format: str | Format = "auto",
    value_dtype: Any = None,
    op: Any = "sum",
    missing: str = "ignore",
    timeout: float | None = None,
    check: bool = True,
    nonfinite: str = "raise",
) -> Any:
    """Combine sparse vectors on one rank, by default as their sum. Collective.

    1. Reduce-scatter by recursive halving: rank j receives the result for the j-th of P equal parts of the coordinates.
    2. Every rank sends its part to the root; with more than 64 ranks, neighbours unite theirs on the way.

    Args:
        comm: communicator, as in `sparsecoll.allreduce`.
        x: vector or array as in `sparsecoll.allreduce`; a dense x requires `k` or `density`.
        root: rank that receives the result (default: 0).
        k: number of entries that each rank selects; None, the default, for all entries of x.
        density: k as a fraction of the length, in (0, 1], instead of `k`.
        format: wire format, a name or a lossless Format (default: "auto").
        value_dtype: dtype of the values on the wire, "float16", "bfloat16" or "float32"; None, the default, for that of
            x.
        op: operation, as in `sparsecoll.allreduce` (default: "sum").
        missing: "ignore" (the default) or "zero", as in `sparsecoll.allreduce`.
        timeout: seconds to wait for a message before CommunicationError is raised; None, the default, for no limit.
        check: compare the arguments of all ranks (default: True).
        nonfinite: "raise" (the default) or "pass" values that are NaN or infinite.

    Returns:
        On the root, the result, of the same type as x (a SparseVector if x is dense); None on the other ranks.

    Raises:
        ValueError: On every rank, if an argument is invalid on some rank, or a value is not finite.
        TypeError: On every rank, if an argument has a wrong type on some rank.
        CommunicationError: As in `sparsecoll.allreduce`.

    Volume: each rank receives 2k(P-1)/P words (identical supports) to k log2 P words (disjoint supports) if entries are
    distributed evenly over the P parts, and at most 2k(P-1) if not; then the root receives the sum, in P - 1 messages.
    With more than 64 ranks it receives the sum in ceil(log2 P), and other ranks parts of it on their way. Each rank
    sends keys that are strings to the root, with their values; few keys go to all ranks, as in `sparsecoll.allreduce`.

    See Also:
        `sparsecoll.allreduce`, `sparsecoll.reduce_scatter`.

    >>> def program(comm):
    ...     y = sparsecoll.reduce(comm, sparsecoll.SparseVector([comm.rank, 4], np.ones(2), 6), root=1)
    ...     return None if y is None else y.to_dense()
    >>> sparsecoll.simulate(2, program).results
    [None, array([1., 1., 0., 0., 2., 0.])]
    """
    options = CallOptions(
        k=k,
        density=density,
        format=format,
        value_dtype=value_dtype,
        op=op,
        missing=missing,
        timeout=timeout,
        check=check,
        nonfinite=nonfinite,
    )
    return blocking(comm, "reduce", options, lambda call: _reduce(call, x, options, root))


def _reduce(call: CollectiveCall, x: Any, options: CallOptions, root: Any) -> Any:
    """Agree on the arguments of a reduce and send the data."""
    call.signature["root"] = root = check_root(root, call.transport)
    return with_keys(call, x, options, lambda x: _reduce_vectors(call, x, options, root), at_once={}, root=root)


def _reduce_vectors(call: CollectiveCall, x: Any, options: CallOptions, root: int) -> Any:
    channel, entries, back = options.agree(call, x, sums=True)
    n, P = entries.length, channel.size
    mine = sum_of_region(channel, entries, [n * j // P for j in range(P + 1)])
    with channel.phase("gather"):
        whole = united(channel, mine.astype(entries.dtype), root)
    call.transport.waitall()
    return None if whole is None else back(options.result(whole._copy_if_overlapping(entries), call.transport))
