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

from sparsecoll.formats import Buffer
from sparsecoll.transport.base import Transport
from sparsecoll.transport.network import Costs, Network
from sparsecoll.transport.tags import CallMismatch

Route = tuple[Hashable, int, int]  # (communicator, source, destination), which are ranks of the world


class DeadlockError(RuntimeError):
    """Every virtual rank waits for a message that no rank will send; the message says which rank waits for which."""


class Step(NamedTuple):
    """What a rank may do next: "start", "send" to or "receive" from `peer`, "stall" or "timeout".

    In a "stall", it has waited for a while, and checks whether a rank for which it waits is in another call.
    """

    rank: int
    what: str
    peer: int = -1


Schedule = Callable[[Sequence[Step]], int] | None


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
        sent: when the last message has left its port.
    """

    now: float = 0.0
    sent: float = 0.0
    inner: Port = field(default_factory=Port)


class World:
    """What the virtual ranks of one simulation share: mailboxes, ports, and the baton."""

    def __init__(self, size: int, network: Network, ranks_per_node: int, inside: Network, schedule: Schedule) -> None:
        self.size, self.ranks_per_node, self.schedule = size, ranks_per_node, schedule
        self.network, self.inside = network, inside
        self.ports = {node: Port() for node in range(-(-size // ranks_per_node))}
        self.clocks = [Clock() for _ in range(size)]
        self.mail: dict[Route, deque[Message]] = {}
        self.batons = [threading.Semaphore(0) for _ in range(size)]
        self.ready: deque[Step] = deque(Step(rank, "start") for rank in range(size))
        self.waiting: dict[int, tuple[Collection[Route], Callable[[], list[Step]]]] = {}
        self.step = self.ready[0]  # of the rank that has the baton
        self.ends: dict[tuple[Hashable, int], SimTransport] = {}  # by communicator and rank of the world
        self.finished: set[int] = set()
        self.failure: BaseException | None = None
        self.done = threading.Event()

    def pass_baton(self) -> None:
        """Wake the next rank that can run; if there is none, the run is over or in a deadlock."""
        try:
            if self.failure is None and (self.ready or self.waiting):
                self.step = self._next()
                return self.batons[self.step.rank].release()
        except BaseException as error:  # also of the schedule
            self.failure = error
        self.ready.extend(Step(rank, "stop") for rank in sorted(self.waiting))
        self.waiting.clear()
        if self.ready:
            self.batons[self.ready.popleft().rank].release()
        else:
            self.done.set()

    def _next(self) -> Step:
        """Return the step that comes next; its rank is neither ready nor waits any longer."""
        if self.schedule is None and self.ready:
            return self.ready.popleft()
        steps = list(self.ready)
        for rank, (routes, otherwise) in sorted(self.waiting.items()):
            steps += [Step(rank, "receive", route[1]) for route in routes if self.mail.get(route)] + otherwise()
        if not steps:
            raise DeadlockError(self._report())
        stall_first = min(steps, key=lambda step: step.what)  # then a timeout
        step = stall_first if self.schedule is None else steps[self.schedule(steps)]
        if step in self.ready:
            self.ready.remove(step)
        self.waiting.pop(step.rank, None)
        return step

    def _report(self) -> str:
        sources = {rank: ", ".join(str(route[1]) for route in wait[0]) for rank, wait in sorted(self.waiting.items())}
        lines = [f"rank {rank} waits for rank {source}" for rank, source in sources.items()]
        ended = f"; ended: {sorted(self.finished)}" if self.finished else ""
        return f"deadlock among {self.size} virtual ranks: " + ", ".join(lines) + ended

    def stop(self, why: BaseException) -> None:
        """Let every rank end in the call in which it waits, or in its next one."""
        self.failure = self.failure or why
        for baton in self.batons:
            baton.release()

    def _check_running(self) -> None:
        if self.done.is_set():
            raise RuntimeError("comm: its simulation has ended")
        if self.failure is not None:
            raise Stopped

    def wait(self, rank: int, routes: Collection[Route], otherwise: Callable[[], list[Step]] = list) -> Step:
        """Let other ranks run until a step of this one is possible; return it. A message stays in the mailbox."""
        self._check_running()
        for route in routes if self.schedule is None else ():
            if self.mail.get(route):
                return Step(rank, "receive", route[1])
        self.waiting[rank] = routes, otherwise
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
            self.wait(source, (), lambda: [Step(source, "send", receiver)])
        self.mail.setdefault(route, deque()).append(message)
        if self.schedule is None and route in self.waiting.get(receiver, ((), None))[0]:
            del self.waiting[receiver]
            self.ready.append(Step(receiver, "receive", source))


@dataclass(slots=True)
class SimReceive:
    """A receive request for the next message from one source."""

    _transport: SimTransport
    _source: int
    _into: Buffer | None
    _tag: int
    _room: int
    _message: Buffer | None = None

    def wait(self) -> Buffer:
        """Wait for the message, after those that were expected before it, and return it."""
        expected = self._transport.expected[self._source]
        while self._message is None:
            expected.popleft().receive()
        return self._message

    def receive(self) -> None:
        """Wait for the next message from the source."""
        message = self._transport._take(self._source, self._tag)
        self._transport.check_room(self._source, message.size, self._room)
        if self._into is not None and self._into.size == message.size:
            self._into[:] = message
            message = self._into
        self._message = message


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
        self.members, self.context = members, context
        self._world, self._costs = world, costs or Costs()
        self._clock = world.clocks[members[rank]]
        self.expected: list[deque[SimReceive]] = [deque() for _ in members]  # by source
        self._notified = False  # whether the rank for which this one waits has had a stall notice
        world.ends[context, members[rank]] = self
        self._nodes = [member // world.ranks_per_node for member in members]
        self.one_node = len(set(self._nodes)) == 1

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

    def machines(self) -> list[int]:
        return self._nodes

    def _route(self, source: int, destination: int) -> Route:
        return self.context, self.members[source], self.members[destination]

    def _port(self, peer: int) -> tuple[Network, Port]:
        world = self._world
        if self._nodes[peer] == self._nodes[self.rank]:
            return world.inside, self._clock.inner
        return world.network, world.ports[self._nodes[self.rank]]

    def _isend(self, destination: int, buffer: Buffer, tag: int) -> None:
        clock, (network, port) = self._clock, self._port(destination)
        port.out = max(clock.now, port.out) + network.beta * buffer.size
        clock.sent = max(clock.sent, port.out)
        message = Message(buffer.copy(), port.out + network.alpha, tag)
        self._world.deliver(self._route(self.rank, destination), message)

    def waitall(self) -> None:
        self._clock.now = max(self._clock.now, self._clock.sent)

    def _irecv(self, source: int, into: Buffer | None) -> SimReceive:
        request = SimReceive(self, source, into, self.tag, self.room)
        self.expected[source].append(request)
        return request

    def _wait(self, sources: Collection[int], what: str, stalls: bool) -> int:
        """Wait for a message of one of the sources, which may be in another call if `stalls`; return which one."""
        me, self._notified = self.members[self.rank], False
        routes = [self._route(source, self.rank) for source in sources]
        while (step := self._world.wait(me, routes, lambda: self._otherwise(me, sources, stalls))).what != "receive":
            self._happens(step, sources, f"waits for {what} of rank {', '.join(map(str, sources))}")
        return self.members.index(step.peer)

    def _otherwise(self, me: int, sources: Collection[int], stalls: bool) -> list[Step]:
        """Return what may happen while this rank waits."""
        here = all((self.context, self.members[source]) in self._world.ends for source in sources)
        due = stalls and here and (not self._notified or any(map(self.is_in_another_call, self.notices.values())))
        return [Step(me, "stall")] * due + [Step(me, "timeout")] * (self.timeout is not None)

    def _happens(self, step: Step, sources: Collection[int], what: str) -> None:
        if step.what == "stall":
            first, self._notified = not self._notified, True
            return self.stalled(lambda: sources, first)
        self._clock.now += self.timeout or 0
        raise self.fail(f"rank {self.rank} {what} for {self.timeout} s: no answer within the timeout")

    def _next(self, source: int) -> Message:
        """Take the next message of a source, which has arrived."""
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

    def _notify(self, peer: int, message: Buffer) -> None:
        self._world.ends[self.context, self.members[peer]]._keep_notice(self.rank, message)

    def _until_reports(self, missing: list[int], error: Exception | None) -> Iterator[tuple[int, int, Buffer]]:
        for expected in self.expected:
            expected.clear()
        while missing:
            source = self._wait(missing, "the report", False)
            message = self._next(source)
            yield source, message.tag, message.content

    # Objects that a program sends by its communicator: not counted, and without a duration

    def send_object(self, destination: int, value: Any) -> None:
        """Send a copy of any object, apart from the messages of the library."""
        route = (("objects", self.context), self.members[self.rank], self.members[destination])
        self._world.deliver(route, Message(copy.deepcopy(value), self.now(), 0))

    def receive_object(self, source: int) -> Any:
        """Receive the next object from `source`."""
        route = (("objects", self.context), self.members[source], self.members[self.rank])
        self._world.wait(route[2], [route])
        message = self._world.mail[route].popleft()
        self._clock.now = max(self._clock.now, message.arrival)
        return message.content
