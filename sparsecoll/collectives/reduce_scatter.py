"""Reduce-scatter: the sum of sparse vectors, a region of the coordinates on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparsecoll.algorithms.primitives import halving
from sparsecoll.collectives.options import CallOptions
from sparsecoll.formats import Format
from sparsecoll.transport import Transport, as_transport
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.vector import SparseVector, accumulator_dtype


def reduce_scatter(
    comm: Any,
    x: Any,
    boundaries: Sequence[int] | None = None,
    *,
    k: int | None = None,
    density: float | None = None,
    format: str | Format = "auto",
    value_dtype: Any = None,
    timeout: float | None = None,
    check: bool = True,
    nonfinite: str = "raise",
) -> Any:
    """Sum sparse vectors; rank j receives the sum between boundaries[j] and boundaries[j + 1]. Collective.

    Recursive halving (for any P): ceil(log2 P) messages.

    Args:
        x, k, density, format, value_dtype, timeout, check, nonfinite: as in `sparsecoll.reduce`.
        boundaries: P + 1 ascending coordinates from 0 to length, the same on all ranks; None: P equal parts.

    Returns:
        This rank's part, of x's own kind; its coordinates and length are those of the whole.

    Volume: 2k(P-1)/P words (identical supports) to k log2 P (disjoint ones) if entries are spread evenly over the
    parts, at most 2k(P-1) if they are not.

    Raises:
        ValueError: boundaries are not P + 1 ascending coordinates from 0 to length.
        ValueError, TypeError, CommunicationError: as `sparsecoll.allreduce`.

    >>> def program(comm):
    ...     return sparsecoll.reduce_scatter(comm, sparsecoll.SparseVector([0, 5], np.ones(2), 6)).indices.tolist()
    >>> sparsecoll.simulate(3, program).results
    [[0], [], [5]]
    """
    options = CallOptions(k, density, format, value_dtype, timeout=timeout, check=check, nonfinite=nonfinite)
    transport = as_transport(comm, timeout)
    edges = None if boundaries is None else [int(edge) for edge in boundaries]
    return transport.in_order(lambda: _reduce_scatter(transport, x, edges, options))


def _reduce_scatter(transport: Transport, x: Any, edges: list[int] | None, options: CallOptions) -> Any:
    with CollectiveCall(transport, "reduce_scatter", options.timeout) as call:
        call.signature["boundaries"] = edges
        entries, back = options.agree(call, x, sums=True)
        n, P = entries.length, transport.size
        edges = edges or [n * j // P for j in range(P + 1)]
        if len(edges) != P + 1 or edges[0] != 0 or edges[-1] != n or edges != sorted(edges):
            raise ValueError(f"boundaries: expected {P + 1} ascending ones from 0 to {n}, got {edges}")
        part = sum_of_region(transport, entries, edges)
        transport.flush()
        return back(part.astype(entries.dtype))


def sum_of_region(transport: Transport, entries: SparseVector, edges: Sequence[int]) -> SparseVector:
    """The sum over all ranks between edges[rank] and edges[rank + 1], in the dtype that `entries` are summed in."""
    with transport.phase("split"):
        whole = SparseVector.sum([entries], accumulator_dtype(entries.dtype))
        return halving.reduce_scatter(transport, whole, edges, transport.rounded, pairs=True)
