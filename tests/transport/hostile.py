"""Ranks of one process on a network that is hostile by a seed, with a clock of its own; a seed replays exactly.

The transport is the real one: only the modules `select`, `socket` and `time` that it sees are replaced. Each rank is a
thread, of which only the one with the baton runs; the seed chooses who gets it, when bytes arrive, how many of them a
system call moves, and which faults happen where.
"""

import contextlib
import errno
import random
import select
import socket
import sys
import threading
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

from sparsecoll.transport import waiting
from sparsecoll.transport.tcp import connection as connections
from sparsecoll.transport.tcp import transport as tcp

NEVER = float("inf")
STEPS = 300_000  # of all ranks together, after which they count as moving nothing
TRACED = (connections.__file__, tcp.__file__)


class Stopped(BaseException):
    """Ends the thread of a rank: it was killed, or the run is over."""


@dataclass
class Fault:
    """Something that happens on `rank` once, when it reaches `place` for the `nth` time.

    Attributes:
        kind: "interrupt", "memory", "errno", "stop", "kill" or "cut" (its connections swallow what it sends).
        place: "send" or "receive" (before the system call), "sent" or "received" (after it), "allocate", or "line", any
            line of the transport.
        times: for how many allocations there is no memory.
    """

    kind: str
    place: str
    rank: int
    nth: int
    number: int = 0
    times: int = 1
    fired: bool = False


class World:
    """The network, the clock and the baton.

    Attributes:
        current: the rank that has the baton.
        seconds: the time.
        limit: seconds after which ranks that still run count as hanging.
        failure: what has gone wrong in the test itself; "" if nothing has.
        happened: the number of faults that have happened.
    """

    def __init__(self, seed, size, faults=(), limit=1000.0):
        self.random = random.Random(seed)
        self.size, self.limit = size, limit
        self.faults = list(faults)
        self.happened = self.steps = 0
        self.seconds, self.current, self.failure, self.over = 0.0, 0, "", False
        self.room = self.random.choice([20, 300, 5000, 100_000])  # bytes that a connection takes
        self.slow = self.random.choice([0.0, 0.001, 0.1])  # longest delay of a message
        self.eager = self.random.random() * 0.5  # share of system calls before which another rank runs
        self.short = self.random.choice([0.0, 0.3, 0.9])  # share of system calls that move a part, or nothing
        self.links = []
        self.descriptors = 1000
        self.dead, self.sockets = set(), [[] for _ in range(size)]
        self._waiting = {}
        self._batons = [threading.Semaphore(0) for _ in range(size)]

    # -- the baton

    def wait(self, ready, until):
        """Let others run until `ready()` or the time `until`."""
        me = self.current
        self._waiting[me] = ready, until
        self._step()
        chosen = self._choose()
        if chosen != me:
            self._batons[chosen].release()
            self._batons[me].acquire()
        self.current = me
        del self._waiting[me]
        if self.over or me in self.dead:
            raise Stopped

    def _step(self):
        self.steps += 1
        if self.steps > STEPS and not self.over:
            self.failure, self.over = f"rank {self.current} polls for ever, but nothing moves", True

    def _choose(self):
        while True:
            if self.over:
                return next(iter(self._waiting))
            able = [r for r, (ready, until) in self._waiting.items() if until <= self.seconds or ready()]
            if able:
                return able[0] if len(able) == 1 else self.random.choice(able)
            moments = [until for _, until in self._waiting.values()] + [link.next_arrival() for link in self.links]
            self.seconds = min((m for m in moments if m > self.seconds), default=NEVER)
            if self.seconds > self.limit:  # those that were stopped, or ranks that hang
                self.over = True

    def run(self, program):
        """Return what `program(rank)` returns on each rank; None for one that was killed or stopped."""
        results, done = [None] * self.size, threading.Event()

        def one(rank):
            self._batons[rank].acquire()
            self.current = rank
            self._waiting.pop(rank, None)
            try:
                results[rank] = program(rank)
            except Stopped:
                pass
            except BaseException as error:
                self.failure = self.failure or f"rank {rank}: {error!r}"
                results[rank] = error
            finally:
                sys.settrace(None)
                for own in self.sockets[rank]:
                    own.close()
                if self._waiting:
                    self._batons[self._choose()].release()
                else:
                    done.set()

        self._waiting = {rank: (lambda: True, 0.0) for rank in range(self.size)}
        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        self._batons[self._choose()].release()
        assert done.wait(60), "the harness hangs"
        for thread in threads:
            thread.join(60)
        return results

    # -- faults

    def reach(self, place):
        """Let happen what is to happen to the current rank at this place."""
        self._step()
        if self.over or self.current in self.dead:
            raise Stopped
        for fault in self.faults:
            if fault.rank == self.current and fault.place == place and (not fault.fired or place == "allocate"):
                fault.nth -= 1
                if -fault.times < fault.nth <= 0:
                    self._happen(fault)

    def _happen(self, fault):
        fault.fired = True
        self.happened += 1
        if fault.kind == "interrupt":
            raise KeyboardInterrupt
        if fault.kind == "memory":
            raise MemoryError("injected")
        if fault.kind == "errno":
            raise OSError(fault.number, f"injected {errno.errorcode[fault.number]}")
        if fault.kind == "cut":
            for link in self.links:
                link.cut = link.cut or self.current in (link.source, link.sink)
            return
        self.dead.add(self.current)
        if fault.kind == "kill":
            for own in self.sockets[self.current]:
                own.close()
            raise Stopped
        self.wait(lambda: False, NEVER)

    def arm(self):
        """Count the lines that the current rank executes from now on."""
        if any(f.rank == self.current and f.place == "line" for f in self.faults):
            sys.settrace(self._trace)

    def _trace(self, frame, event, argument):
        return self._trace_line if frame.f_code.co_filename in TRACED and not self.over else None

    def _trace_line(self, frame, event, argument):
        if event == "line" and not self.over:
            self.reach("line")
        return self._trace_line

    def pause(self):
        """Perhaps let others run."""
        if self.random.random() < self.eager:
            self.wait(lambda: True, self.seconds)


class Link:
    """One direction of a connection; bytes arrive in order, later than they were sent."""

    def __init__(self, world, source, sink):
        self.world, self.source, self.sink = world, source, sink
        self.chunks = deque()  # (time of arrival, bytes)
        self.size = 0
        self.shut = NEVER  # when its end arrives
        self.reset = self.closed = self.cut = False
        self.latest = 0.0

    def put(self, data):
        world = self.world
        delay = world.random.random() * world.slow if world.random.random() < 0.5 else 0.0
        self.latest = NEVER if self.cut else max(self.latest, world.seconds + delay)
        self.chunks.append((self.latest, data))
        self.size += len(data)

    def arrived(self):
        return bool(self.chunks) and self.chunks[0][0] <= self.world.seconds

    def ended(self):
        return not self.chunks and self.shut <= self.world.seconds

    def next_arrival(self):
        return self.chunks[0][0] if self.chunks else self.shut if self.shut > self.world.seconds else NEVER

    def end(self):
        """The sender closes its end."""
        if self.shut == NEVER and not self.cut:
            self.shut = max(self.latest, self.world.seconds)


class Socket:
    """One end of a connection."""

    family = socket.AF_UNIX

    def __init__(self, world, rank, incoming, outgoing):
        self._world, self.incoming, self.outgoing = world, incoming, outgoing
        world.descriptors += 1
        self._number = world.descriptors
        world.sockets[rank].append(self)

    def fileno(self):
        return self._number

    def setblocking(self, flag):
        assert flag is False

    def events(self, wanted):
        found = 0
        if self.incoming.arrived() or self.incoming.ended() or self.incoming.reset:
            found |= select.POLLIN
        if self.outgoing.size < self._world.room or self.outgoing.closed or self.outgoing.reset:
            found |= select.POLLOUT
        found &= wanted
        if self.incoming.reset:
            found |= select.POLLERR | select.POLLHUP
        return found

    def _call(self, place):
        if self._number < 0:
            raise OSError(errno.EBADF, "Bad file descriptor")
        self._world.reach(place)
        self._world.pause()

    def _part(self, size):
        world = self._world
        if world.random.random() < world.short:
            size = world.random.randrange(min(size, 1 << world.random.randrange(10)) + 1)
        if size == 0:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return size

    def sendmsg(self, views):
        self._call("send")
        link = self.outgoing
        if link.shut != NEVER:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        if link.closed or link.reset:
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        data = b"".join(views)
        size = self._part(max(0, min(len(data), self._world.room - link.size)))
        link.put(data[:size])
        self._world.reach("sent")
        return size

    def recv_into(self, view):
        self._call("receive")
        link = self.incoming
        if link.reset:
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        if link.ended():
            return 0
        if not link.arrived():
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        time, data = link.chunks[0]
        size = self._part(min(len(data), len(view)))
        view[:size] = data[:size]
        link.chunks.popleft()
        if size < len(data):
            link.chunks.appendleft((time, data[size:]))
        link.size -= size
        self._world.reach("received")
        return size

    def shutdown(self, how):
        self.outgoing.end()
        if how == socket.SHUT_RDWR:
            self.incoming.shut = min(self.incoming.shut, self._world.seconds)

    def close(self):
        if self._number < 0:
            return
        self._number = -1
        self.outgoing.end()
        self.incoming.closed = True
        if self.incoming.chunks and not self.incoming.cut:  # as the kernel does with bytes that nobody has read
            self.outgoing.reset = True


class Poll:
    """select.poll on these sockets."""

    def __init__(self, world):
        self._world, self._wanted = world, {}

    def register(self, member, events):
        self._wanted[member.fileno()] = member, events

    def unregister(self, member):
        del self._wanted[member.fileno()]

    def _ready(self):
        return [(number, found) for number, (m, wanted) in self._wanted.items() if (found := m.events(wanted))]

    def poll(self, milliseconds):
        world = self._world
        world.wait(lambda: bool(self._ready()), world.seconds + milliseconds / 1000)
        ready = self._ready()
        world.random.shuffle(ready)
        return ready


def pair(world, a, b):
    links = Link(world, a, b), Link(world, b, a)
    world.links += links
    return Socket(world, a, links[1], links[0]), Socket(world, b, links[0], links[1])


@contextlib.contextmanager
def under(world):
    """Let TcpTransport use the network and the clock of this world."""

    def now():
        if world.over:
            raise Stopped
        return world.seconds

    def empty(size, dtype):
        world.reach("allocate")
        return real(size, dtype)

    real = connections.empty
    clock = SimpleNamespace(monotonic=now, perf_counter=now)
    patches = [
        (tcp, "time", clock),
        (waiting, "time", clock),
        (tcp, "select", SimpleNamespace(poll=lambda: Poll(world), POLLIN=select.POLLIN, POLLOUT=select.POLLOUT)),
        (
            tcp,
            "socket",
            SimpleNamespace(
                socketpair=lambda: pair(world, world.current, world.current),
                socket=socket.socket,
                SHUT_RDWR=socket.SHUT_RDWR,
                SHUT_WR=socket.SHUT_WR,
            ),
        ),
        (connections, "empty", empty),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in patches]
    for module, name, value in patches:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def transports(world):
    """Return a function that makes the transport of a rank, connected to all others."""
    sockets = [{} for _ in range(world.size)]
    for a in range(world.size):
        for b in range(a + 1, world.size):
            sockets[a][b], sockets[b][a] = pair(world, a, b)
    return lambda rank: tcp.TcpTransport(rank, sockets[rank], [0] * world.size)
