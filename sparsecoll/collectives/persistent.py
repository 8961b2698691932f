"""Persistent collectives: each prepares the blocking call of its name and returns a Plan, whose calls repeat it.

As a persistent collective of MPI-4, it validates the options and compares the arguments of all ranks once, with an
example of x that is not sent. Later calls check that x is like the example and send the data.

>>> def program(comm):
...     x = sparsecoll.SparseVector([comm.rank, 4], np.ones(2), 6)
...     plan = sparsecoll.scan_init(comm, x)
...     return [plan(step * x)[4].item() for step in range(3)]
>>> sparsecoll.simulate(3, program).results[2]
[0.0, 3.0, 6.0]
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, ParamSpec, TypeVar

from sparsecoll.collectives.allgather import allgather, prepare_allgather
from sparsecoll.collectives.alltoall import alltoall, prepare_alltoall
from sparsecoll.collectives.alltoallv import alltoallv, prepare_alltoallv
from sparsecoll.collectives.bcast import bcast, prepare_bcast
from sparsecoll.collectives.exscan import exscan, prepare_exscan
from sparsecoll.collectives.gather import gather, prepare_gather
from sparsecoll.collectives.options import CallOptions
from sparsecoll.collectives.plan import Plan
from sparsecoll.collectives.reduce import prepare_reduce, reduce
from sparsecoll.collectives.reduce_scatter import prepare_reduce_scatter, reduce_scatter
from sparsecoll.collectives.scan import prepare_scan, scan
from sparsecoll.collectives.scatter import prepare_scatter, scatter
from sparsecoll.transport import as_transport
from sparsecoll.transport.call import CollectiveCall, PlannedArguments

P = ParamSpec("P")
T = TypeVar("T")
Prepare = Callable[..., Callable[[], Any]]

OPTIONS = {field.name for field in fields(CallOptions)}
DOCSTRING = """Prepare `sparsecoll.{name}`, to be repeated, and return a Plan. Collective.

    {paragraph}

    {more}

    Args:{arguments}Returns:
        Plan: `plan(x)` returns what `{name}` returns; `plan.start(x)` and `plan.wait()` do it in the background.

    Raises:
        ValueError, TypeError, CommunicationError: As `sparsecoll.{name}`, of which this is the part before the data.

    See Also:
        `sparsecoll.{name}`, `sparsecoll.Plan`.
    """
ALIKE = """The vectors of a plan have one length, shape and dtype. Types with keys instead of a length are refused."""
OWN_KINDS = """The vectors of a plan may differ from call to call in length, dtype and type, as their messages say."""
PARTNERS = """The ranks find their partners once: a rank sends to the same ranks in each call, and later calls send data
    alone."""


def persistent(call: Callable[P, T], prepare: Prepare, more: str) -> Callable[P, Plan[T]]:
    """Return the persistent function of a collective, with the same arguments.

    Args:
        call: the blocking function.
        prepare: its part before the data, see `blocking.py`.
        more: what its docstring says of the vectors.
    """
    signature = inspect.signature(call)
    name, (_, _, text) = f"{call.__name__}_init", (call.__doc__ or "").partition("Args:")

    def init(*args: P.args, **kwargs: P.kwargs) -> Plan[T]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        comm, x = given.pop("comm"), given.pop("x")
        chosen = {option: given.pop(option) for option in OPTIONS & given.keys()}
        return _plan(comm, x, name, CallOptions(**{"nonfinite": "pass"} | chosen), prepare, given)

    init.__name__ = init.__qualname__ = name
    paragraph = (__doc__ or "").partition("\n\n")[2].partition("\n\n")[0].replace("\n", "\n    ")
    arguments = text.partition("Returns:")[0]
    init.__doc__ = DOCSTRING.format(name=call.__name__, paragraph=paragraph, more=more, arguments=arguments)
    init.__signature__ = signature.replace(return_annotation="Plan")  # type: ignore[attr-defined]
    return init


def _plan(comm: Any, x: Any, name: str, options: CallOptions, prepare: Prepare, given: dict[str, Any]) -> Plan[Any]:
    transport, planned = as_transport(comm, options.timeout), PlannedArguments()

    def prepared(call: CollectiveCall, x: Any) -> Callable[[], Any]:
        call.plan = planned
        return prepare(call, x, options, **given)

    def init() -> Plan[Any]:
        with CollectiveCall(transport, name, options.timeout) as call:
            prepared(call, x)
            transport.waitall()
        return Plan(transport, name, options.timeout, lambda call, x: prepared(call, x)())

    return transport.in_order(init)


reduce_init = persistent(reduce, prepare_reduce, ALIKE)
"""Persistent `sparsecoll.reduce`."""

reduce_scatter_init = persistent(reduce_scatter, prepare_reduce_scatter, ALIKE)
"""Persistent `sparsecoll.reduce_scatter`."""

allgather_init = persistent(allgather, prepare_allgather, ALIKE)
"""Persistent `sparsecoll.allgather`."""

gather_init = persistent(gather, prepare_gather, ALIKE)
"""Persistent `sparsecoll.gather`."""

scatter_init = persistent(scatter, prepare_scatter, OWN_KINDS)
"""Persistent `sparsecoll.scatter`."""

bcast_init = persistent(bcast, prepare_bcast, OWN_KINDS)
"""Persistent `sparsecoll.bcast`."""

alltoall_init = persistent(alltoall, prepare_alltoall, OWN_KINDS)
"""Persistent `sparsecoll.alltoall`."""

alltoallv_init = persistent(alltoallv, prepare_alltoallv, PARTNERS)
"""Persistent `sparsecoll.alltoallv`."""

scan_init = persistent(scan, prepare_scan, ALIKE)
"""Persistent `sparsecoll.scan`."""

exscan_init = persistent(exscan, prepare_exscan, ALIKE)
"""Persistent `sparsecoll.exscan`."""
