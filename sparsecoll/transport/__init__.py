"""Transports: MPI and the simulator. `as_transport(comm)` is the only door."""

from __future__ import annotations

from typing import Any

from sparsecoll.transport.base import Transport
from sparsecoll.transport.sim import DeadlockError, LocalTransport, SimComm, Simulation, simulate

__all__ = [
    "DeadlockError",
    "LocalTransport",
    "SimComm",
    "Simulation",
    "Transport",
    "as_transport",
    "default_comm",
    "shrink",
    "simulate",
]


def as_transport(comm: Any) -> Transport:
    """The transport of a communicator: mpi4py's, a virtual rank's, or a Transport itself.

    For an mpi4py communicator the first call is collective: it duplicates the communicator, keeps the duplicate on it
    as an attribute and frees it with it.

    Raises:
        TypeError: not an intracommunicator.
    """
    if isinstance(comm, Transport):
        return comm
    if isinstance(comm, SimComm):
        return comm.transport
    if any(base.__module__.startswith("mpi4py") for base in type(comm).__mro__):
        from sparsecoll.transport.mpi import mpi_transport

        return mpi_transport(comm)
    raise TypeError(
        "comm: expected an mpi4py intracommunicator or the comm of sparsecoll.simulate,"
        f" got {type(comm).__module__}.{type(comm).__qualname__}"
    )


def shrink(comm: Any) -> Any:
    """A communicator of the ranks of an mpi4py communicator that live, in the same order; collective among them.

    For going on after a CommunicationError that says that a rank is lost. `comm` is of no use afterwards. Needs an MPI
    with user-level failure mitigation: Open MPI started by `mpirun --with-ft ulfm`, for one.

    Raises:
        CommunicationError: this MPI cannot.
    """
    from sparsecoll.transport import mpi

    return mpi.shrink(comm)


def default_comm() -> Any:
    """MPI.COMM_WORLD where mpi4py finds an MPI library, else a communicator of one rank."""
    try:
        from sparsecoll.transport.mpi import world
    except (ImportError, RuntimeError):
        return LocalTransport()
    return world()
