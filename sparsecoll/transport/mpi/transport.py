"""MpiTransport: nonblocking sends and matched probes on a duplicate of the user's communicator."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from sparsecoll.errors import CommunicationError
from sparsecoll.formats import Buffer
from sparsecoll.kernels.memory import on_gpu
from sparsecoll.telemetry.trace import span
from sparsecoll.transport import process
from sparsecoll.transport.base import (
    CALL_PARENT,
    ERROR_TAG,
    FIRST_TAG,
    FORKED,
    NUMBERS,
    PHASES,
    REVOKE_TAG,
    STALL_TAG,
    Transport,
    out_of_use,
    parts_of,
    report_of,
)
from sparsecoll.transport.mpi import info
from sparsecoll.transport.mpi.allreduce import NativeSum
from sparsecoll.transport.mpi.messages import IncomingMessage, MpiReceive
from sparsecoll.transport.mpi.waiting import Waiter

T = TypeVar("T")

CHUNK = 1 << 30  # bytes; a longer message goes in several, so that counts fit an int on every MPI
FINALIZED = "MPI.Finalize() was called"
CALL_BEFORE = "call it after the last use of sparsecoll: a process cannot start MPI again"


class MpiTransport(Transport):
    """One rank's end of a duplicate of an MPI communicator.

    Attributes:
        comm: the duplicate, so that no message of the user's is ever received.
        chunk: bytes of the longest message that is sent as one.
        status: of the message that was probed last.
        expected: for each source, the receive requests that are not complete.
        native_sum: MPI's own allreduce.
    """

    native_sums = True
    cure = "continue with a new one, such as MPI.COMM_WORLD.Dup()"

    def __init__(self, comm: MPI.Intracomm) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())
        self.comm = comm
        self.chunk = CHUNK
        self.status = MPI.Status()
        self.threads = MPI.Query_thread() >= MPI.THREAD_MULTIPLE
        self.expected: list[deque[MpiReceive]] = [deque() for _ in range(self.size)]
        self._sources: set[int] = set()  # from which something may be expected
        self._sends: deque[tuple[Any, Buffer, int]] = deque()
        self._telling: list[tuple[Any, Buffer]] = []
        self._kept: list[Any] = []
        self._revoked = False  # whether this rank has revoked the communicator
        self._leaving: Any = None  # the barrier of ranks whose programs have ended
        self._direct: bool | None = None
        self._staging: Any = None
        self.native_sum = NativeSum(self)

    now = staticmethod(time.perf_counter)

    @property
    def one_node(self) -> bool:  # type: ignore[override]
        """Whether all ranks are on one machine; known from the first call on, see collectives.node_members."""
        return self.nodes is not None and len(self.nodes) == 1

    def node(self) -> int:
        return info.machine()

    # -- waiting and failures

    def waiter(
        self,
        what: Callable[[], str],
        error: Exception | None = None,
        awaited: Callable[[], Iterable[int]] | None = None,
    ) -> Waiter:
        """Return a Waiter with the timeout of the current call.

        Args:
            what: see Waiter.
            error: see Waiter.
            awaited: returns the ranks that may be in another call; None, the default, if none is.
        """
        return Waiter(self.comm, what, self.timeout, error, awaited and partial(self.stalled, awaited))

    def pause(self, waiter: Waiter, moving: bool = False) -> bool:
        """Pause between two polls; return whether that was a sleep. After the timeout the communicator is broken.

        Args:
            waiter: of the event.
            moving: see `Waiter.pause`.
        """
        try:
            return waiter.pause(moving)
        except CommunicationError as error:
            self.broken = str(error)
            raise

    def lost(self, what: str, error: MPI.Exception) -> CommunicationError:
        """Mark the communicator as broken by an error of MPI, and return the exception to raise."""
        self.broken = f"rank {self.rank} failed in {what}: {error.Get_error_string()}"
        return CommunicationError(self.broken)

    def recorded(self, step: Callable[[], T], what: str, peer: int) -> T:
        """Call MPI and record what it has done; an exception in between leaves the communicator broken."""
        try:
            return step()
        except MPI.Exception as error:
            raise self.lost(f"{what} {peer}", error) from error
        except BaseException as error:
            self.broken = self.broken or f"{type(error).__name__} on rank {self.rank}, {what} {peer}"
            self._kept.append(step)  # MPI may still use its memory
            raise

    def _check(self) -> None:
        if MPI.Is_finalized():  # any other function of MPI would abort the process
            self.broken, self.cure = FINALIZED, CALL_BEFORE
            self._revoked = True  # the others are told nothing
        if self.broken:
            raise out_of_use(self.broken, self.cure)

    # -- sending

    def _isend(self, destination: int, buffer: Buffer) -> None:
        self._check()
        self._post(destination, buffer, self._mpi_tag())

    def _mpi_tag(self) -> int:
        return FIRST_TAG + (self.tag - FIRST_TAG) % (PHASES * NUMBERS)

    def _post(self, destination: int, buffer: Buffer, tag: int) -> None:
        """Start sending in chunks; the lowest bit of MPI's tag tells messages from GPU memory."""

        def start(chunk: Buffer, mpi_tag: int) -> None:
            self._sends.append((self.comm.Isend([chunk, MPI.BYTE], destination, mpi_tag), chunk, destination))

        if buffer.size < self.chunk and not on_gpu(buffer):
            self.recorded(partial(start, buffer, 2 * tag), "sending to rank", destination)
            return
        if on_gpu(buffer):
            chunks, mpi_tag = self.staging().sendable(buffer, self.chunk), 2 * tag + 1
        else:  # the last chunk is not full, so an empty one may have to follow
            starts = range(0, buffer.size + 1, self.chunk)
            chunks, mpi_tag = (buffer[start : start + self.chunk] for start in starts), 2 * tag
        for chunk in chunks:
            self.recorded(partial(start, chunk, mpi_tag), "sending to rank", destination)

    def waitall(self) -> None:
        waiter: Waiter | None = None
        with span("wait"):
            while self._sends:
                try:
                    sent = self._sends[0][0].Test()
                except MPI.Exception as error:
                    raise self.lost("sending", error) from error
                if sent:
                    self._sends.popleft()
                    continue
                waiter = waiter or self.waiter(
                    lambda: "waits for its own sends to complete", awaited=lambda: {send[2] for send in self._sends}
                )
                self.pause(waiter)

    # -- receiving

    def _irecv(self, source: int, into: Buffer | None) -> MpiReceive:
        self._check()
        request = MpiReceive(self, source, into, self._mpi_tag())
        self.expected[source].append(request)
        self._sources.add(source)
        return request

    def progress(self) -> None:
        for source in list(self._sources):
            queue = self.expected[source]
            while queue and queue[0].poll():
                queue.popleft()
            if not queue:
                self._sources.discard(source)

    def allreduce(self, values: NDArray[Any], out: NDArray[Any]) -> bool:
        self._check()
        return self.native_sum(values, out)

    def reset(self) -> None:
        super().reset()
        self.native_sum.reset()

    # -- ranks in different calls

    def _tell(self, peer: int, message: Buffer) -> None:
        def start() -> None:
            self._telling = [sending for sending in self._telling if not sending[0].Test()]
            self._telling.append((self.comm.Isend([message, MPI.BYTE], peer, 2 * STALL_TAG), message))

        self.recorded(start, "sending to rank", peer)

    def _listen(self) -> None:
        def heard() -> bool:
            message = self.comm.Improbe(MPI.ANY_SOURCE, 2 * STALL_TAG, self.status)
            if message is not None:
                self.hear(message)
            return message is not None

        while self.recorded(heard, "receiving what was told to rank", self.rank):
            pass

    def hear(self, message: Any) -> None:
        """Receive a message of `stalled`, which has been probed."""
        source, told = self.status.Get_source(), np.empty(16, np.uint8)
        message.Recv([told, MPI.BYTE])
        self._hear(source, told)

    # -- messages in GPU memory

    @property
    def gpu_direct(self) -> bool:  # type: ignore[override]
        """Whether this MPI accepts device pointers, see `info.takes_device_pointers`."""
        if self._direct is None:
            self._direct = info.takes_device_pointers(self.comm)
        return self._direct

    def staging(self) -> Any:
        """Return what moves messages from and to GPU memory; needs CuPy."""
        if self._staging is None:
            from sparsecoll.transport.staging import Staging

            self._staging = Staging(self.gpu_direct)
        return self._staging

    def full(self, mpi_tag: int) -> int:
        """Return the bytes of a full chunk, after which another one follows."""
        if mpi_tag & 1 and not self.gpu_direct:
            return self.staging().chunk  # type: ignore[no-any-return]
        return self.chunk

    # -- reports of errors

    def exchange_errors(self, report: Buffer, error: Exception | None = None) -> list[Buffer | None]:
        self._check()
        self._send_to_all(report, ERROR_TAG + self.calls % PHASES)
        channels: dict[int, IncomingMessage] = {}
        for source, queue in enumerate(self.expected):  # the first chunks of a message may be here
            channels[source] = queue[0] if queue else IncomingMessage(self, source)
            channels[source].expected = None
            queue.clear()
        del channels[self.rank]
        reports: list[Buffer | None] = [None] * self.size
        waiter = self.waiter(lambda: f"waits for the report of rank {', '.join(map(str, channels))}", error)
        while channels:
            arrived = False
            for source, incoming in list(channels.items()):
                if not incoming.poll(keep=False):
                    continue
                arrived = True
                if incoming.tag >= FIRST_TAG:
                    channels[source] = IncomingMessage(self, source)
                    continue
                reports[source] = incoming.joined()
                del channels[source]
                if incoming.tag == REVOKE_TAG:
                    return reports
            if not arrived:
                self.pause(waiter)
        self.waitall()
        return reports

    def reported(self) -> bool:
        """Return whether there is a report of an error in this call, or of a communicator that is broken.

        One of the next calls is not for this call, which its sender has finished.
        """
        tags = (REVOKE_TAG, *(ERROR_TAG + (self.calls - back) % PHASES for back in (0, 1)))
        return any(self.comm.Iprobe(MPI.ANY_SOURCE, 2 * tag) for tag in tags)

    def revoke(self, report: Buffer) -> None:
        if self._revoked:
            return
        self._revoked = True
        with contextlib.suppress(CommunicationError):
            self._send_to_all(report, REVOKE_TAG)

    def leave(self) -> bool:
        """See Transport: all ranks have ended their programs, or this one tells those that wait for it or will do so.

        MPI_Finalize would wait for them, without a word, and they for this rank.
        """
        if self.size == 1 or MPI.Is_finalized():
            return True
        try:
            if not self.broken and self._is_awaited():
                self.broken = f"rank {self.rank} does not make this call: {process.ended()[0] or FINALIZED}"
            if self.broken:
                self.revoke(report_of(self.broken))
                return True
            self._leaving = self._leaving or self.comm.Ibarrier()
            return bool(self._leaving.Test())
        except (MPI.Exception, CommunicationError):
            return True

    def _is_awaited(self) -> bool:
        """Return whether a rank makes a call that this one has not made."""
        self._listen()
        told = any(parts_of(tag)[0] > self.calls for tag in self.told.values())
        return told or self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)

    def close(self) -> None:
        """Refuse later calls, such as those of plans: the user's communicator has been freed."""
        self.broken = self.broken or "it was freed, which ends its plans, too"
        self._revoked = True  # the others are told nothing: they have freed it as well

    def forked(self) -> None:
        """Refuse calls: the other ranks would take their messages for those of the process that was forked."""
        super().forked()
        self.broken, self.cure = FORKED, CALL_PARENT
        self._revoked = True  # the others are told nothing

    def _send_to_all(self, report: Buffer, tag: int) -> None:
        for peer in range(self.size):
            if peer != self.rank:
                self._post(peer, report, tag)
