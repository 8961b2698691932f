"""MPI by mpi4py: nonblocking sends, matched probes, an own communicator cached on the user's and freed with it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from sparsecoll.errors import CommunicationError
from sparsecoll.formats import Buffer
from sparsecoll.kernels.memory import empty, on_gpu
from sparsecoll.telemetry.trace import span
from sparsecoll.transport.base import ERROR_TAG, REVOKE_TAG, CallMismatch, Transport
from sparsecoll.transport.network import Tuning

logger = logging.getLogger(__name__)

CHUNK = 1 << 30  # bytes; a longer message goes in several, so that counts fit an int on every MPI
WATCHDOG_SECONDS = 60.0
PATIENCE = 1.0  # seconds before a rank that waits with an exception says so
ON_TIMEOUT = "SPARSECOLL_ON_TIMEOUT"  # environment variable: "raise" (the default) or "abort"
GPU_DIRECT = "SPARSECOLL_GPU_DIRECT"  # environment variable: "1" or "0" say whether MPI takes device pointers
_SPINS = 20  # polls before a waiting rank lets others have its core, should there be any
_YIELDS = 2000  # polls that do so; after them it naps between polls
_NAP_SECONDS = 50e-6
_give_way = getattr(os, "sched_yield", partial(time.sleep, 0))  # sleep(0) takes as long as a short nap on Linux


class _Waiter:
    """Polling with patience: spin, then nap; raise after the timeout, warn once a minute.

    Args:
        error: what was raised on this rank: the first warning comes after PATIENCE seconds, and shows it.
    """

    def __init__(self, transport: MpiTransport, what: Callable[[], str], error: Exception | None = None) -> None:
        self._transport = transport
        self._what = what
        self._error = error
        self._polls = 0
        self._start = 0.0
        self._warned = 0.0

    def pause(self) -> None:
        self._polls += 1
        if self._polls < _SPINS:
            return
        now = time.monotonic()
        if self._polls == _SPINS:
            self._start = self._warned = now
        timeout = self._transport.timeout
        if timeout is not None and now - self._start > timeout:
            self._give_up(timeout)
        if now - self._warned > (WATCHDOG_SECONDS if self._error is None else PATIENCE):
            self._warned = now
            since = now - self._start
            logger.warning("rank %d %s, %.0f s so far", self._transport.rank, self._what(), since, exc_info=self._error)
            self._error = None
        if self._polls < _SPINS + _YIELDS:
            _give_way()
        else:
            time.sleep(_NAP_SECONDS)

    def _give_up(self, timeout: float) -> None:
        transport = self._transport
        transport.broken = f"rank {transport.rank} {self._what()} for {timeout} s"
        _give_up_job(transport.comm, transport.broken)
        raise CommunicationError(f"{transport.broken}: no answer within the timeout")


class _Incoming:
    """A message being received, in one or more chunks of one tag.

    Args:
        into: where to put it if it has this size and is where the message comes from (host or GPU).
    """

    def __init__(self, transport: MpiTransport, source: int, into: Buffer | None = None) -> None:
        self._transport = transport
        self._source = source
        self._into = into
        self.parts: list[Buffer] = []
        self.tag = -1
        self._gpu = False
        self._full = 0  # bytes of a chunk that says that more follows
        self._request: Any = None
        self.complete = False

    def poll(self, keep: bool = True) -> bool:
        """Take in what has arrived; True once the whole message is here.

        Args:
            keep: else it is dropped, and need not come to where it was sent from.
        """
        while not self.complete:
            if self._request is None:
                status = MPI.Status()
                message = self._transport.comm.Improbe(self._source, MPI.ANY_TAG, status)
                if message is None:
                    return False
                mpi_tag = status.Get_tag()
                if mpi_tag >> 1 != self.tag:  # a message that broke off is not continued
                    self.parts.clear()
                self.tag, self._gpu, self._full = mpi_tag >> 1, mpi_tag & 1 == 1 and keep, self._transport.full(mpi_tag)
                self.parts.append(self._room(status.Get_count(MPI.BYTE)))
                self._request = message.Irecv([self.parts[-1], MPI.BYTE])
            if not self._request.Test():
                return False
            self._request = None
            self.complete = self.parts[-1].size < self._full
            if self._gpu:
                piece = self.parts.pop()
                self.parts.append(self._transport.staging().arrived(piece, self._place(piece.size)))
        return True

    def _place(self, size: int) -> Buffer | None:
        """The part of `into` for the next chunk."""
        if self._into is None or on_gpu(self._into) != self._gpu:
            return None
        have = sum(part.size for part in self.parts)
        fits = have + size == self._into.size if size < self._full else have + size < self._into.size
        return self._into[have : have + size] if fits else None

    def _room(self, size: int) -> Buffer:
        """Where MPI puts the next chunk."""
        place = self._place(size)
        if not self._gpu:
            return empty(size, np.uint8) if place is None else place
        staging = self._transport.staging()
        if place is None or not staging.direct or size == 0:
            return staging.room(size)  # type: ignore[no-any-return]
        staging.ready()
        return place

    def joined(self) -> Buffer:
        """The message."""
        if len(self.parts) > 1 and self._into is not None and self._into.size == sum(part.size for part in self.parts):
            return self._into if on_gpu(self._into) == self._gpu else np.concatenate(self.parts)
        return self.parts[0] if len(self.parts) == 1 else np.concatenate(self.parts)


class _Pending:
    """The next message from one source, of the tag that messages have now."""

    def __init__(self, transport: MpiTransport, source: int, into: Buffer | None) -> None:
        self._transport = transport
        self._source = source
        self._tag = transport.tag
        self.incoming = _Incoming(transport, source, into)

    def poll(self) -> bool:
        """Take in what has arrived; True once the whole message is here."""
        try:
            here = self.incoming.poll()
        except MPI.Exception as error:
            raise self._transport.lost(f"receiving from rank {self._source}", error) from error
        if self.incoming.tag not in (self._tag, -1):
            raise CallMismatch(f"rank {self._source} is in another call")
        return here

    def wait(self) -> Buffer:
        queue = self._transport.expected[self._source]
        waiter = _Waiter(self._transport, lambda: f"waits for a message of rank {self._source}")
        while not self.incoming.complete:
            if not queue[0].poll():
                waiter.pause()
            elif queue[0].incoming.complete:
                queue.popleft()
        return self.incoming.joined()


class MpiTransport(Transport):
    """One rank's end of a duplicate of an MPI communicator.

    Attributes:
        comm: the duplicate, so that no message of the user's is ever taken.
        chunk: longest message in bytes that goes in one piece.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())
        self.comm = comm
        self.chunk = CHUNK
        self._revoked = False  # has revoked the communicator
        self._direct: bool | None = None
        self._staging: Any = None
        self.threads = MPI.Query_thread() >= MPI.THREAD_MULTIPLE
        self._processes: int | None = None
        self.expected: list[deque[_Pending]] = [deque() for _ in range(self.size)]
        self._awaited: set[int] = set()  # the sources of which something may be expected
        self._sends: deque[tuple[Any, Buffer]] = deque()

    @property
    def measured(self) -> Tuning | None:  # type: ignore[override]
        """What was measured last on this or any other communicator of the same processes in the same order."""
        return _measured.get(self._of_processes())

    @measured.setter
    def measured(self, tuning: Tuning | None) -> None:
        if tuning is not None:
            _measured[self._of_processes()] = tuning

    def _of_processes(self) -> int:
        if self._processes is None:
            group, everybody = self.comm.Get_group(), MPI.COMM_WORLD.Get_group()
            ranks = np.array(MPI.Group.Translate_ranks(group, None, everybody))
            self._processes = zlib.crc32(ranks.tobytes())
            group.Free()
            everybody.Free()
        return self._processes

    def now(self) -> float:
        return time.perf_counter()

    @property
    def one_node(self) -> bool:  # type: ignore[override]
        """Whether all ranks are on one machine; known from the first call on, see collectives.node_members."""
        return self.nodes is not None and len(self.nodes) == 1

    def node(self) -> int:
        return _machine()

    def _check(self) -> None:
        if self.broken:
            raise CommunicationError(
                f"communicator is out of use since {self.broken}; go on with a new one, such as comm.Dup()"
            )

    def _isend(self, destination: int, buffer: Buffer) -> None:
        self._check()
        try:
            self._post(destination, buffer, self.tag)
        except MPI.Exception as error:
            raise self.lost(f"sending to rank {destination}", error) from error

    def _post(self, destination: int, buffer: Buffer, tag: int) -> None:
        if on_gpu(buffer):
            pieces, mpi_tag = self.staging().sendable(buffer, self.chunk), 2 * tag + 1
        else:  # a full chunk says that more follows, if only nothing
            starts = range(0, buffer.size + 1, self.chunk)
            pieces, mpi_tag = (buffer[start : start + self.chunk] for start in starts), 2 * tag
        for piece in pieces:
            self._sends.append((self.comm.Isend([piece, MPI.BYTE], destination, mpi_tag), piece))

    def staging(self) -> Any:
        """What moves messages from and to GPU memory."""
        if self._staging is None:
            from sparsecoll.transport.staging import Staging

            self._staging = Staging(self.gpu_direct)
        return self._staging

    @property
    def gpu_direct(self) -> bool:  # type: ignore[override]
        """Whether this MPI takes device pointers, see `takes_device_pointers`."""
        if self._direct is None:
            self._direct = takes_device_pointers(self.comm)
        return self._direct

    def full(self, mpi_tag: int) -> int:
        """Bytes of a chunk that says that more follows."""
        if mpi_tag & 1 and not self.gpu_direct:
            from sparsecoll.transport.staging import PIECE

            return PIECE
        return self.chunk

    def lost(self, what: str, error: MPI.Exception) -> CommunicationError:
        """What to raise when MPI says that a message cannot be sent or received."""
        self.broken = f"rank {self.rank} failed in {what}: {error.Get_error_string()}"
        return CommunicationError(self.broken)

    def _irecv(self, source: int, into: Buffer | None) -> _Pending:
        self._check()
        pending = _Pending(self, source, into)
        self.expected[source].append(pending)
        self._awaited.add(source)
        return pending

    def progress(self) -> None:
        for source in list(self._awaited):
            queue = self.expected[source]
            while queue and queue[0].poll():
                queue.popleft()
            if not queue:
                self._awaited.discard(source)

    def waitall(self) -> None:
        waiter = _Waiter(self, lambda: "waits for its own sends to complete")
        with span("wait"):
            while self._sends:
                try:
                    sent = self._sends[0][0].Test()
                except MPI.Exception as error:
                    raise self.lost("sending", error) from error
                if sent:
                    self._sends.popleft()
                else:
                    waiter.pause()

    def exchange_errors(self, report: Buffer, error: Exception | None = None) -> list[Buffer | None]:
        self._check()
        self._report(report, ERROR_TAG)
        channels: dict[int, _Incoming] = {}
        for source, queue in enumerate(self.expected):  # a message may be half here
            channels[source] = queue[0].incoming if queue else _Incoming(self, source)
            queue.clear()
        del channels[self.rank]
        reports: list[Buffer | None] = [None] * self.size
        waiter = _Waiter(self, lambda: f"waits for the report of rank {', '.join(map(str, channels))}", error)
        while channels:
            arrived = False
            for source, incoming in list(channels.items()):
                try:
                    here = incoming.poll(keep=False)
                except MPI.Exception as error:
                    raise self.lost(f"receiving from rank {source}", error) from error
                if not here:
                    continue
                arrived = True
                if incoming.tag == REVOKE_TAG:
                    reports[source] = incoming.joined()
                    return reports
                if incoming.tag == ERROR_TAG:
                    reports[source] = incoming.joined()
                    del channels[source]
                else:
                    channels[source] = _Incoming(self, source)
            if not arrived:
                waiter.pause()
        self.waitall()
        return reports

    def revoke(self, report: Buffer) -> None:
        if self._revoked:
            return
        self._revoked = True
        with contextlib.suppress(MPI.Exception):
            self._report(report, REVOKE_TAG)

    def _report(self, report: Buffer, tag: int) -> None:
        for peer in range(self.size):
            if peer != self.rank:
                self._post(peer, report, tag)


@functools.cache
def _machine() -> int:
    """A number for this machine: a checksum of the name that MPI gives it and of the kernel's boot."""
    name = MPI.Get_processor_name()
    with contextlib.suppress(OSError):
        name += Path("/proc/sys/kernel/random/boot_id").read_text()
    return zlib.crc32(name.encode())


def about() -> dict[str, Any]:
    """The MPI library, the version of the standard, the level of threads, whether counts may exceed an int."""
    levels = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    given = {getattr(MPI, f"THREAD_{level}"): f"MPI_THREAD_{level}" for level in levels}
    version = MPI.Get_version()
    return {
        "library": MPI.Get_library_version().splitlines()[0].strip("\0 "),
        "version": ".".join(map(str, version)),
        "threads": given[MPI.Query_thread()],
        "large_counts": version >= (4, 0),
    }


def takes_device_pointers(comm: MPI.Intracomm) -> bool:
    """Whether MPI says so; without a positive answer messages go through the host, since a wrong guess is a crash.

    Asked are, in this order: the environment variable SPARSECOLL_GPU_DIRECT; `mpi_memory_alloc_kinds` in the
    communicator's info (MPI 4.1); MPIX_Query_cuda_support (Open MPI, MPICH).

    Raises:
        ValueError: the environment variable is neither 0 nor 1.
    """
    wanted = os.environ.get(GPU_DIRECT)
    if wanted is not None:
        if wanted not in ("0", "1"):
            raise ValueError(f"{GPU_DIRECT}: expected 0 or 1, got {wanted!r}")
        return wanted == "1"
    info = comm.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds") or ""
    info.Free()
    if any(kind.strip().split(":")[0] == "cuda" for kind in kinds.split(",")):
        return True
    for library in (None, MPI.__file__):
        query = getattr(ctypes.CDLL(library), "MPIX_Query_cuda_support", None)
        if query is not None:
            return bool(query())
    return False


def _free(comm: MPI.Comm, keyval: int, transport: MpiTransport | _Abandoned) -> None:
    if isinstance(transport, _Abandoned):
        return
    if transport.worker is not None:
        transport.worker.close()
    if (
        not MPI.Is_finalized() and not transport.broken
    ):  # a new communicator would get the messages left in a broken one
        transport.comm.Free()


_measured: dict[int, Tuning] = {}  # by a checksum of the processes; only what all of them have in common is used
_keyval_lock = threading.Lock()
_keyval: list[int] = []


def _key() -> int:
    with _keyval_lock:
        if not _keyval:
            _keyval.append(MPI.Comm.Create_keyval(delete_fn=_free))
        return _keyval[0]


@dataclass
class _Abandoned:
    """In place of a transport: ranks did not come to make the duplicate. The request is kept, since it is not done."""

    broken: str
    request: Any


def mpi_transport(comm: MPI.Intracomm, timeout: float | None = None) -> MpiTransport:
    """The transport cached on `comm`; the first call duplicates it, which is collective.

    Args:
        timeout: seconds to wait for the other ranks to make their first call.

    Raises:
        TypeError: not an intracommunicator.
        CommunicationError: they did not within the timeout, now or earlier.
    """
    if comm == MPI.COMM_NULL:
        raise TypeError("comm: expected an mpi4py intracommunicator, got MPI.COMM_NULL (or one that was freed)")
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"comm: expected an mpi4py intracommunicator, got {type(comm).__name__}")
    transport: Any = comm.Get_attr(_key())
    if transport is None:
        transport = _duplicated(comm, timeout)
        comm.Set_attr(_key(), transport)
    if isinstance(transport, _Abandoned):
        raise CommunicationError(
            f"communicator is out of use since {transport.broken}; go on with a new one, once all ranks have come"
        )
    assert isinstance(transport, MpiTransport)
    return transport


def _duplicated(comm: MPI.Intracomm, timeout: float | None) -> MpiTransport | _Abandoned:
    """MPI's duplication knows no timeout: first two barriers, so that who enters it knows that all others do.

    Who passes the first one knows that all have come, and who passes the second that nobody had given up by then.
    """
    start = warned = time.monotonic()
    rank, polls = comm.Get_rank(), 0
    for _ in range(2):
        request = comm.Ibarrier()
        while not request.Test():
            now, polls = time.monotonic(), polls + 1
            what = f"rank {rank} waited {now - start:.1f} s for all ranks to make their first call on it"
            if timeout is not None and now - start > timeout:
                _give_up_job(comm, what)
                return _Abandoned(what, request)
            if now - warned > WATCHDOG_SECONDS:
                warned = now
                logger.warning("communicator of %d ranks: %s", comm.Get_size(), what)
            if polls > _SPINS:
                time.sleep(_NAP_SECONDS)
    return MpiTransport(comm.Dup())


def _give_up_job(comm: MPI.Intracomm, why: str) -> None:
    if os.environ.get(ON_TIMEOUT) == "abort":
        logger.critical("%s: no answer within the timeout; aborting the job (%s=abort)", why, ON_TIMEOUT)
        comm.Abort(1)


def shrink(comm: MPI.Intracomm) -> MPI.Intracomm:
    """See `sparsecoll.shrink`."""
    transport = mpi_transport(comm)
    transport.broken = transport.broken or "it was shrunk"
    try:
        for revoked in (transport.comm, comm):
            revoked.Revoke()
        return cast(MPI.Intracomm, comm.Shrink())
    except (NotImplementedError, MPI.Exception) as error:
        raise CommunicationError(f"shrink: this MPI cannot go on without lost ranks: {error}") from error


def world() -> MPI.Intracomm:
    """MPI.COMM_WORLD."""
    return MPI.COMM_WORLD
