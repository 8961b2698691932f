"""MpiTransport: nonblocking sends and matched probes on a duplicate of the user's communicator."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from sparsecoll.errors import CommunicationError
from sparsecoll.formats import Buffer
from sparsecoll.kernels.memory import on_gpu
from sparsecoll.telemetry.trace import span
from sparsecoll.transport import process
from sparsecoll.transport.base import Transport
from sparsecoll.transport.launcher import machine
from sparsecoll.transport.mpi import info
from sparsecoll.transport.mpi.messages import IncomingMessage
from sparsecoll.transport.mpi.waiting import Waiter
from sparsecoll.transport.tags import REVOKE_TAG, STALL_TAG, CallMismatch, parts_of, report_of, short_tag
from sparsecoll.transport.waiting import CALL_PARENT, FORKED

T = TypeVar("T")

FINALIZED = "MPI.Finalize() was called"
CALL_BEFORE = "call it after the last use of sparsecoll: a process cannot start MPI again"


class MpiTransport(Transport):
    """One rank's end of a duplicate of an MPI communicator.

    Attributes:
        comm: the duplicate, so that no message of the user's is ever received.
        status: of the message that was probed last.
        expected: for each source, the receive requests that are not complete.
    """

    waits_by = Waiter
    cure = "continue with a new one, such as MPI.COMM_WORLD.Dup()"

    def __init__(self, comm: MPI.Intracomm) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())
        self.comm = comm
        self.abort, self.status = partial(comm.Abort, 1), MPI.Status()
        self.threads = MPI.Query_thread() >= MPI.THREAD_MULTIPLE
        self.expected: list[deque[IncomingMessage]] = [deque() for _ in range(self.size)]
        self._sources: set[int] = set()  # from which something may be expected
        self._sends: deque[tuple[Any, Buffer, int]] = deque()
        self._notices_sent: list[tuple[Any, Buffer]] = []
        self._kept: list[Any] = []
        self._leaving: Any = None  # the barrier of ranks whose programs have ended

    @property
    def one_node(self) -> bool:  # type: ignore[override]
        """Whether all ranks are on one machine; known from the first call on, see all_ranks.node_members."""
        return self.nodes is not None and len(self.nodes) == 1

    @cached_property
    def gpu_direct(self) -> bool:  # type: ignore[override]
        """Whether this MPI accepts device pointers, see `info.takes_device_pointers`."""
        return info.takes_device_pointers(self.comm)

    def node(self) -> int:
        return machine()

    # -- waiting and failures

    def recorded(self, step: Callable[[], T], what: str, peer: int) -> T:
        """Call MPI and record what it has done; an exception in between leaves the communicator broken."""
        try:
            return step()
        except MPI.Exception as error:
            raise self.fail(f"rank {self.rank} failed in {what} {peer}: {error.Get_error_string()}") from error
        except BaseException as error:
            self.broken = self.broken or f"{type(error).__name__} on rank {self.rank}, {what} {peer}"
            self._kept.append(step)  # MPI may still use its memory
            raise

    def _check(self) -> None:
        if MPI.Is_finalized():  # any other function of MPI would abort the process
            self.retire(FINALIZED, CALL_BEFORE)
        super()._check()

    # -- sending

    def _isend(self, destination: int, buffer: Buffer, tag: int) -> None:
        """Start sending in chunks; the lowest bit of MPI's tag is set for messages from GPU memory."""
        tag = short_tag(tag, self.calls)

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
        waiter: Any = None
        with span("wait"):
            while self._sends:
                request, _, peer = self._sends[0]
                if self.recorded(request.Test, "sending to rank", peer):
                    self._sends.popleft()
                    continue
                waiter = waiter or self.watchdog(lambda: "waits for its own sends to complete", awaited=self._receivers)
                waiter.pause()

    def _receivers(self) -> set[int]:
        """Return the ranks that have not received all that was sent to them."""
        return {peer for request, _, peer in self._sends if not request.Test()}

    # -- receiving

    def _irecv(self, source: int, into: Buffer | None) -> IncomingMessage:
        request = IncomingMessage(self, source, into, short_tag(self.tag, self.calls))
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

    # -- ranks in different calls

    def stalled(self, awaited: Callable[[], Any], first: bool) -> None:
        super().stalled(awaited, first)
        for peer in awaited():  # a rank that waits for its own sends would not receive the report
            if self.comm.Iprobe(peer, 2 * REVOKE_TAG):
                raise CallMismatch(f"rank {peer} has revoked the communicator")

    def _notify(self, peer: int, message: Buffer) -> None:
        def start() -> None:
            self._notices_sent = [sent for sent in self._notices_sent if not sent[0].Test()]
            self._notices_sent.append((self.comm.Isend([message, MPI.BYTE], peer, 2 * STALL_TAG), message))

        self.recorded(start, "sending to rank", peer)

    def _receive_notices(self) -> None:
        def received() -> bool:
            if (message := self.comm.Improbe(MPI.ANY_SOURCE, 2 * STALL_TAG, self.status)) is not None:
                self.receive_notice(message)
            return message is not None

        while self.recorded(received, "receiving stall notices to rank", self.rank):
            pass

    def receive_notice(self, message: Any) -> None:
        """Receive a stall notice, which has been probed."""
        source, notice = self.status.Get_source(), np.empty(16, np.uint8)
        message.Recv([notice, MPI.BYTE])
        self._keep_notice(source, notice)

    # -- reports of errors

    def _until_reports(self, missing: list[int], error: Exception | None) -> Iterator[tuple[int, int, Buffer]]:
        channels = []
        for source, queue in enumerate(self.expected):  # the first chunks of a message may be here
            channels.append(queue[0] if queue else IncomingMessage(self, source))
            channels[source].expected = None
            queue.clear()
        self._kept.append(channels)  # until the end, which a report, a timeout or an interrupt may keep it from
        waiter = self.watchdog(lambda: f"waits for the report of rank {', '.join(map(str, missing))}", error)
        while missing:
            arrived = False
            for source in list(missing):
                incoming = channels[source]
                if incoming.poll(keep=False):
                    arrived, channels[source] = True, IncomingMessage(self, source)
                    yield source, incoming.tag, incoming.joined()
            if not arrived:
                waiter.pause()
        self._kept.pop()
        with contextlib.suppress(CallMismatch):  # a rank that has reported may revoke the communicator later
            self.waitall()

    def revoke(self, report: Buffer) -> None:
        with contextlib.suppress(CommunicationError):
            super().revoke(report)

    def leave(self) -> bool:
        """See Transport: all ranks have ended their programs, or others wait for this one, which then revokes.

        MPI_Finalize would wait for them without a message, and they for this rank.
        """
        if self.size == 1 or MPI.Is_finalized():
            return True
        try:
            if not self.broken and self._is_awaited():
                self.broken = f"rank {self.rank} does not make this call: {process.ended()[0]}"
            if self.broken:
                self.revoke(report_of(self.broken))
                return True
            self._leaving = self._leaving or self.comm.Ibarrier()
            return bool(self._leaving.Test())
        except (MPI.Exception, CommunicationError):
            return True

    def _is_awaited(self) -> bool:
        """Return whether a rank makes a call that this one has not made."""
        self._receive_notices()
        ahead = any(parts_of(tag)[0] > self.calls for tag in self.notices.values())
        return ahead or self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)

    def close(self) -> None:
        """Refuse later calls, such as those of plans: the user's communicator has been freed, on all ranks."""
        self.retire(self.broken or "it was freed, which ends its plans, too", self.cure)

    def forked(self) -> None:
        """Refuse calls: the other ranks would take their messages for those of the process that was forked."""
        super().forked()
        self.retire(FORKED, CALL_PARENT)
