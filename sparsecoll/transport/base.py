"""Transport: point-to-point messages of bytes, counted. `channel.py` sends vectors over it.

Messages from one rank to another arrive in the order in which they were sent, every receive names its source, and sends
do not block; so algorithms need no tags. A message that was sent from GPU memory arrives in GPU memory.
"""

from __future__ import annotations

import contextlib
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from sparsecoll.errors import CommunicationError
from sparsecoll.formats import Buffer
from sparsecoll.telemetry.trace import span
from sparsecoll.telemetry.traffic import Counts, Traffic
from sparsecoll.transport import process
from sparsecoll.transport.network import BETWEEN_NODES, ONE_NODE, Network

T = TypeVar("T")

PHASES = 4  # messages of calls that follow each other never have the same tag
ERROR_TAG, REVOKE_TAG = 0, PHASES  # the tags of reports, see `sparsecoll.transport.call`; over MPI one for each phase
STALL_TAG = REVOKE_TAG + 1  # of what a rank that waits tells, see `Transport.stalled`
FIRST_TAG = STALL_TAG + 1  # the lowest tag of a message
FORKED, CALL_PARENT = "this process was forked", "make calls in the process that it was forked from"
TAGS = 16383  # MPI's tags are below this, with one bit more: every MPI has 32,767 tags
NUMBERS = (TAGS - FIRST_TAG) // PHASES  # tags of a phase: by name before the ranks agree, by name with check=False,
NAMES = 509  # (a prime that gives each name in use a number of its own)
KEPT = NUMBERS - 2 * NAMES  # and one for each of the last arguments and states that the ranks have agreed on
STEPS = 64  # more than a call has, see `Transport.history`
HISTORY = 1024  # calls that are remembered
ANY, REPORT_BYTES = 1 << 63, 1 << 24  # of a message, and of a report, at most


class CallMismatch(Exception):
    """A report or a message of another call was received in place of the expected message."""


def tag_of(call: int, name: int, step: int, number: int) -> int:
    """Return the tag of a message; modulo PHASES * NUMBERS, it has the number of the call modulo PHASES and `number`.

    Args:
        call: number of the call on the communicator.
        name: number of its name.
        step: position in `Transport.history`.
        number: of the name, or of the arguments that the ranks have agreed on.
    """
    turn, phase = divmod(call, PHASES)
    return FIRST_TAG + (((turn * NAMES + name) * STEPS + step) * PHASES + phase) * NUMBERS + number


def parts_of(tag: int) -> tuple[int, int, int, int]:
    """Return the arguments of `tag_of`."""
    rest, number = divmod(tag - FIRST_TAG, NUMBERS)
    rest, phase = divmod(rest, PHASES)
    rest, step = divmod(rest, STEPS)
    turn, name = divmod(rest, NAMES)
    return turn * PHASES + phase, name, step, number


class ReceiveRequest(Protocol):
    """A nonblocking receive."""

    def wait(self) -> Buffer:
        """Wait for the message and return it.

        Raises:
            CallMismatch: A message with another tag came instead.
        """
        ...


class Transport(ABC):
    """One rank's end of a communicator.

    Attributes:
        rank: rank of this process.
        size: number of ranks.
        traffic: counters, see `sparsecoll.Traffic`.
        timeout: seconds a receive waits before it raises CommunicationError; None for no limit, with a warning once a
            minute that names the rank waited for.
        room: bytes of a message that is received, at most; a longer one is refused before there is memory for it.
        threads: whether calls may run in a thread of their own.
        virtual: whether time is modelled.
        one_node: whether all ranks are on one machine, the same on all of them.
        native_sums: whether there may be an `allreduce` of the network's own.
        gpu_direct: whether messages in GPU memory are sent without a copy in host memory.
        nodes: the ranks on each node, see `collectives.node_members`; None if not known yet.
        groups: transports of some of the ranks, see `group.group`.
        sharers: weak references to the objects that make calls by themselves, by number.
        worker: executes all calls once there has been a nonblocking one, see `progress.Worker`; None before.
        tag: tag with which messages are sent, and expected to be received, see `tag_of`.
        calls: number of calls made on this transport.
        history: for each of the last HISTORY calls the numbers in its tags: that of its name, then for each agreement
            that of its messages, or -1 if it had none, and that of what was agreed on.
        told: for each rank that has waited long for this one, the tag for which it waits.
        serial: greater than that of any earlier communicator of one of the ranks, if their messages might be mixed up.
        met: number of the last call in which each rank has had a message of every other one.
        agreed: dict from a checksum of what all ranks have agreed on to its number, the least recently used first.
        validated: arguments that have been validated on this communicator, see `collectives.allreduce.arguments_of`.
        epoch: number of calls that have failed, the same on all ranks.
        broken: why the communicator can no longer be used (a rank does not answer or is lost); "" if it can.
        cure: what to do then.
    """

    room = ANY
    threads = False
    virtual = False
    one_node = False
    native_sums = False
    gpu_direct = True
    cure = "use each communicator from one thread at a time"

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.traffic = Traffic()
        self.timeout: float | None = None
        self.nodes: list[list[int]] | None = None
        self.groups: dict[tuple[int, ...], Transport] = {}
        self.sharers: dict[int, Any] = {}
        self.worker: Any = None
        self._caller = threading.RLock()  # held by the thread that makes a blocking call
        self.tag = FIRST_TAG
        self.calls = self.met = self.serial = self.epoch = 0
        self.history: dict[int, list[int]] = {}
        self.told: dict[int, int] = {}
        self.agreed: dict[int, int] = {}
        self.validated: dict[Any, Any] = {}
        self.broken, self._setting_up = "", False
        self._phase: Counts | None = None
        process.add(self)

    def forked(self) -> None:
        """Forget, in a forked process, what only the process that it was forked from has: its threads."""
        self.worker, self._caller = None, threading.RLock()

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

    def reset(self) -> None:
        """Discard what the ranks have found out together; after a failed call, only some of them may have it."""
        for known in (self.agreed, self.validated, self.history, self.told):
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

    def stalled(self, awaited: Callable[[], Iterable[int]], first: bool) -> None:
        """Tell ranks for which tag this one waits, and compare what others have told; see docs/reliability.md.

        Args:
            awaited: returns the ranks for which this one waits.
            first: whether they have not been told yet.

        Raises:
            CallMismatch: A rank that waits for this one is in another call.
        """
        for peer in awaited() if first else ():
            self._tell(peer, np.array([self.serial, self.tag]).view(np.uint8))
        self._listen()
        for source, tag in self.told.items():
            if self.is_in_another_call(tag):
                raise CallMismatch(f"rank {source} is in another call")

    def _hear(self, source: int, message: Buffer) -> None:
        """Take note of what `stalled` told this rank."""
        serial, tag = message.view(np.int64).tolist()
        if serial == self.serial:
            self.told[source] = tag

    def _tell(self, peer: int, message: Buffer) -> None:  # noqa: B027 - one rank has nobody to tell
        """Send a message of `stalled`, without waiting; not counted."""

    def _listen(self) -> None:  # noqa: B027 - on the simulator, `_tell` is heard at once
        """Hear what has arrived of the messages of `stalled`, whatever else was sent before."""

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
            return function() if self.worker is None else self.worker.in_order(function)  # type: ignore[no-any-return]
        finally:
            self._caller.release()

    @property
    def network(self) -> Network:
        """The costs of messages by which algorithms are chosen, the same on all ranks."""
        return ONE_NODE if self.one_node else BETWEEN_NODES

    @abstractmethod
    def now(self) -> float:
        """Return the seconds on this rank's clock, which is virtual on the simulator."""

    @abstractmethod
    def _isend(self, destination: int, buffer: Buffer) -> None:
        """Start sending; the buffer must not change until `waitall`."""

    @abstractmethod
    def _irecv(self, source: int, into: Buffer | None) -> ReceiveRequest:
        """Start to receive the next message from `source`; see `irecv`."""

    @abstractmethod
    def waitall(self) -> None:
        """Wait until the buffers of all sends may be reused."""

    @abstractmethod
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

    def revoke(self, report: Buffer) -> None:  # noqa: B027 - without other ranks there is nothing to do
        """Send a report to all ranks and wait for none: the communicator is broken."""

    def node(self) -> int:
        """Return a number that only the ranks on one machine share."""
        return self.rank

    def located(self) -> list[list[int]] | None:
        """Return the ranks on each node, ascending; None if that takes messages to find out."""
        return None

    def isend(self, destination: int, buffer: Buffer) -> None:
        """Send bytes without blocking; the buffer must not change until `waitall`."""
        for counts in self._counters():
            counts.bytes_sent += buffer.size
            counts.messages_sent += 1
        self._isend(destination, buffer)

    def recv(self, source: int, into: Buffer | None = None) -> Buffer:
        """Receive the next message from `source`; see `irecv`."""
        return self.irecv(source, into).wait()

    def irecv(self, source: int, into: Buffer | None = None) -> ReceiveRequest:
        """Start to receive the next message from `source`; receives from one source complete in order.

        Args:
            source: rank that sends it.
            into: memory for the message, used if it has exactly this size; None, the default, for a new buffer.
        """
        return _CountedReceive(self, self._irecv(source, into))

    def check_room(self, source: int, size: int, room: int) -> None:
        """Raise CommunicationError unless a message of `size` bytes may be received."""
        if size > room:
            raise CommunicationError(f"message from rank {source}: expected at most {room} bytes, got {size}")

    def progress(self) -> None:  # noqa: B027 - a transport that needs no polling has nothing to do
        """Receive the messages that have arrived, before a long computation."""

    def allreduce(self, values: NDArray[Any], out: NDArray[Any]) -> bool:
        """Sum arrays in host memory by the network's own allreduce, with the same bits on all ranks; collective.

        Messages cannot be counted. Counted are what a reduce-scatter and an allgather receive: 2m(P-1)/P bytes in
        2 ceil(log2 P) messages.

        Args:
            values: array of m bytes of float32 or float64, of the same size on all ranks; without NaN and infinity, as
                the payload of a NaN depends on the order in which it is added.
            out: memory for the sum; may be `values`.

        Returns:
            Whether that was possible, the same on all ranks. Otherwise `out` has not been written.
        """
        return False

    def _count_allreduce(self, size: int) -> None:
        """Count an allreduce of `size` bytes."""
        moved, messages = 2 * size * (self.size - 1) // self.size, 2 * (self.size - 1).bit_length()
        for counts in self._counters():
            counts.bytes_sent += moved
            counts.bytes_received += moved
            counts.messages_sent += messages
            counts.messages_received += messages

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

    def _count_received(self, buffer: Buffer) -> None:
        for counts in self._counters():
            counts.bytes_received += buffer.size
            counts.messages_received += 1


def out_of_use(why: str, cure: str) -> CommunicationError:
    """Return what is raised by calls on a communicator that can no longer be used."""
    return CommunicationError(f"communicator is out of use since {why}; {cure}")


def report_of(why: str = "", **report: Any) -> Buffer:
    """Return a report as a message; with `why`, that of a rank by which the communicator is out of use."""
    if why:
        report |= {"broken": why, "error": {"type": "CommunicationError", "text": why}}
    return np.frombuffer(bytearray(json.dumps(report).encode()), np.uint8)


class _Phase:
    """The context manager of `Transport.phase`."""

    __slots__ = ("_counts", "_name", "_outer", "_start", "_transport")

    def __init__(self, transport: Transport, name: str) -> None:
        self._transport, self._name = transport, name

    def __enter__(self) -> None:
        transport = self._transport
        phases = transport.traffic.phases
        self._outer, self._start = transport._phase, transport.now()
        self._counts = transport._phase = phases.get(self._name) or phases.setdefault(self._name, Counts())

    def __exit__(self, *error: object) -> None:
        self._counts.seconds += self._transport.now() - self._start
        self._transport._phase = self._outer


@dataclass(slots=True)
class _CountedReceive:
    """A receive request that counts its message."""

    _transport: Transport
    _request: ReceiveRequest

    def wait(self) -> Buffer:
        with span("wait"):
            buffer = self._request.wait()
        self._transport._count_received(buffer)
        return buffer
