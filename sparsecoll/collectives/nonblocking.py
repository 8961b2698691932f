"""Nonblocking collectives: each starts the blocking call of its name in the background and returns a Request.

Every rank must make the same calls on a communicator in the same order. One thread per communicator executes them, and
blocking calls, in that order; calls on different communicators run concurrently. Do not change x or an algorithm object
until `wait` returns.

This needs MPI_THREAD_MULTIPLE, which mpi4py requests by default. At a lower thread level, and on the simulator, the
call is complete when the function returns.

>>> def program(comm):
...     requests = [sparsecoll.iallreduce(comm, sparsecoll.SparseVector([i], np.ones(1), 5)) for i in range(3)]
...     return [int(y.values[0]) for y in sparsecoll.Request.waitall(requests)]
>>> sparsecoll.simulate(4, program).results[0]
[4, 4, 4]
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from sparsecoll.collectives.allgather import allgather
from sparsecoll.collectives.allreduce import allreduce
from sparsecoll.collectives.alltoall import alltoall
from sparsecoll.collectives.alltoallv import alltoallv
from sparsecoll.collectives.bcast import bcast
from sparsecoll.collectives.gather import gather
from sparsecoll.collectives.reduce import reduce
from sparsecoll.collectives.reduce_scatter import reduce_scatter
from sparsecoll.collectives.scatter import scatter
from sparsecoll.transport import as_transport
from sparsecoll.transport.progress import Request, requests_of

P = ParamSpec("P")
T = TypeVar("T")

DOCSTRING = """Start `sparsecoll.{name}` in the background and return a Request. Collective.

    {paragraph}

    Args:{arguments}Returns:
        Request: `wait()` returns what `{name}` returns, or raises what it raises.

    See Also:
        `sparsecoll.{name}`, `sparsecoll.Request`.
    """


def nonblocking(call: Callable[P, T]) -> Callable[P, Request[T]]:
    """Return the nonblocking function of a collective, with the same arguments."""
    signature = inspect.signature(call)

    def start(*args: P.args, **kwargs: P.kwargs) -> Request[T]:
        bound = signature.bind(*args, **kwargs)
        transport = as_transport(bound.arguments["comm"], bound.arguments.get("timeout"))
        bound.arguments["comm"] = transport
        return requests_of(transport).start(lambda: call(*bound.args, **bound.kwargs))

    name, (_, _, text) = call.__name__, (call.__doc__ or "").partition("Args:")
    paragraph = (__doc__ or "").partition("\n\n")[2].partition("\n\n")[0].replace("\n", "\n    ")
    start.__name__ = start.__qualname__ = f"i{name}"
    start.__doc__ = DOCSTRING.format(name=name, paragraph=paragraph, arguments=text.partition("Returns:")[0])
    start.__signature__ = signature.replace(return_annotation="Request")  # type: ignore[attr-defined]
    return start


iallreduce = nonblocking(allreduce)
ireduce = nonblocking(reduce)
ireduce_scatter = nonblocking(reduce_scatter)
iallgather = nonblocking(allgather)
igather = nonblocking(gather)
iscatter = nonblocking(scatter)
ibcast = nonblocking(bcast)
ialltoall = nonblocking(alltoall)
ialltoallv = nonblocking(alltoallv)
