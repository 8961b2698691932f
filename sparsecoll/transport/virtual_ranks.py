"""The virtual ranks of the simulator: mailboxes, a virtual clock, and a baton passed to the next rank that can run.

Each rank has a thread, of which only the one with the baton runs, so that a run is deterministic. A message of m bytes
leaves when its sender's port is free, takes alpha + beta * m seconds, and enters when its receiver's port is free: many
senders to one receiver queue up, the congestion that Ok-Topk avoids by rotating destinations. Ranks on one node share
its port; messages inside a node use another network and one more port for each rank. Computation takes no time, or what
`Costs` say. Communicators of some of the ranks have mailboxes of their own; clocks and ports are those of the ranks.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sparsecoll.errors import CommunicationError
from sparsecoll.formats import Buffer
from sparsecoll.transport.base import ERROR_TAG, REVOKE_TAG, CallMismatch, Transport
from sparsecoll.transport.network import Costs, Network
from sparsecoll.transport.waiting import Watchdog

Route = tuple[Hashable, int, int]  # (communicator, source, destination), which are ranks of the world


class DeadlockError(RuntimeError):
    """Every virtual rank waits for a message that no rank will send; the message says which rank waits for which."""


class Step(NamedTuple):
    """What a rank may do next, see `simulate`.

    Attributes:
        rank: the rank, of those of the simulation.
        what: "start" its program, "send" or "receive" a message, "stall" (it has waited for a while, and looks whether
            the rank for which it waits is in another call), or "timeout" (it gives up).
        peer: rank that the message is for or comes from; -1 for other steps.
    """

    rank: int
    what: str
    peer: int = -1


Schedule = Callable[[Sequence[Step]], int]
WHEN_ALL_WAIT = ("stall", "timeout")  # in this order


class Stopped(BaseException):
    """Unwinds the other virtual ranks after one has failed, and all of them after Ctrl-C."""


@dataclass
class Message:
    """A message on its way.

    Attributes:
        content: the bytes, or an object that a program sends by its communicator.
        arrival: earliest time at which it can be received, in seconds; later if the receiver's port is busy.
    """

    content: Any
    arrival: float
    tag: int


@dataclass
class Port:
    """Until when it sends, and until when it receives, in seconds."""

    out: float = 0.0
    into: float = 0.0


@dataclass
class Clock:
    """A rank's time, in seconds, and its port for messages inside the node.

    Attributes:
        now: the time.
        left: when the last message sent has left its port.
    """

    now: float = 0.0
    left: float = 0.0
    inner: Port = field(default_factory=Port)


@dataclass
class Wait:
    """What lets a rank that waits go on: a message on one of the routes, or one of the steps `otherwise()`."""

    routes: Collection[Route]
    otherwise: Callable[[], list[Step]] = list


class World:
    """What the virtual ranks of one simulation share: mailboxes, ports, and the baton."""

    def __init__(
        self, size: int, network: Network, ranks_per_node: int, inside: Network, schedule: Schedule | None = None
    ) -> None:
        self.size = size
        self.network = network
        self.inside = inside
        self.ranks_per_node = ranks_per_node
        self.schedule = schedule
        self.ports = {node: Port() for node in range(-(-size // ranks_per_node))}
        self.clocks = [Clock() for _ in range(size)]
        self.mail: dict[Route, deque[Message]] = {}
        self.batons = [threading.Semaphore(0) for _ in range(size)]
        self.ready: deque[Step] = deque(Step(rank, "start") for rank in range(size))
        self.waiting: dict[int, Wait] = {}
        self.step = self.ready[0]  # of the rank that has the baton
        self.ends: dict[tuple[Hashable, int], SimTransport] = {}  # by communicator and rank of the world
        self.finished: set[int] = set()
        self.failure: BaseException | None = None
        self.done = threading.Event()

    def pass_baton(self) -> None:
        """Wake the next rank that can run; if there is none, the run is over or in a deadlock."""
        try:
            step = self._next() if self.failure is None and (self.ready or self.waiting) else None
        except BaseException as error:  # also of the schedule
            self.failure, step = error, None
        if self.failure is not None:
            self.ready.extend(Step(rank, "stop") for rank in sorted(self.waiting))
            self.waiting.clear()
            step = self.ready.popleft() if self.ready else None
        if step is None:
            self.done.set()
        else:
            self.step = step
            self.batons[step.rank].release()

    def _next(self) -> Step:
        """Return the step that comes next; the rank neither waits nor is ready any longer."""
        if self.schedule is None and self.ready:
            return self.ready.popleft()
        steps = [*self.ready, *(step for rank in sorted(self.waiting) for step in self._steps(rank))]
        if not steps:
            raise DeadlockError(self._report())
        if self.schedule is not None:
            step = steps[self.schedule(steps)]
        else:
            step = min(steps, key=lambda step: WHEN_ALL_WAIT.index(step.what))
        if step in self.ready:
            self.ready.remove(step)
        self.waiting.pop(step.rank, None)
        return step

    def _steps(self, rank: int) -> list[Step]:
        wait = self.waiting[rank]
        return [*(Step(rank, "receive", r[1]) for r in wait.routes if self.mail.get(r)), *wait.otherwise()]

    def _report(self) -> str:
        waits = [(rank, ", ".join(str(r[1]) for r in self.waiting[rank].routes)) for rank in sorted(self.waiting)]
        ended = f"; ended: {sorted(self.finished)}" if self.finished else ""
        lines = ", ".join(f"rank {rank} waits for rank {sources}" for rank, sources in waits)
        return f"deadlock among {self.size} virtual ranks: {lines}{ended}"

    def stop(self, why: BaseException) -> None:
        """Let every rank end in the call in which it waits, or in its next one."""
        self.failure = self.failure or why
        for baton in self.batons:
            baton.release()

    def _check_running(self) -> None:
        if self.done.is_set():
            raise RuntimeError("comm: expected one of a running simulation, got one of a simulation that has ended")
        if self.failure is not None:
            raise Stopped

    def wait(self, rank: int, wait: Wait) -> Step:
        """Let other ranks run until this one can go on; return how. A message that has come stays in the mailbox."""
        self._check_running()
        if self.schedule is None:
            for route in wait.routes:
                if self.mail.get(route):
                    return Step(rank, "receive", route[1])
        self.waiting[rank] = wait
        self.pass_baton()
        self.batons[rank].acquire()
        if self.failure is not None:
            raise Stopped
        return self.step

    def deliver(self, route: Route, message: Message) -> None:
        """Put a message into the receiver's mailbox; a receiver that waits for it can run again."""
        self._check_running()
        _, source, receiver = route
        if self.schedule is not None:
            self.wait(source, Wait((), lambda: [Step(source, "send", receiver)]))
        self.mail.setdefault(route, deque()).append(message)
        waiting = self.waiting.get(receiver)
        if self.schedule is None and waiting is not None and route in waiting.routes:
            del self.waiting[receiver]
            self.ready.append(Step(receiver, "receive", source))


class SimReceive:
    """A receive request for the next message from one source."""

    __slots__ = ("_into", "_source", "_tag", "_transport")

    def __init__(self, transport: SimTransport, source: int, into: Buffer | None) -> None:
        self._transport = transport
        self._source = source
        self._into = into
        self._tag = transport.tag

    def wait(self) -> Buffer:
        """Wait for the message and return it."""
        message = self._transport._take(self._source, self._tag)
        if self._into is None or self._into.size != message.size:
            return message
        self._into[:] = message
        return self._into


class SimTransport(Transport):
    """One virtual rank's transport.

    Args:
        world: what all virtual ranks share.
        members: ranks of the world that belong to the communicator, in its order.
        rank: this rank's position in `members`.
        costs: costs of computation (default: none).
        context: identifies the communicator.
    """

    virtual = True
    cure = "continue with a new one, such as comm.Dup()"

    def __init__(
        self, world: World, members: list[int], rank: int, costs: Costs | None = None, context: Hashable = ()
    ) -> None:
        super().__init__(rank, len(members))
        self.members = members
        self.context = context
        self._world = world
        self._costs = costs or Costs()
        self._clock = world.clocks[members[rank]]
        self._told = False  # whether the rank for which this one waits has been told so
        self._unheard: dict[int, Buffer] = {}  # of what `stalled` has told this rank, by source
        self._revoked = False  # whether this rank has revoked the communicator
        self._node = members[rank] // world.ranks_per_node
        world.ends[context, members[rank]] = self
        self.one_node = all(member // world.ranks_per_node == self._node for member in members)

    def part(self, members: list[int], context: Hashable) -> SimTransport:
        """Return the transport of a communicator of some members, which include this rank, with its own mailboxes."""
        ranks = [self.members[member] for member in members]
        return SimTransport(self._world, ranks, members.index(self.rank), self._costs, context)

    def now(self) -> float:
        return self._clock.now

    @contextlib.contextmanager
    def span(self, kind: str, /, *, amount: int, extent: int) -> Iterator[None]:
        """Advance the clock by the costs of a span of work, as a listener of `telemetry.trace`."""
        yield
        self._clock.now += self._costs.seconds(kind, amount, extent)

    @property
    def network(self) -> Network:
        """That of the simulation."""
        return self._world.inside if self.one_node else self._world.network

    def node(self) -> int:
        return self._node

    def located(self) -> list[list[int]]:
        nodes: dict[int, list[int]] = {}
        for rank, member in enumerate(self.members):
            nodes.setdefault(member // self._world.ranks_per_node, []).append(rank)
        return list(nodes.values())

    def _route(self, source: int, destination: int) -> Route:
        return self.context, self.members[source], self.members[destination]

    def _port(self, peer: int) -> tuple[Network, Port]:
        world = self._world
        if self.members[peer] // world.ranks_per_node == self._node:
            return world.inside, self._clock.inner
        return world.network, world.ports[self._node]

    def _isend(self, destination: int, buffer: Buffer) -> None:
        self._check()
        clock, (network, port) = self._clock, self._port(destination)
        port.out = max(clock.now, port.out) + network.beta * buffer.size
        clock.left = max(clock.left, port.out)
        message = Message(buffer.copy(), port.out + network.alpha, self.tag)
        self._world.deliver(self._route(self.rank, destination), message)

    def waitall(self) -> None:
        self._clock.now = max(self._clock.now, self._clock.left)

    def _irecv(self, source: int, into: Buffer | None) -> SimReceive:
        self._check()
        return SimReceive(self, source, into)

    def _wait(self, sources: Collection[int], what: str, stalls: bool) -> int:
        """Wait for a message of one of the sources; return which one.

        Args:
            sources: the ranks.
            what: what they send.
            stalls: whether they may be in another call.
        """
        me, self._told = self.members[self.rank], not stalls
        wait = Wait(
            [self._route(source, self.rank) for source in sources], lambda: self._otherwise(me, sources, stalls)
        )
        while (step := self._world.wait(me, wait)).what != "receive":
            self._happens(step, sources, f"waits for {what} of rank {', '.join(map(str, sources))}")
        return self.members.index(step.peer)

    def _otherwise(self, me: int, sources: Collection[int], stalls: bool) -> list[Step]:
        """Return what may happen while this rank waits."""
        due = (not self._told or (stalls and self._unheard), self.timeout is not None)
        return [Step(me, what) for what, is_due in zip(WHEN_ALL_WAIT, due, strict=True) if is_due]

    def _happens(self, step: Step, sources: Collection[int], what: str) -> None:
        """Look whether this rank waits for ever, or give up."""
        if step.what == "stall":
            first, self._told = not self._told, True
            return self.stalled(lambda: sources, first)
        assert self.timeout is not None
        self._clock.now += self.timeout
        try:
            Watchdog(self.rank, lambda: what, self.timeout).give_up()
        except CommunicationError as error:
            self.broken = str(error)
            raise

    def _next(self, source: int) -> Message:
        """Take the next message of a source, which has come."""
        message = self._world.mail[self._route(source, self.rank)].popleft()
        network, port = self._port(source)
        port.into = max(message.arrival, port.into + network.beta * message.content.size)
        self._clock.now = max(self._clock.now, port.into)
        return message

    def _take(self, source: int, tag: int) -> Buffer:
        self._wait([source], "a message", True)
        if self._world.mail[self._route(source, self.rank)][0].tag != tag:  # it may be a report, which is read later
            raise CallMismatch(f"rank {source} is in another call")
        return self._next(source).content  # type: ignore[no-any-return]

    def _tell(self, peer: int, message: Buffer) -> None:
        self._world.ends[self.context, self.members[peer]]._unheard[self.rank] = message

    def _listen(self) -> None:
        for source in list(self._unheard):
            self._hear(source, self._unheard.pop(source))

    def exchange_errors(self, report: Buffer, error: Exception | None = None) -> list[Buffer | None]:
        self._check()
        self._send_to_all(report, ERROR_TAG)
        reports: list[Buffer | None] = [None] * self.size
        missing = [peer for peer in range(self.size) if peer != self.rank]
        while missing:
            source = self._wait(missing, "the report", False)
            message = self._next(source)
            if message.tag in (ERROR_TAG, REVOKE_TAG):
                reports[source] = message.content
                missing = [] if message.tag == REVOKE_TAG else [peer for peer in missing if peer != source]
        return reports

    def revoke(self, report: Buffer) -> None:
        if not self._revoked:
            self._revoked = True
            self._send_to_all(report, REVOKE_TAG)

    def _send_to_all(self, report: Buffer, tag: int) -> None:
        for peer in range(self.size):
            if peer != self.rank:
                self._world.deliver(self._route(self.rank, peer), Message(report, self.now(), tag))

    # Objects that a program sends by its communicator: not counted, and without a duration

    def send_object(self, destination: int, value: Any) -> None:
        """Send a copy of any object, apart from the messages of the library."""
        route = (("objects", self.context), self.members[self.rank], self.members[destination])
        self._world.deliver(route, Message(copy.deepcopy(value), self.now(), 0))

    def receive_object(self, source: int) -> Any:
        """Receive the next object from `source`."""
        route = (("objects", self.context), self.members[source], self.members[self.rank])
        self._world.wait(route[2], Wait([route]))
        message = self._world.mail[route].popleft()
        self._clock.now = max(self._clock.now, message.arrival)
        return message.content
