"""The virtual ranks of the simulator: mailboxes, a virtual clock, and a baton passed to the next rank that can run.

Each rank has a thread, of which only the one with the baton runs, so that a run is deterministic. A message of m bytes
leaves when its sender's port is free, takes alpha + beta * m seconds, and enters when its receiver's port is free: many
senders to one receiver queue up, the congestion that Ok-Topk avoids by rotating destinations. Ranks on one node share
its port; messages inside a node use another network and one more port for each rank. Computation takes no time, or what
`Costs` say.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from sparsecoll.formats import Buffer
from sparsecoll.transport.base import ERROR_TAG, CallMismatch, Transport
from sparsecoll.transport.network import Costs, Network, Tuning


class DeadlockError(RuntimeError):
    """Every virtual rank waits for a message that no rank will send; the message says which rank waits for which."""


class Stopped(BaseException):
    """Unwinds the other virtual ranks after one has failed."""


@dataclass
class Message:
    """A message on its way.

    Attributes:
        arrival: earliest time at which it can be received, in seconds; later if the receiver's port is busy.
    """

    buffer: Buffer
    arrival: float
    tag: int


@dataclass
class Port:
    """Until when it sends, and until when it receives, in seconds."""

    out: float = 0.0
    into: float = 0.0


class World:
    """What the virtual ranks of one simulation share: mailboxes, ports, and the baton."""

    def __init__(self, size: int, network: Network, ranks_per_node: int, inside: Network) -> None:
        self.size = size
        self.network = network
        self.inside = inside
        self.ranks_per_node = ranks_per_node
        self.ports = {node: Port() for node in range(-(-size // ranks_per_node))}
        self.mail: dict[tuple[int, int], deque[Message]] = {}
        self.batons = [threading.Semaphore(0) for _ in range(size)]
        self.ready: deque[int] = deque(range(size))
        self.waiting: dict[int, int] = {}
        self.finished: set[int] = set()
        self.failure: BaseException | None = None
        self.done = threading.Event()

    def pass_baton(self) -> None:
        """Wake the next rank that can run; if there is none, the run is over or in a deadlock."""
        if self.failure is None and not self.ready and self.waiting:
            self.failure = DeadlockError(self._report())
        if self.failure is not None and self.waiting:
            self.ready.extend(sorted(self.waiting))
            self.waiting.clear()
        if self.ready:
            self.batons[self.ready.popleft()].release()
        else:
            self.done.set()

    def _report(self) -> str:
        lines = [f"rank {rank} waits for rank {source}" for rank, source in sorted(self.waiting.items())]
        ended = f"; ended: {sorted(self.finished)}" if self.finished else ""
        return f"deadlock among {self.size} virtual ranks: " + ", ".join(lines) + ended

    def wait_for(self, rank: int, source: int) -> None:
        """Pass the baton on until there is a message from `source` to `rank`."""
        while not self.mail.get((source, rank)):
            self.waiting[rank] = source
            self.pass_baton()
            self.batons[rank].acquire()
            if self.failure is not None:
                raise Stopped

    def deliver(self, source: int, destination: int, message: Message) -> None:
        """Put a message into the receiver's mailbox; a receiver that waits for it can run again."""
        self.mail.setdefault((source, destination), deque()).append(message)
        if self.waiting.get(destination) == source:
            del self.waiting[destination]
            self.ready.append(destination)


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
    """One virtual rank's transport."""

    virtual = True

    def __init__(self, world: World, rank: int, costs: Costs | None = None) -> None:
        super().__init__(rank, world.size)
        self._world = world
        self._costs = costs or Costs()
        self._clock = 0.0
        self._left = 0.0  # when the last message sent has left its port
        self._inner = Port()  # for messages inside the node
        self._reports: dict[int, Buffer] = {}  # received in place of messages
        self.one_node = world.ranks_per_node >= world.size

    def now(self) -> float:
        return self._clock

    @contextlib.contextmanager
    def span(self, kind: str, /, *, amount: int, extent: int) -> Iterator[None]:
        """Advance the clock by the costs of a span of work, as a listener of `telemetry.trace`."""
        yield
        self._clock += self._costs.seconds(kind, amount, extent)

    def modelled(self) -> Tuning:
        return self._costs.tuning(self._world.inside if self.one_node else self._world.network)

    def node(self) -> int:
        return self.rank // self._world.ranks_per_node

    def located(self) -> list[list[int]]:
        size, width = self.size, self._world.ranks_per_node
        return [list(range(start, min(start + width, size))) for start in range(0, size, width)]

    def _route(self, peer: int) -> tuple[Network, Port]:
        world = self._world
        if peer // world.ranks_per_node == self.node():
            return world.inside, self._inner
        return world.network, world.ports[self.node()]

    def _isend(self, destination: int, buffer: Buffer) -> None:
        network, port = self._route(destination)
        port.out = max(self._clock, port.out) + network.beta * buffer.size
        self._left = max(self._left, port.out)
        self._world.deliver(self.rank, destination, Message(buffer.copy(), port.out + network.alpha, self.tag))

    def waitall(self) -> None:
        self._clock = max(self._clock, self._left)

    def _irecv(self, source: int, into: Buffer | None) -> SimReceive:
        return SimReceive(self, source, into)

    def _next(self, source: int) -> Message:
        self._world.wait_for(self.rank, source)
        message = self._world.mail[source, self.rank].popleft()
        network, port = self._route(source)
        port.into = max(message.arrival, port.into + network.beta * message.buffer.size)
        self._clock = max(self._clock, port.into)
        return message

    def _take(self, source: int, tag: int) -> Buffer:
        message = self._next(source)
        if message.tag == ERROR_TAG:
            self._reports[source] = message.buffer
        if message.tag != tag:
            raise CallMismatch(f"rank {source} is in another call")
        return message.buffer

    def exchange_errors(self, report: Buffer, error: Exception | None = None) -> list[Buffer | None]:
        others = [peer for peer in range(self.size) if peer != self.rank]
        for peer in others:
            self._world.deliver(self.rank, peer, Message(report, self._clock, ERROR_TAG))
        for peer in others:
            while peer not in self._reports:
                message = self._next(peer)
                if message.tag == ERROR_TAG:
                    self._reports[peer] = message.buffer
        reports, self._reports = self._reports, {}
        return [reports.get(peer) for peer in range(self.size)]
