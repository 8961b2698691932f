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
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from sparsecoll.formats import Buffer
from sparsecoll.transport.base import ERROR_TAG, CallMismatch, Transport
from sparsecoll.transport.network import Costs, Network

Route = tuple[Hashable, int, int]  # (communicator, source, destination), which are ranks of the world


class DeadlockError(RuntimeError):
    """Every virtual rank waits for a message that no rank will send; the message says which rank waits for which."""


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


class World:
    """What the virtual ranks of one simulation share: mailboxes, ports, and the baton."""

    def __init__(self, size: int, network: Network, ranks_per_node: int, inside: Network) -> None:
        self.size = size
        self.network = network
        self.inside = inside
        self.ranks_per_node = ranks_per_node
        self.ports = {node: Port() for node in range(-(-size // ranks_per_node))}
        self.clocks = [Clock() for _ in range(size)]
        self.mail: dict[Route, deque[Message]] = {}
        self.batons = [threading.Semaphore(0) for _ in range(size)]
        self.ready: deque[int] = deque(range(size))
        self.waiting: dict[int, Route] = {}
        self.ends: dict[tuple[Hashable, int], SimTransport] = {}  # by communicator and rank of the world
        self.tags: dict[int, int] = {}  # for which ranks wait
        self.mismatched: set[int] = set()  # ranks that are to raise CallMismatch
        self.finished: set[int] = set()
        self.failure: BaseException | None = None
        self.done = threading.Event()

    def pass_baton(self) -> None:
        """Wake the next rank that can run; if there is none, the run is over or in a deadlock."""
        if self.failure is None and not self.ready and self.waiting:
            self.mismatched = {rank for rank in self.waiting if self._is_mismatched(rank)}
            for rank in sorted(self.mismatched):
                del self.waiting[rank]
                self.ready.append(rank)
            if not self.ready:
                self.failure = DeadlockError(self._report())
        if self.failure is not None and self.waiting:
            self.ready.extend(sorted(self.waiting))
            self.waiting.clear()
        if self.ready:
            self.batons[self.ready.popleft()].release()
        else:
            self.done.set()

    def _is_mismatched(self, rank: int) -> bool:
        """Return whether a rank waits for one that is in another call."""
        context, source, _ = self.waiting[rank]
        return rank in self.tags and self.ends[context, source].is_in_another_call(self.tags[rank])

    def _report(self) -> str:
        lines = [f"rank {rank} waits for rank {self.waiting[rank][1]}" for rank in sorted(self.waiting)]
        ended = f"; ended: {sorted(self.finished)}" if self.finished else ""
        return f"deadlock among {self.size} virtual ranks: " + ", ".join(lines) + ended

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

    def take(self, route: Route, tag: int | None = None) -> Message:
        """Return the next message on a route; pass the baton on until there is one.

        Args:
            route: the route.
            tag: that the message of a call must have; None, the default, for another message.

        Raises:
            CallMismatch: All ranks wait, and the sender is in another call.
        """
        self._check_running()
        rank = route[2]
        while not self.mail.get(route):
            self.waiting[rank] = route
            if tag is not None:
                self.tags[rank] = tag
            self.pass_baton()
            self.batons[rank].acquire()
            self.tags.pop(rank, None)
            if self.failure is not None:
                raise Stopped
            if rank in self.mismatched:
                self.mismatched.discard(rank)
                raise CallMismatch("a rank is in another call")
        return self.mail[route].popleft()

    def deliver(self, route: Route, message: Message) -> None:
        """Put a message into the receiver's mailbox; a receiver that waits for it can run again."""
        self._check_running()
        self.mail.setdefault(route, deque()).append(message)
        if self.waiting.get(route[2]) == route:
            del self.waiting[route[2]]
            self.ready.append(route[2])


class SimReceive:
    """A receive request for the next message from one source."""

    __slots__ = ("_into", "_room", "_source", "_tag", "_transport")

    def __init__(self, transport: SimTransport, source: int, into: Buffer | None) -> None:
        self._transport = transport
        self._source = source
        self._into = into
        self._tag, self._room = transport.tag, transport.room

    def wait(self) -> Buffer:
        """Wait for the message and return it."""
        message = self._transport._take(self._source, self._tag)
        self._transport.check_room(self._source, message.size, self._room)
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

    def __init__(
        self, world: World, members: list[int], rank: int, costs: Costs | None = None, context: Hashable = ()
    ) -> None:
        super().__init__(rank, len(members))
        self.members = members
        self.context = context
        self._world = world
        self._costs = costs or Costs()
        self._clock = world.clocks[members[rank]]
        self._reports: dict[int, Buffer] = {}  # received in place of messages
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
        clock, (network, port) = self._clock, self._port(destination)
        port.out = max(clock.now, port.out) + network.beta * buffer.size
        clock.left = max(clock.left, port.out)
        message = Message(buffer.copy(), port.out + network.alpha, self.tag)
        self._world.deliver(self._route(self.rank, destination), message)

    def waitall(self) -> None:
        self._clock.now = max(self._clock.now, self._clock.left)

    def _irecv(self, source: int, into: Buffer | None) -> SimReceive:
        return SimReceive(self, source, into)

    def _next(self, source: int, tag: int | None = None) -> Message:
        message = self._world.take(self._route(source, self.rank), tag)
        network, port = self._port(source)
        port.into = max(message.arrival, port.into + network.beta * message.content.size)
        self._clock.now = max(self._clock.now, port.into)
        return message

    def _take(self, source: int, tag: int) -> Buffer:
        message = self._next(source, tag)
        if message.tag == ERROR_TAG:
            self._reports[source] = message.content
        if message.tag != tag:
            raise CallMismatch(f"rank {source} is in another call")
        return message.content  # type: ignore[no-any-return]

    def exchange_errors(self, report: Buffer, error: Exception | None = None) -> list[Buffer | None]:
        others = [peer for peer in range(self.size) if peer != self.rank]
        for peer in others:
            self._world.deliver(self._route(self.rank, peer), Message(report, self.now(), ERROR_TAG))
        for peer in others:
            while peer not in self._reports:
                message = self._next(peer)
                if message.tag == ERROR_TAG:
                    self._reports[peer] = message.content
        reports, self._reports = self._reports, {}
        return [reports.get(peer) for peer in range(self.size)]

    # Objects that a program sends by its communicator: not counted, and without a duration

    def send_object(self, destination: int, value: Any) -> None:
        """Send a copy of any object, apart from the messages of the library."""
        route = (("objects", self.context), self.members[self.rank], self.members[destination])
        self._world.deliver(route, Message(copy.deepcopy(value), self.now(), 0))

    def receive_object(self, source: int) -> Any:
        """Receive the next object from `source`."""
        message = self._world.take((("objects", self.context), self.members[source], self.members[self.rank]))
        self._clock.now = max(self._clock.now, message.arrival)
        return message.content
