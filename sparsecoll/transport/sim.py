"""The simulator: P virtual ranks in one process, one parked thread each, a baton passed to whoever can run.

Only one virtual rank runs at a time, so a run is deterministic. Time is virtual: a message of m bytes leaves its sender
when the sender's port is free, takes alpha + beta*m, and enters its receiver when the receiver's port is free (so many
senders to one receiver queue up, the congestion that Ok-Topk's destination rotation avoids). Ranks on one node share
its port; messages inside a node take another network and another port, one a rank. Computation is free,
or takes what `Costs` say.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sparsecoll.errors import CommunicationError
from sparsecoll.formats import Buffer
from sparsecoll.telemetry.trace import record
from sparsecoll.telemetry.traffic import Traffic
from sparsecoll.transport.base import ERROR_TAG, CallMismatch, Transport
from sparsecoll.transport.network import Costs, Network, Tuning

_STACK_BYTES = 1 << 20


class DeadlockError(RuntimeError):
    """Every virtual rank waits for a message that no rank will send; the message says which rank waits for which."""


class _Stopped(BaseException):
    """Unwinds the other virtual ranks after one has failed."""


@dataclass
class _Message:
    buffer: Buffer
    arrival: float
    tag: int


@dataclass
class _Port:
    """Until when it sends, and until when it receives."""

    out: float = 0.0
    into: float = 0.0


class _World:
    """Shared by the virtual ranks of one simulation: mailboxes, ports, and the baton."""

    def __init__(self, size: int, network: Network, ranks_per_node: int, inside: Network) -> None:
        self.size = size
        self.network = network
        self.inside = inside
        self.ranks_per_node = ranks_per_node
        self.ports = {node: _Port() for node in range(-(-size // ranks_per_node))}
        self.mail: dict[tuple[int, int], deque[_Message]] = {}
        self.batons = [threading.Semaphore(0) for _ in range(size)]
        self.ready: deque[int] = deque(range(size))
        self.waiting: dict[int, int] = {}
        self.finished: set[int] = set()
        self.failure: BaseException | None = None
        self.done = threading.Event()

    def pass_baton(self) -> None:
        """Wake the next rank that can run; with nobody left, the run is over or stuck."""
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
        """Park `rank` until a message from `source` is there."""
        while not self.mail.get((source, rank)):
            self.waiting[rank] = source
            self.pass_baton()
            self.batons[rank].acquire()
            if self.failure is not None:
                raise _Stopped

    def deliver(self, source: int, destination: int, message: _Message) -> None:
        self.mail.setdefault((source, destination), deque()).append(message)
        if self.waiting.get(destination) == source:
            del self.waiting[destination]
            self.ready.append(destination)


class _Pending:
    __slots__ = ("_into", "_source", "_tag", "_transport")

    def __init__(self, transport: SimTransport, source: int, into: Buffer | None) -> None:
        self._transport = transport
        self._source = source
        self._into = into
        self._tag = transport.tag

    def wait(self) -> Buffer:
        message = self._transport._take(self._source, self._tag)
        if self._into is None or self._into.size != message.size:
            return message
        self._into[:] = message
        return self._into


class SimTransport(Transport):
    """One virtual rank's transport."""

    virtual = True

    def __init__(self, world: _World, rank: int, costs: Costs | None = None) -> None:
        super().__init__(rank, world.size)
        self._world = world
        self._costs = costs or Costs()
        self._clock = 0.0
        self._left = 0.0  # when the last message sent has left its port
        self._inner = _Port()
        self._reports: dict[int, Buffer] = {}  # that came in place of messages
        self.one_node = world.ranks_per_node >= world.size

    def now(self) -> float:
        return self._clock

    def modelled(self) -> Tuning:
        return self._costs.tuning(self._world.inside if self.one_node else self._world.network)

    def _isend(self, destination: int, buffer: Buffer) -> None:
        network, port = self._way(destination)
        port.out = max(self._clock, port.out) + network.beta * buffer.size
        self._left = max(self._left, port.out)
        self._world.deliver(self.rank, destination, _Message(buffer.copy(), port.out + network.alpha, self.tag))

    def _way(self, peer: int) -> tuple[Network, _Port]:
        world = self._world
        if peer // world.ranks_per_node == self.node():
            return world.inside, self._inner
        return world.network, world.ports[self.node()]

    def node(self) -> int:
        return self.rank // self._world.ranks_per_node

    def located(self) -> list[list[int]]:
        size, width = self.size, self._world.ranks_per_node
        return [list(range(start, min(start + width, size))) for start in range(0, size, width)]

    def _irecv(self, source: int, into: Buffer | None) -> _Pending:
        return _Pending(self, source, into)

    def _next(self, source: int) -> _Message:
        self._world.wait_for(self.rank, source)
        message = self._world.mail[source, self.rank].popleft()
        network, port = self._way(source)
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
            self._world.deliver(self.rank, peer, _Message(report, self._clock, ERROR_TAG))
        for peer in others:
            while peer not in self._reports:
                message = self._next(peer)
                if message.tag == ERROR_TAG:
                    self._reports[peer] = message.buffer
        reports, self._reports = self._reports, {}
        return [reports.get(peer) for peer in range(self.size)]

    def waitall(self) -> None:
        self._clock = max(self._clock, self._left)


class _Work:
    """Lets the work of one virtual rank take time."""

    def __init__(self, transport: SimTransport, costs: Costs) -> None:
        self._transport = transport
        self._costs = costs

    @contextlib.contextmanager
    def work(self, kind: str, amount: int, extent: int) -> Iterator[None]:
        """See trace.Listener."""
        yield
        self._transport._clock += self._costs.seconds(kind, amount, extent)


class SimComm:
    """A virtual rank's communicator: goes wherever sparsecoll takes an mpi4py communicator."""

    def __init__(self, transport: SimTransport) -> None:
        self.transport = transport

    @property
    def rank(self) -> int:
        """This virtual rank."""
        return self.transport.rank

    @property
    def size(self) -> int:
        """Number of virtual ranks."""
        return self.transport.size

    def Get_rank(self) -> int:
        """As in mpi4py."""
        return self.rank

    def Get_size(self) -> int:
        """As in mpi4py."""
        return self.size


@dataclass
class Simulation:
    """The result of `simulate`; lists are in rank order.

    Attributes:
        results: list of what `fn` returned on each rank.
        traffic: list of each rank's counters (`sparsecoll.Traffic`).
        seconds: modelled time until the last rank ended, in seconds.
    """

    results: list[Any]
    traffic: list[Traffic]
    seconds: float


def simulate(
    P: int,
    fn: Callable[[SimComm], Any],
    network: Network | None = None,
    ranks_per_node: int = 1,
    inside: Network | None = None,
    costs: Costs | None = None,
) -> Simulation:
    """Run fn(comm) on P virtual ranks in this process, without MPI.

    The library's code, its results and the bytes that it counts are the same as over MPI; time is modelled.

    Args:
        P: number of virtual ranks, at least 1 (1024 are fine).
        fn: function that each rank calls with its communicator, which has `rank` and `size` and is accepted by
            `sparsecoll.allreduce`, `sparsecoll.traffic` and the others.
        network: alpha-beta model of the network between nodes (default: 50 us and 1 Gb/s).
        ranks_per_node: number of ranks that share a node and its network port (default: 1); ranks 0, 1, ... are on the
            first node.
        inside: alpha-beta model of the messages inside a node (default: 1 us and 10 GB/s).
        costs: costs of computation; None, the default, for none.

    Returns:
        Simulation, with results and counters of every rank and the modelled seconds.

    Raises:
        DeadlockError: All ranks wait; the message says which rank waits for which.
        ValueError: `P` or `ranks_per_node` is below 1.
        Exception: The first exception that `fn` raised on some rank; the other ranks are stopped.

    >>> simulate(3, lambda comm: comm.rank).results
    [0, 1, 2]
    """
    if P < 1:
        raise ValueError(f"P: expected at least 1, got {P}")
    if ranks_per_node < 1:
        raise ValueError(f"ranks_per_node: expected at least 1, got {ranks_per_node}")
    world = _World(P, network or Network(), ranks_per_node, inside or Network(1e-6, 1e-10))
    transports = [SimTransport(world, rank, costs) for rank in range(P)]
    results: list[Any] = [None] * P

    def program(rank: int) -> None:
        world.batons[rank].acquire()
        try:
            if world.failure is None:
                with record(_Work(transports[rank], costs)) if costs else contextlib.nullcontext():
                    results[rank] = fn(SimComm(transports[rank]))
                transports[rank].waitall()
        except _Stopped:
            pass
        except BaseException as error:
            world.failure = world.failure or error
        world.finished.add(rank)
        world.pass_baton()

    previous = threading.stack_size(_STACK_BYTES)
    try:
        threads = [threading.Thread(target=program, args=(rank,), daemon=True) for rank in range(P)]
        for thread in threads:
            thread.start()
    finally:
        threading.stack_size(previous)
    world.pass_baton()
    world.done.wait()
    for thread in threads:
        thread.join()
    if world.failure is not None:
        raise world.failure
    return Simulation(results, [t.traffic for t in transports], max(t.now() for t in transports))


class LocalTransport(Transport):
    """A communicator of one rank, for programs run without MPI."""

    threads = True

    def __init__(self) -> None:
        super().__init__(0, 1)

    def located(self) -> list[list[int]]:
        return [[0]]

    def now(self) -> float:
        import time

        return time.perf_counter()

    def _isend(self, destination: int, buffer: Buffer) -> None:
        raise CommunicationError(f"send: rank {destination} does not exist on a communicator of one rank")

    def _irecv(self, source: int, into: Buffer | None) -> Any:
        raise CommunicationError(f"receive: rank {source} does not exist on a communicator of one rank")

    def exchange_errors(self, report: Buffer, error: Exception | None = None) -> list[Buffer | None]:
        return [None]

    def waitall(self) -> None:
        pass
