"""What every transport offers: bytes, point to point, counted. `channel.py` sends vectors over it.

A message that was sent from GPU memory arrives in GPU memory.

Messages between a pair of ranks arrive in the order in which they were sent (one FIFO channel per ordered pair), every
receive names its source, and sends do not block. Hence no tags: the algorithm's own order tells messages apart.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from sparsecoll.formats import Buffer
from sparsecoll.telemetry.trace import span
from sparsecoll.telemetry.traffic import Counts, Traffic
from sparsecoll.transport.network import Tuning

T = TypeVar("T")

ERROR_TAG, REVOKE_TAG = 0, 1  # the tags of reports, see `sparsecoll.transport.call`
FIRST_TAG = 2  # of messages
TAGS = 16383  # below it: an MPI tag has one bit more, and every MPI has 32,767 tags


class CallMismatch(Exception):
    """In place of the message waited for came a peer's report, or a message of another call."""


class ReceiveRequest(Protocol):
    """A receive that was asked for; `wait` returns the buffer."""

    def wait(self) -> Buffer:
        """Block until the message is here.

        Raises:
            CallMismatch: it will not come.
        """
        ...


class Transport(ABC):
    """One rank's end of a communicator.

    Attributes:
        rank, size: of this communicator.
        traffic: counters, see `sparsecoll.traffic.Traffic`.
        timeout: seconds a receive waits before it raises CommunicationError; None waits for ever, and a warning is
            logged once a minute that names the rank waited for.
        threads: whether calls may run in a thread of their own.
        virtual: whether time is modelled, and passes only where the model says so.
        one_node: whether all ranks are on one machine, the same on all of them.
        gpu_direct: whether messages in GPU memory need no way through the host.
        tag: what messages are sent with, and expected to come with.
        calls: that were made on this transport.
        agreed: checksums of calls that all ranks have agreed on, and the number of each.
        nodes: the ranks on each node, see collectives.node_members; None: not known yet.
        epoch: how many calls have failed, on all ranks together.
        broken: why the communicator cannot be used any more (a peer did not answer, or is lost); else "".
    """

    threads = False
    virtual = False
    one_node = False
    gpu_direct = True
    measured: Tuning | None  # the last measurement; whether other ranks have the same one is to be asked

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.traffic = Traffic()
        self.timeout: float | None = None
        self.nodes: list[list[int]] | None = None  # see collectives.node_members
        self.tuning: Tuning | None = None  # what all ranks know, see tune.tuning_of
        self.measured = None
        self.groups: dict[tuple[int, ...], Transport] = {}  # see group.group
        self.sharers: dict[int, Any] = {}  # weak references to what makes calls of its own accord, by number
        self.worker: Any = None  # see progress.Worker: once there is one, all calls go through it
        self.tag = FIRST_TAG
        self.calls = 0
        self.agreed: dict[int, int] = {}
        self.epoch = 0
        self.broken = ""
        self._phase: Counts | None = None
        self._apart = False

    def reset(self) -> None:
        """Drop what was found out together: after a call that failed some ranks may have it and others not."""
        self.agreed.clear()
        self.nodes = self.tuning = None
        for group in self.groups.values():
            group.reset()
        self.epoch += 1

    def in_order(self, function: Callable[[], T]) -> T:
        """Carry out a blocking call after the nonblocking ones that were made before it.

        Called by the progress thread itself, as a part of one of its calls, it is carried out at once.
        """
        return function() if self.worker is None else self.worker.in_order(function)  # type: ignore[no-any-return]

    def modelled(self) -> Tuning | None:
        """The costs of this transport where they are a model's and need no measuring."""
        return None

    @abstractmethod
    def now(self) -> float:
        """Seconds on this rank's clock (the simulator's clock is virtual)."""

    @abstractmethod
    def _isend(self, destination: int, buffer: Buffer) -> None:
        """Start sending; the buffer must not change until `waitall`."""

    @abstractmethod
    def _irecv(self, source: int, into: Buffer | None) -> ReceiveRequest:
        """Ask for the next message from `source`; see `irecv`."""

    @abstractmethod
    def waitall(self) -> None:
        """Wait until every send has left its buffer."""

    @abstractmethod
    def exchange_errors(self, report: Buffer, error: Exception | None = None) -> list[Buffer | None]:
        """Send a report to all ranks and drop what comes before theirs; they, in rank order (None: this rank's).

        All ranks must do the same. Where one has revoked the communicator, some reports are missing. Not counted.

        Args:
            error: what was raised here, if anything was: logged, if others do not report within a second.

        Raises:
            CommunicationError: a rank did not report within the timeout; the transport is broken.
        """

    def revoke(self, report: Buffer) -> None:  # noqa: B027 - nobody to tell
        """Send a report to all ranks and wait for nothing more: this transport is broken."""

    def node(self) -> int:
        """A number that the ranks on one machine share."""
        return self.rank

    def located(self) -> list[list[int]] | None:
        """The ranks on each node, ascending, where that is known without a message."""
        return None

    def isend(self, destination: int, buffer: Buffer) -> None:
        """Send bytes without blocking. The buffer belongs to the transport from here on: do not change it."""
        for counts in self._counters():
            counts.bytes_sent += buffer.size
            counts.messages_sent += 1
        self._isend(destination, buffer)

    def recv(self, source: int, into: Buffer | None = None) -> Buffer:
        """The next message from `source`; see `irecv`."""
        return self.irecv(source, into).wait()

    def irecv(self, source: int, into: Buffer | None = None) -> ReceiveRequest:
        """Ask for the next message from `source` without blocking; receives of one source are served in order.

        Args:
            into: where to put it, if it has exactly this size; else it comes in a buffer of its own.
        """
        return _Counted(self, self._irecv(source, into))

    def progress(self) -> None:  # noqa: B027 - optional: a transport that needs no polling has nothing to do
        """Let messages that have arrived be taken in, before a long computation."""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens inside under `name`; what happens in a phase inside counts for that one alone."""
        if self._apart:
            yield
            return
        outer, start = self._phase, self.now()
        self._phase = self.traffic.phases.setdefault(name, Counts())
        mine = self._phase
        try:
            yield
        finally:
            mine.seconds += self.now() - start
            self._phase = outer

    @contextlib.contextmanager
    def set_up(self) -> Iterator[None]:
        """Count what happens inside as `Traffic.set_up`, in no phase and no total."""
        outer, start = self._apart, self.now()
        self._apart = True
        try:
            yield
        finally:
            self._apart = outer
            if not outer:
                self.traffic.set_up.seconds += self.now() - start

    def _counters(self) -> tuple[Counts, ...]:
        if self._apart:
            return (self.traffic.set_up,)
        return (self.traffic.total,) if self._phase is None else (self.traffic.total, self._phase)

    def _count_received(self, buffer: Buffer) -> None:
        for counts in self._counters():
            counts.bytes_received += buffer.size
            counts.messages_received += 1


class _Counted:
    """A pending receive that counts the message when it is taken."""

    __slots__ = ("_pending", "_transport")

    def __init__(self, transport: Transport, pending: ReceiveRequest) -> None:
        self._transport = transport
        self._pending = pending

    def wait(self) -> Buffer:
        with span("wait"):
            buffer = self._pending.wait()
        self._transport._count_received(buffer)
        return buffer
