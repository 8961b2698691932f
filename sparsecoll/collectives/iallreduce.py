"""Nonblocking allreduce."""

from __future__ import annotations

from typing import Any

from sparsecoll.collectives.allreduce import allreduce
from sparsecoll.transport import as_transport
from sparsecoll.transport.progress import Request, in_background


def iallreduce(comm: Any, x: Any, *arguments: Any, **options: Any) -> Request[Any]:
    """`allreduce` in the background. Collective: every rank makes the same calls on a communicator in the same order.

    Takes what `allreduce` takes and returns a Request at once. Calls on one communicator, blocking ones too, are
    carried out one after the other by one thread, in the order in which they were made; those on different
    communicators side by side. Leave x and the algorithm object alone until `wait` returns.

    Needs MPI_THREAD_MULTIPLE (mpi4py asks for it). With less, and on the simulator, the call is carried out before
    iallreduce returns.

    >>> def program(comm):
    ...     requests = [iallreduce(comm, sparsecoll.SparseVector([i], np.ones(1), 5)) for i in range(3)]
    ...     return [int(request.wait().values[0]) for request in requests]
    >>> sparsecoll.simulate(4, program).results[0]
    [4, 4, 4]
    """
    transport = as_transport(comm, options.get("timeout"))
    return Request(in_background(transport, lambda: allreduce(transport, x, *arguments, **options)))
