"""The transport of each communicator: a duplicate, cached on the user's communicator and freed with it."""

from __future__ import annotations

import os
import sys
import threading
from functools import partial
from typing import Any, cast

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from sparsecoll.errors import CommunicationError, is_known
from sparsecoll.transport import process
from sparsecoll.transport.mpi.transport import CALL_BEFORE, FINALIZED, MpiTransport
from sparsecoll.transport.mpi.waiting import Waiter
from sparsecoll.transport.tags import REVOKE_TAG, report_of
from sparsecoll.transport.waiting import CALL_PARENT, FORKED, Abandoned, out_of_use

_lock = threading.Lock()
_keyval: list[int] = []
LAST_SECONDS = 5.0  # beyond the timeout of a first call, once all ranks have come
_serial = [0]  # the greatest one of this process's transports
_kept: list[MpiTransport | Abandoned] = []  # whose memory MPI may still use
_process = os.getpid()  # one that was forked from it must call nothing of MPI
NO_ULFM = "shrink: this MPI has no ULFM, or it is off: with Open MPI, start the job by mpirun --with-ft ulfm"


def mpi_transport(comm: MPI.Intracomm, timeout: float | None = None) -> MpiTransport:
    """Return the transport cached on `comm`; the first call duplicates the communicator, which is collective.

    Args:
        comm: the user's communicator.
        timeout: seconds to wait for the other ranks to make their first call; None, the default, for no limit.

    Raises:
        TypeError: `comm` is not an intracommunicator.
        CommunicationError: Not all ranks made their first call within the timeout, now or earlier; or this process was
            forked from one that uses MPI, or MPI has been finalized.
        RuntimeError: MPI has not been initialized.
    """
    _check(comm)
    key = _key()
    with _lock:
        transport: Any = comm.Get_attr(key)
        if transport is None:
            comm.Set_attr(key, Abandoned("two threads made calls at the same time"))  # for another thread
    if transport is None:
        serial = np.array(_serial)
        try:
            transport = _duplicate(comm, timeout, serial)
        except MPI.Exception as error:  # of MPI_Comm_dup, which fails on all ranks
            comm.Delete_attr(key)
            raise CommunicationError(f"comm: this MPI cannot duplicate it: {error}") from error
        except BaseException as error:  # others wait, and MPI may still use `serial`
            comm.Set_attr(key, Abandoned(f"its first call failed on rank {comm.rank}: {error!r}", serial))
            raise
        comm.Set_attr(key, transport)
    if isinstance(transport, Abandoned):
        raise transport.error()
    assert isinstance(transport, MpiTransport)
    return transport


def _check(comm: Any) -> None:
    """Raise unless it is an intracommunicator that this process may use."""
    if os.getpid() != _process:
        raise out_of_use(FORKED, CALL_PARENT)
    if MPI.Is_finalized():  # which would abort the process
        raise out_of_use(FINALIZED, CALL_BEFORE)
    if not MPI.Is_initialized():  # which would, too; a communicator of a Session may be there
        raise RuntimeError("comm: expected MPI to be initialized, got none: call MPI.Init() first")
    if comm == MPI.COMM_NULL:
        raise TypeError("comm: expected an mpi4py intracommunicator, got MPI.COMM_NULL (or one that was freed)")
    if not isinstance(comm, MPI.Intracomm):
        cure = ": use comm.Merge()" if isinstance(comm, MPI.Intercomm) else ""
        raise TypeError(f"comm: expected an mpi4py intracommunicator, got {type(comm).__name__}{cure}")


def _duplicate(comm: MPI.Intracomm, timeout: float | None, serial: NDArray[Any]) -> MpiTransport | Abandoned:
    """Return a transport over a duplicate of `comm`.

    MPI_Comm_dup has no timeout. Two barriers come first, so that a rank only enters it if all others do: after the
    first barrier it knows that all ranks are here, and after the second that none of them had timed out by then. For
    the second they have some seconds more. The barriers are reductions, which find the serial number.
    """
    what = "waits for all ranks to make their first call on the communicator"
    try:
        for more in (0.0, LAST_SECONDS):
            limit = None if timeout is None else timeout + more
            waiter = Waiter(comm.rank, lambda: what, limit, abort=partial(comm.Abort, 1))
            request = comm.Iallreduce(MPI.IN_PLACE, serial, MPI.MAX)
            while not request.Test():
                waiter.pause()
    except (CommunicationError, MPI.Exception) as error:  # of MPI, if it knows a lost rank
        return Abandoned(str(error), serial)  # which MPI still uses
    transport = MpiTransport(comm.Dup())
    transport.serial = int(serial[0]) + 1
    _serial[0] = max(_serial[0], transport.serial)
    return transport


def _key() -> int:
    with _lock:
        if not _keyval:
            _keyval.append(MPI.Comm.Create_keyval(delete_fn=_free))
            MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=_leave), True)  # deleted first of all at the end
        return _keyval[0]


def _free(comm: MPI.Comm, keyval: int, transport: MpiTransport | Abandoned) -> None:
    if isinstance(transport, Abandoned):
        if transport.kept is not None:
            _kept.append(transport)
        return
    if transport.worker is not None:
        transport.worker.close()
        transport.worker = None
    if transport.size > 1 and not MPI.Is_finalized():
        _tell_others(transport)
    if transport.broken:  # a new communicator would receive the messages left in it
        _kept.append(transport)
    elif not MPI.Is_finalized():
        transport.comm.Free()
    transport.close()


def _tell_others(transport: MpiTransport) -> None:
    """Before a communicator is freed, tell ranks that may go on with its calls of the exception in this one's way."""
    error = sys.exc_info()[1]
    if not (error is None or transport.broken or is_known(error, transport)):
        transport.broken = f"rank {transport.rank} has freed it after {error!r}"
    if transport.broken:
        transport.revoke(report_of(transport.broken))
        return
    try:
        revoked = transport.comm.Iprobe(MPI.ANY_SOURCE, 2 * REVOKE_TAG)
    except MPI.Exception:  # ULFM: a rank was lost
        revoked = True
    transport.broken = "a rank has revoked it" if revoked else ""


def _leave(*_: object) -> None:
    """Leave all communicators; MPI.Finalize() calls this."""
    process.leave([transport for transport in process.living() if isinstance(transport, MpiTransport)], FINALIZED)


def shrink(comm: MPI.Intracomm) -> MPI.Intracomm:
    """See `sparsecoll.shrink`."""
    _check(comm)
    own = comm.Get_attr(_key())  # no transport if there was no call, or if the first one has failed
    off = os.environ.get("OMPI_MCA_mpi_ft_enable", "0") in ("0", "false")  # noqa: SIM112
    if off and MPI.Get_library_version().startswith("Open MPI"):  # whose Shrink() would wait for ever
        raise CommunicationError(NO_ULFM)
    try:
        if isinstance(own, MpiTransport):
            own.comm.Revoke()
            own.broken = own.broken or "it was shrunk"
        comm.Revoke()
        return cast(MPI.Intracomm, comm.Shrink())
    except NotImplementedError as error:
        raise CommunicationError(NO_ULFM) from error
    except MPI.Exception as error:
        raise CommunicationError(f"shrink: this MPI cannot continue without lost ranks: {error}") from error


def world(self: bool = False) -> MPI.Intracomm:
    """Return MPI.COMM_WORLD, or MPI.COMM_SELF."""
    return MPI.COMM_SELF if self else MPI.COMM_WORLD
