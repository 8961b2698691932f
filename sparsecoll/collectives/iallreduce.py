"""Nonblocking allreduce."""

from __future__ import annotations

from typing import Any

from sparsecoll.collectives.allreduce import allreduce
from sparsecoll.transport import as_transport
from sparsecoll.transport.progress import Request, in_background


def iallreduce(comm: Any, x: Any, *arguments: Any, **options: Any) -> Request[Any]:
    """Start an `allreduce` in the background and return a Request. Collective.

    Every rank must make the same calls on a communicator in the same order. One thread per communicator executes them,
    and blocking calls, in that order; calls on different communicators run concurrently. Do not change x or the
    algorithm object until `wait` returns.

    This needs MPI_THREAD_MULTIPLE, which mpi4py requests by default. At a lower thread level, and on the simulator, the
    call is complete when iallreduce returns.

    Args:
        comm: as in `sparsecoll.allreduce`.
        x: as in `sparsecoll.allreduce`.
        arguments: further positional arguments of `sparsecoll.allreduce`.
        options: keyword arguments of `sparsecoll.allreduce`.

    Returns:
        Request, whose `wait()` returns what `allreduce` returns or raises what it raises.

    >>> def program(comm):
    ...     requests = [iallreduce(comm, sparsecoll.SparseVector([i], np.ones(1), 5)) for i in range(3)]
    ...     return [int(request.wait().values[0]) for request in requests]
    >>> sparsecoll.simulate(4, program).results[0]
    [4, 4, 4]
    """
    transport = as_transport(comm, options.get("timeout"))
    return Request(in_background(transport, lambda: allreduce(transport, x, *arguments, **options)))
