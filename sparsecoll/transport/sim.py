"""The simulator: runs a program on P virtual ranks in one process, without MPI."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sparsecoll.errors import check_integer
from sparsecoll.telemetry.trace import record
from sparsecoll.telemetry.traffic import Traffic
from sparsecoll.transport.network import Costs, Network, check_model
from sparsecoll.transport.virtual_ranks import Schedule, SimTransport, Stopped, World

T = TypeVar("T")
_STACK_BYTES, _STACK_LOCK = 1 << 20, threading.Lock()
_TICK_SECONDS = 0.2  # after which an interrupt is seen whose signal another thread has taken
_STOP_SECONDS = 1.0  # that an interrupt waits for a rank that computes; it ends in its next call


class SimComm:
    """A virtual rank's communicator, accepted wherever sparsecoll takes an mpi4py communicator.

    Programs use it as they use mpi4py's, whose names and arguments the methods have. Objects that they send are copied;
    they are not counted and take no modelled time, but their receiver's clock does not go on before the sender's.

    Attributes:
        rank: this virtual rank.
        size: number of virtual ranks.
    """

    def __init__(self, transport: SimTransport) -> None:
        self.transport = transport
        self.rank, self.size = transport.rank, transport.size
        self._made = 0  # communicators made of this one

    def Get_rank(self) -> int:
        """Return this virtual rank."""
        return self.rank

    def Get_size(self) -> int:
        """Return the number of virtual ranks."""
        return self.size

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Return the objects of all ranks in rank order on the root, None on the other ranks."""
        self.transport._check_rank("root", root)
        self.transport.send_object(root, sendobj)
        return [self.transport.receive_object(rank) for rank in range(self.size)] if self.rank == root else None

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the root's object on every rank."""
        self.transport._check_rank("root", root)
        if self.rank != root:
            return self.transport.receive_object(root)
        for rank in range(self.size):
            if rank != root:
                self.transport.send_object(rank, obj)
        return obj

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return the objects of all ranks in rank order."""
        return self.bcast(self.gather(sendobj))  # type: ignore[no-any-return]

    def Barrier(self) -> None:
        """Wait until all ranks have called it."""
        self.allgather(None)

    barrier = Barrier

    def Split(self, color: int | None = 0, key: int = 0) -> SimComm | None:
        """Return a communicator of the ranks with the same color, in the order of their keys, then of their ranks.

        Its traffic is counted on its own: see `sparsecoll.traffic(comm)`.

        Args:
            color: number of at least 0 (default: 0); None, or a negative one as MPI.UNDEFINED, for no communicator.
            key: orders the ranks (default: 0).

        Returns:
            The communicator; None without a color.
        """
        rows = self.allgather((color, key))
        self._made += 1
        if color is None or color < 0:
            return None
        members = [rank for rank, (other, _) in enumerate(rows) if other == color]
        members.sort(key=lambda rank: rows[rank][1])
        return SimComm(self.transport.part(members, (self.transport.context, self._made)))

    def Dup(self) -> SimComm:
        """Return a communicator of the same ranks."""
        made = self.Split(0, self.rank)
        assert made is not None
        return made

    def Free(self) -> None:
        """Do nothing, as a simulated communicator holds no resources."""


@dataclass(repr=False)
class Simulation(Generic[T]):
    """The result of `simulate`; lists are in rank order.

    Attributes:
        results: list of what `fn` returned on each rank.
        traffic: list of each rank's counters (`sparsecoll.Traffic`) on the communicator that `fn` was called with.
        seconds: modelled time until the last rank ended, in seconds.
    """

    results: list[T]
    traffic: list[Traffic]
    seconds: float

    def __repr__(self) -> str:
        most = max(traffic.total.bytes_received for traffic in self.traffic)
        return f"Simulation({len(self.results)} ranks, {self.seconds:.6f} s, at most {most:,} bytes received by a rank)"


def simulate(
    P: int,
    fn: Callable[[SimComm], T],
    network: Network | None = None,
    ranks_per_node: int = 1,
    *,
    inside: Network | None = None,
    costs: Costs | None = None,
    schedule: Schedule | None = None,
) -> Simulation[T]:
    """Run fn(comm) on P virtual ranks in this process, without MPI.

    The library's code, its results and the bytes that it counts are the same as over MPI; time is modelled. Only "auto"
    may choose another algorithm than there, because it chooses by the costs of the network.

    Args:
        P: number of virtual ranks, at least 1 (1024 are fine).
        fn: function that each rank calls with its communicator, which is accepted by `sparsecoll.allreduce`,
            `sparsecoll.traffic` and the others, and has `rank`, `size`, `Get_rank`, `Get_size`, `Barrier`, `bcast`,
            `gather`, `allgather`, `Split`, `Dup` and `Free` as in mpi4py.
        network: alpha-beta model of the network between nodes (default: 50 us and 1 Gb/s).
        ranks_per_node: number of ranks that share a node and its network port (default: 1); ranks 0, 1, ... are on the
            first node.
        inside: alpha-beta model of the messages inside a node (default: 1 us and 10 GB/s).
        costs: costs of computation; None, the default, for none.
        schedule: chooses what happens next, before each message is sent or received: a function of the list of steps
            that are possible, tuples (rank, what, peer), that returns the position of one. Ranks may so be slow and
            messages late in every way, and a wait with a `timeout` may end at any time. None, the default, for an order
            in which a timeout is over only when all ranks wait.

    Returns:
        Simulation, with results and counters of every rank and the modelled seconds.

    Raises:
        DeadlockError: All ranks wait; the message says which rank waits for which.
        ValueError: `P` or `ranks_per_node` is below 1.
        TypeError: An argument has a wrong type.
        RuntimeError: A communicator of a simulation that has ended is used.
        Exception: The first exception that `fn` raised on some rank; the other ranks are stopped.
        KeyboardInterrupt: Ctrl-C; all ranks are stopped.

    >>> simulate(3, lambda comm: comm.rank).results
    [0, 1, 2]
    """
    for name, count in (("P", P), ("ranks_per_node", ranks_per_node)):
        check_integer(name, count, 1)
    if not callable(fn):
        raise TypeError(f"fn: expected a function of a communicator, got {fn!r}")
    if schedule is not None and not callable(schedule):
        raise TypeError(f"schedule: expected a function of a list of steps, or None, got {schedule!r}")
    check_model("network", network)
    check_model("inside", inside)
    check_model("costs", costs, Costs)
    world = World(P, network or Network(), ranks_per_node, inside or Network(1e-6, 1e-10), schedule)
    members = list(range(P))
    transports = [SimTransport(world, members, rank, costs) for rank in members]
    results: list[Any] = [None] * P

    def program(rank: int) -> None:
        world.batons[rank].acquire()
        try:
            if world.failure is None:
                with record(transports[rank]) if costs else contextlib.nullcontext():
                    results[rank] = fn(SimComm(transports[rank]))
                transports[rank].waitall()
        except Stopped:
            pass
        except BaseException as error:
            world.failure = world.failure or error
        world.finished.add(rank)
        world.pass_baton()

    threads = [threading.Thread(target=program, args=(rank,), daemon=True) for rank in range(P)]
    try:
        with _STACK_LOCK:  # the size is that of threads of the whole process
            previous = threading.stack_size(_STACK_BYTES)
            try:
                for thread in threads:
                    thread.start()
            finally:
                threading.stack_size(previous)
        world.pass_baton()
        while not world.done.wait(_TICK_SECONDS):
            pass
    except BaseException as error:  # Ctrl-C
        world.stop(error)
        world.done.wait(_STOP_SECONDS)
        raise
    for thread in threads:
        thread.join()
    if world.failure is not None:
        raise world.failure
    return Simulation(results, [t.traffic for t in transports], max(t.now() for t in transports))
