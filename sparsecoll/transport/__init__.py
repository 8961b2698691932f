"""Transports: MPI, TCP and the simulator. `as_transport(comm)` returns the transport of a communicator."""

from __future__ import annotations

import importlib.util
import threading
from typing import Any

from sparsecoll.errors import CommunicationError
from sparsecoll.telemetry.traffic import Traffic
from sparsecoll.transport import launcher
from sparsecoll.transport.base import Transport as Transport
from sparsecoll.transport.local import LocalTransport as LocalTransport
from sparsecoll.transport.process_groups import default_group, group_transport, is_group
from sparsecoll.transport.sim import SimComm as SimComm, Simulation as Simulation, simulate as simulate
from sparsecoll.transport.virtual_ranks import DeadlockError as DeadlockError
from sparsecoll.transport.waiting import check_timeout as check_timeout, usable

_lock = threading.Lock()
_alone: list[LocalTransport] = []  # what None stands for without MPI and torch.distributed


def as_transport(comm: Any, timeout: Any = None) -> Transport:
    """Return the transport of a communicator.

    The first call with an mpi4py communicator is collective: it duplicates the communicator. The duplicate is kept as
    an attribute of the communicator and freed with it. The first call with a process group is collective, too: it
    connects the ranks by sockets, which are closed when the group is destroyed.

    Args:
        comm: mpi4py intracommunicator; ProcessGroup or one-dimensional DeviceMesh of torch.distributed; virtual rank of
            `simulate`; None, see `default_comm`; or Transport, which is returned.
        timeout: seconds that the first call may wait for other ranks; None, the default, or an invalid timeout (which
            raises later, on all ranks) for no limit.

    Raises:
        TypeError: `comm` is none of these.
        ValueError: This process is not in the group, the group was destroyed, or the mesh has several dimensions.
        RuntimeError: `comm` is None or of an MPI that knows of one process, but not MPI.COMM_SELF, and a launcher has
            started several processes, or there is a process group of several.
        CommunicationError: Not all ranks made their first call within the timeout, or MPI has been finalized.
    """
    if isinstance(comm, Transport):
        return comm
    if comm is None:
        transport = as_transport(default_comm(), timeout)
        if transport.size == 1:
            launcher.refuse_one_rank()
        return transport
    if isinstance(comm, SimComm):
        return comm.transport
    if _is_mpi4py(comm):
        from sparsecoll.transport.mpi import mpi_transport, world

        transport = mpi_transport(comm, timeout if usable(timeout) else None)
        if transport.size == 1 and world().Get_size() == 1 and comm != world(self=True):
            _refuse_beside_group()
            launcher.refuse_one_rank()
        return transport
    if is_group(comm):
        return group_transport(comm, timeout if usable(timeout) else None)
    name = f"{type(comm).__module__}.{type(comm).__qualname__}"
    cure = ": in its place pass sparsecoll.connect(store, rank, size)" if name.startswith("torch.") else ""
    raise TypeError(
        "comm: expected an mpi4py intracommunicator, a ProcessGroup or one-dimensional DeviceMesh, None or the comm of"
        f" sparsecoll.simulate, got {name}{cure}"
    )


def traffic(comm: Any) -> Traffic:
    """Return the counters of this rank on `comm`, which later calls update.

    The first use of an mpi4py communicator is collective, because it duplicates the communicator.

    Args:
        comm: communicator, as in `sparsecoll.allreduce`.

    Returns:
        Traffic: `print` shows a table by phase, `reset()` sets all counters to zero.
    """
    return as_transport(comm).traffic


def shrink(comm: Any) -> Any:
    """Return a communicator of the surviving ranks, in the same order; collective among them.

    Use it to continue after a CommunicationError that reports a lost rank. It needs an MPI with user-level failure
    mitigation (ULFM), such as Open MPI started with `mpirun --with-ft ulfm`.

    Args:
        comm: mpi4py intracommunicator, which cannot be used afterwards.

    Returns:
        mpi4py intracommunicator.

    Raises:
        CommunicationError: This MPI does not support it, or `comm` is not an MPI communicator.
    """
    if is_group(comm):
        raise CommunicationError(
            "shrink: expected an mpi4py intracommunicator, got a process group, which cannot be shrunk;"
            " let torchrun restart the job (--max-restarts) and load a checkpoint"
        )
    if not _is_mpi4py(comm):
        missing = "" if importlib.util.find_spec("mpi4py") else "; mpi4py is not installed (pip install mpi4py)"
        raise CommunicationError(
            f"shrink: expected an mpi4py intracommunicator, got {type(comm).__qualname__}{missing}"
        )
    from sparsecoll.transport import mpi

    return mpi.shrink(comm)


def _is_mpi4py(comm: Any) -> bool:
    return any(base.__module__.startswith("mpi4py") for base in type(comm).__mro__)


def _refuse_beside_group() -> None:
    """Raise if torch.distributed's default group has several ranks: torchrun has started them, and MPI knows none."""
    if (group := default_group()) is not None and group.size() > 1:
        raise RuntimeError(
            f"comm: expected the {group.size()} ranks of torch.distributed, got one rank of an MPI that did not start"
            " them: each process would work on its own. Pass the process group, or None for the default one, or"
            " comm=MPI.COMM_SELF if that is what you want"
        )


def default_comm() -> Any:
    """Return the default group of torch.distributed if there is one, else MPI.COMM_WORLD, else one rank."""
    if (group := default_group()) is not None:
        return group
    try:
        from sparsecoll.transport.mpi import world
    except (ImportError, RuntimeError):
        with _lock:
            if not _alone or _alone[0].broken:
                _alone[:] = [LocalTransport()]  # the same for all calls, which it keeps in order
            return _alone[0]
    return world()
