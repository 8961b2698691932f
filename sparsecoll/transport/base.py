"""Transport: point-to-point messages of bytes, counted. `channel.py` sends vectors over it.

Messages from one rank to another arrive in the order in which they were sent, every receive names its source, and sends
do not block; so algorithms need no tags. A message that was sent from GPU memory arrives in GPU memory.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from sparsecoll.errors import CommunicationError
from sparsecoll.formats import Buffer
from sparsecoll.telemetry.trace import span
from sparsecoll.telemetry.traffic import Counts, Traffic
from sparsecoll.transport import process
from sparsecoll.transport.network import BETWEEN_NODES, ONE_NODE, Network
from sparsecoll.transport.tags import ANY, ERROR_TAG, FIRST_TAG, REVOKE_TAG, CallMismatch, parts_of
from sparsecoll.transport.waiting import Watchdog, out_of_use

T = TypeVar("T")
_numbers = itertools.count(1)
Ranks = Callable[[], Iterable[int]]


class Transport(ABC):
    """One rank's end of a communicator.

    Attributes:
        rank: rank of this process.
        size: number of ranks.
        traffic: counters, see `sparsecoll.Traffic`.
        timeout: seconds a receive waits before it raises CommunicationError; None for no limit, with a warning once a
            minute that names the rank waited for.
        chunk: bytes that one call of MPI or of the system sends or receives at most; they refuse more.
        room: bytes of a message that is received, at most; a longer one is refused before there is memory for it.
        threads: whether calls may run in a thread of their own.
        virtual: whether time is modelled.
        one_node: whether all ranks are on one machine, the same on all of them.
        gpu_direct: whether messages in GPU memory are sent without a copy in host memory.
        waits_by, abort: the class of `watchdog`; ends the whole job.
        nodes: the ranks on each node, see `all_ranks.node_members`; None if not known yet.
        groups: transports of some of the ranks, see `Channel.group`.
        sharers: weak references to the objects that make calls by themselves, by number.
        requests: the calls of the user, see `progress.Requests`; None before the first one.
        worker: executes all calls once there has been a nonblocking one, see `progress.Worker`; None before.
        tag: tag with which messages are sent, and expected to be received, see `tag_of`.
        calls: number of calls made on this transport.
        history: for each of the last HISTORY calls the numbers in its tags: that of its name, then for each agreement
            that of its messages, or -1 if it had none, and that of what was agreed on.
        notices: for each rank that has waited long for this one, the tag for which it waits.
        number: of this transport in this process, from 1 on.
        serial: greater than that of any earlier communicator of one of the ranks, if their messages might be mixed up.
        agreed: dict from a checksum of what all ranks have agreed on to its number, the least recently used first.
        validated: arguments that have been validated on this communicator, see `collectives.allreduce.arguments_of`.
        epoch: number of calls that have failed, the same on all ranks.
        broken: why the communicator can no longer be used (a rank does not answer or is lost); "" if it can.
        revoked: whether this rank has revoked the communicator, or need not tell the others that it is broken.
        cure: what to do then.
    """

    chunk = 1 << 30
    room = ANY
    threads = False
    virtual = False
    one_node = False
    gpu_direct = True
    waits_by: type[Watchdog] = Watchdog
    cure = "use each communicator from one thread at a time"

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.number = rank, size, next(_numbers)
        self.traffic = Traffic()
        self.timeout: float | None = None
        self.nodes: list[list[int]] | None = None
        self.groups: dict[tuple[int, ...], Transport] = {}
        self.sharers: dict[int, Any] = {}
        self.worker: Any = None
        self.requests: Any = None
        self._caller = threading.RLock()  # held by the thread that makes a blocking call
        self.tag = FIRST_TAG
        self.calls = self.serial = self.epoch = 0
        self.history: dict[int, list[int]] = {}
        self.notices: dict[int, int] = {}
        self.agreed: dict[int, int] = {}
        self.validated: dict[Any, Any] = {}
        self.broken, self.revoked, self._setting_up = "", False, False
        self._phase: Counts | None = None
        self._phase_start = 0.0
        self._staging: Any = None
        self.abort: Callable[[], object] = partial(os._exit, 1)
        process.add(self)

    def forked(self) -> None:
        """Forget, in a forked process, the threads of the process that it was forked from."""
        self.worker, self._caller = None, threading.RLock()

    def retire(self, why: str, cure: str) -> None:
        """Refuse calls from now on, without telling the other ranks."""
        self.broken, self.cure, self.revoked = why, cure, True

    def finish(self, seconds: Callable[[], float]) -> None:
        """Wait until no other thread is in a call, for `seconds()` at most; from then on none can make one."""
        if self.worker is not None:
            self.worker.close(seconds())
            self.worker = None
        self._caller.acquire(timeout=seconds())

    def leave(self) -> bool:
        """Return whether this process may end; called again and again until it may."""
        return True

    def _check(self) -> None:
        if self.broken:
            raise out_of_use(self.broken, self.cure)

    def interrupt(self, why: str) -> None:
        """Mark the communicator as broken: an exception that is not reported to other ranks has left a call."""
        if self.size > 1:
            self.broken = self.broken or why

    def fail(self, why: str) -> CommunicationError:
        """Mark the communicator as broken; return the exception to raise."""
        self.broken = why
        return CommunicationError(why)

    def watchdog(self, what: Callable[[], str], error: Exception | None = None, awaited: Ranks | None = None) -> Any:
        """Return a Watchdog with the timeout of the current call, which marks the communicator as broken if it raises.

        It raises, too, when another thread has marked it as broken, as for a call of the worker that was interrupted.

        Args:
            what, error: see Watchdog.
            awaited: returns the ranks that may be in another call; None, the default, if none is.
        """
        on_stall = awaited and partial(self.stalled, awaited)
        return self.waits_by(self.rank, what, self.timeout, error, on_stall, self.abort, self.fail, self._check)

    def reset(self) -> None:
        """Discard results that the ranks have in common; after a failed call, only some of them may have the latest."""
        for known in (self.agreed, self.validated, self.history, self.notices):
            known.clear()
        self.nodes = None
        for group in self.groups.values():
            group.reset()
        self.epoch += 1

    def is_in_another_call(self, tag: int) -> bool:
        """Return whether this rank makes, or has made, another call than the one in which a rank uses this tag."""
        call, name, step, number = parts_of(tag)
        numbers = self.history.get(call)
        return numbers is not None and (numbers[0] != name or (step < len(numbers) and numbers[step] != number))

    def stalled(self, awaited: Ranks, first: bool) -> None:
        """Send ranks a stall notice, and check those that have been received; see docs/reliability.md.

        Args:
            awaited: returns the ranks for which this one waits.
            first: whether they have not had one yet.

        Raises:
            CallMismatch: A rank that waits for this one is in another call.
        """
        for peer in awaited() if first else ():
            self._notify(peer, np.array([self.serial, self.tag]).view(np.uint8))
        self._receive_notices()
        for source, tag in self.notices.items():
            if self.is_in_another_call(tag):
                raise CallMismatch(f"rank {source} is in another call")

    def _keep_notice(self, source: int, message: Buffer) -> None:
        """Record a stall notice, unless it is of another communicator."""
        serial, tag = message.view(np.int64).tolist()
        if serial == self.serial:
            self.notices[source] = tag

    def _notify(self, peer: int, message: Buffer) -> None:  # noqa: B027 - one rank has no peers
        """Send a stall notice, without waiting; not counted."""

    def _receive_notices(self) -> None:  # noqa: B027 - on the simulator, notices arrive at once
        """Receive the stall notices that have arrived, even behind other messages."""

    def in_order(self, function: Callable[[], T]) -> T:
        """Execute a blocking call after earlier nonblocking ones; immediately if it is made within one of them.

        Raises:
            CommunicationError: Another thread is in such a call. Other ranks may have taken the two in another order,
                so that the communicator is broken: the thread that is in the call tells them.
        """
        if self.worker is not None and self.worker.thread == threading.get_ident():
            return function()
        if not self._caller.acquire(blocking=False):
            why, _ = process.ended()
            self.broken = self.broken or why or f"two threads made calls at the same time on rank {self.rank}"
            raise out_of_use(self.broken, self.cure)
        try:
            return function() if self.worker is None else self.worker.in_order(function, self)  # type: ignore[no-any-return]
        finally:
            self._caller.release()

    @property
    def network(self) -> Network:
        """The costs of messages by which algorithms are chosen, the same on all ranks."""
        return ONE_NODE if self.one_node else BETWEEN_NODES

    def now(self) -> float:
        """Return the seconds on this rank's clock, which is virtual on the simulator."""
        return time.perf_counter()

    @abstractmethod
    def _isend(self, destination: int, buffer: Buffer, tag: int) -> None:
        """Start sending a message or a report; the buffer must not change until `waitall`."""

    @abstractmethod
    def _irecv(self, source: int, into: Buffer | None) -> Any:
        """Start to receive the next message from `source`; see `irecv`."""

    @abstractmethod
    def waitall(self) -> None:
        """Wait until the buffers of all sends may be reused."""

    def exchange_errors(self, report: Buffer, error: Exception | None = None) -> list[Buffer | None]:
        """Send a report to all ranks, and discard the messages of each rank up to its report. Not counted.

        All ranks must do the same.

        Args:
            report: this rank's report.
            error: exception of this rank, logged if the others do not report within a second; None, the default, if it
                has none.

        Returns:
            The reports in rank order, with None for this rank, and for others if a rank has revoked the communicator.

        Raises:
            CommunicationError: A rank did not report within the timeout; the transport is broken.
        """
        self._check()
        self._send_to_all(report, ERROR_TAG)
        reports: list[Buffer | None] = [None] * self.size
        missing = [peer for peer in range(self.size) if peer != self.rank]
        for source, tag, message in self._until_reports(missing, error):
            if tag < FIRST_TAG:
                reports[source] = message
                missing.remove(source)
            if tag == REVOKE_TAG:
                break
        return reports

    def _until_reports(self, missing: list[int], error: Exception | None) -> Iterator[tuple[int, int, Buffer]]:
        """Receive messages of the ranks in `missing`, from which reports are removed meanwhile, until it is empty.

        Yields:
            Rank, tag and content; without content if it is not a report.
        """
        yield from ()

    def revoke(self, report: Buffer) -> None:
        """Send a report to all ranks, once, and wait for none: the communicator is broken."""
        if not self.revoked:
            self.revoked = True
            self._send_to_all(report, REVOKE_TAG)

    def _send_to_all(self, report: Buffer, tag: int) -> None:
        for peer in range(self.size):
            if peer != self.rank:
                with contextlib.suppress(CallMismatch):  # it is gone: what it sent before tells more
                    self._isend(peer, report, tag)

    def machines(self) -> list[int] | None:
        """Return a number for each rank, equal for ranks on one machine; None if that takes messages to find out."""
        return None

    def node(self) -> int:
        """Return that number of this rank."""
        return (self.machines() or range(self.size))[self.rank]

    def staging(self) -> Any:
        """Return the copies of messages from and to GPU memory; needs CuPy."""
        if self._staging is None:
            from sparsecoll.transport.staging import Staging

            self._staging = Staging(self.gpu_direct)
        return self._staging

    def isend(self, destination: int, buffer: Buffer) -> None:
        """Send bytes without blocking; the buffer must not change until `waitall`.

        Raises:
            ValueError: `destination` is no rank.
        """
        self._check_rank("destination", destination)
        for counts in self._counters():
            counts.bytes_sent += buffer.size
            counts.messages_sent += 1
        self._check()
        self._isend(destination, buffer, self.tag)

    def recv(self, source: int, into: Buffer | None = None) -> Buffer:
        """Receive the next message from `source`; see `irecv`."""
        return self.irecv(source, into).wait()

    def irecv(self, source: int, into: Buffer | None = None) -> ReceiveRequest:
        """Start to receive the next message from `source`; receives from one source complete in order.

        Args:
            source: rank that sends it.
            into: memory for the message, used if it has exactly this size; None, the default, for a new buffer.

        Raises:
            ValueError: `source` is no rank.
        """
        self._check_rank("source", source)
        self._check()
        return ReceiveRequest(self, self._irecv(source, into))

    def _check_rank(self, argument: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"{argument}: expected a rank from 0 to {self.size - 1}, got {rank}")

    def check_room(self, source: int, size: int, room: int) -> None:
        """Raise CommunicationError unless a message of `size` bytes may be received."""
        if size > room:
            raise CommunicationError(f"message from rank {source}: expected at most {room} bytes, got {size}")

    def progress(self) -> None:  # noqa: B027 - a transport that needs no polling has nothing to do
        """Receive the messages that have arrived, before a long computation."""

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Context manager: count and time the enclosed messages under `name`, without those of nested phases."""
        return contextlib.nullcontext() if self._setting_up else _Phase(self, name)

    @contextlib.contextmanager
    def set_up(self) -> Iterator[None]:
        """Context manager: count the enclosed messages only as `Traffic.set_up`, in no phase and no total."""
        outer, start = self._setting_up, self.now()
        self._setting_up = True
        try:
            yield
        finally:
            self._setting_up = outer
            if not outer:
                self.traffic.set_up.seconds += self.now() - start

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a communicator cannot be pickled or copied: save the state_dict() of what has it")

    def _counters(self) -> tuple[Counts, ...]:
        if self._setting_up:
            return (self.traffic.set_up,)
        return (self.traffic.total,) if self._phase is None else (self.traffic.total, self._phase)


class _Phase:
    """The context manager of `Transport.phase`."""

    __slots__ = ("_name", "_outer", "_transport")

    def __init__(self, transport: Transport, name: str) -> None:
        self._transport, self._name = transport, name

    def __enter__(self) -> None:
        self._outer, phases = self._transport._phase, self._transport.traffic.phases
        self._go_on_with(phases.get(self._name) or phases.setdefault(self._name, Counts()))

    def __exit__(self, *error: object) -> None:
        self._go_on_with(self._outer)

    def _go_on_with(self, phase: Counts | None) -> None:
        transport, now = self._transport, self._transport.now()
        if transport._phase is not None:
            transport._phase.seconds += now - transport._phase_start
        transport._phase, transport._phase_start = phase, now


@dataclass(slots=True)
class ReceiveRequest:
    """A nonblocking receive, which counts its message."""

    _transport: Transport
    _request: Any

    def wait(self) -> Buffer:
        """Wait for the message and return it; raise CallMismatch if one with another tag was received."""
        with span("wait"):
            buffer: Buffer = self._request.wait()
        for counts in self._transport._counters():
            counts.bytes_received += buffer.size
            counts.messages_received += 1
        return buffer
