"""Reduce: the sum of sparse vectors on one rank."""

from __future__ import annotations

from typing import Any

from sparsecoll import formats
from sparsecoll.collectives.options import CallOptions, check_root
from sparsecoll.collectives.reduce_scatter import sum_of_region
from sparsecoll.formats import Format
from sparsecoll.transport import Transport, as_transport
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.vector import SparseVector


def reduce(
    comm: Any,
    x: Any,
    root: int = 0,
    *,
    k: int | None = None,
    density: float | None = None,
    format: str | Format = "auto",
    value_dtype: Any = None,
    timeout: float | None = None,
    check: bool = True,
    nonfinite: str = "raise",
) -> Any:
    """Sum sparse vectors on one rank. Collective.

    1. Reduce-scatter by recursive halving: rank j gets the sum of the j-th of P equal parts of the coordinates.
    2. Everybody's part goes to the root.

    Args:
        x, k, density, format, value_dtype, timeout, check, nonfinite: as in `sparsecoll.allreduce`; dense x needs k or
            density. `format` must lose nothing.
        root: the rank that receives the sum.

    Returns:
        On the root the sum, of x's own kind (see `sparsecoll.as_vector`); None elsewhere.

    Volume: into each rank 2k(P-1)/P words (identical supports) to k log2 P (disjoint ones) if entries are spread evenly
    over the P parts, at most 2k(P-1) if they are not; then the sum into the root.

    Raises:
        ValueError, TypeError, CommunicationError: as `sparsecoll.allreduce`.

    >>> def program(comm):
    ...     y = sparsecoll.reduce(comm, sparsecoll.SparseVector([comm.rank, 4], np.ones(2), 6), root=1)
    ...     return None if y is None else y.to_dense()
    >>> sparsecoll.simulate(2, program).results
    [None, array([1., 1., 0., 0., 2., 0.])]
    """
    options = CallOptions(k, density, format, value_dtype, timeout=timeout, check=check, nonfinite=nonfinite)
    transport = as_transport(comm, timeout)
    return transport.in_order(lambda: _reduce(transport, x, root, options))


def _reduce(transport: Transport, x: Any, root: int, options: CallOptions) -> Any:
    with CollectiveCall(transport, "reduce", options.timeout) as call:
        call.signature["root"] = root = check_root(root, transport)
        entries, back = options.agree(call, x, sums=True)
        n, P = entries.length, transport.size
        mine = sum_of_region(transport, entries, [n * j // P for j in range(P + 1)])
        with transport.phase("gather"):
            if transport.rank != root:
                transport.send(root, transport.encode(mine))
                transport.flush()
                return None
            parts = [mine if rank == root else formats.decode(transport.receive(rank), n) for rank in range(P)]
        transport.flush()
        return back(SparseVector.concatenate([part.astype(entries.dtype) for part in parts]))
