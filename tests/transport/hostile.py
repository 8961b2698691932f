"""Ranks of one process in a world that is hostile by a seed, with a clock of its own; a seed replays exactly.

The transports are the real ones: only the sockets, the communicator of MPI and the clock that they see are replaced.
Each rank is a thread, of which only the one with the baton runs; the seed chooses who gets it, when bytes arrive, how
many of them a system call moves, and which faults happen where.
"""

import contextlib
import random
import sys
import threading
from dataclasses import dataclass
from types import SimpleNamespace

from sparsecoll.transport import waiting

NEVER = float("inf")
STEPS = 300_000  # of all ranks together, after which they count as moving nothing


class Stopped(BaseException):
    """Ends the thread of a rank: it was killed, or the run is over."""


@dataclass
class Fault:
    """Something that happens on `rank` once, when it reaches `place` for the `nth` time.

    Attributes:
        kind: "interrupt", "memory", "error", "stop", "kill" or "cut" (its connections swallow what it sends).
        place: "send", "receive", "probe" or "test" (before the call of the system or of MPI), "sent", "received" or
            "probed" (after it), "allocate", or "line", any line of the transport.
        number: which error.
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
        error: makes the exception of an error from its number.
        traced: the files whose lines are places.
        current: the rank that has the baton.
        seconds: the time.
        limit: seconds after which ranks that still run count as hanging.
        failure: what has gone wrong in the test itself; "" if nothing has.
        happened: the number of faults that have happened.
    """

    def __init__(self, seed, size, faults=(), limit=1000.0):
        self.error, self.traced = OSError, ()
        self.random = random.Random(seed)
        self.size, self.limit = size, limit
        self.faults = list(faults)
        self.happened = self.steps = 0
        self.seconds, self.current, self.failure, self.over = 0.0, 0, "", False
        self.room = self.random.choice([20, 300, 5000, 100_000])  # bytes that the network takes
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
        if fault.kind == "error":
            raise self.error(fault.number)
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
        return self._trace_line if frame.f_code.co_filename in self.traced and not self.over else None

    def _trace_line(self, frame, event, argument):
        if event == "line" and not self.over:
            self.reach("line")
        return self._trace_line

    def pause(self):
        """Perhaps let others run."""
        if self.random.random() < self.eager:
            self.wait(lambda: True, self.seconds)

    def delay(self):
        return self.random.random() * self.slow if self.random.random() < 0.5 else 0.0

    def now(self):
        if self.over:
            raise Stopped
        return self.seconds

    @contextlib.contextmanager
    def patched(self, allocator, *patches):
        """Let the transport use the clock and the network of this world, and the faults of its allocations."""
        real = allocator.empty

        def empty(size, dtype, *like):
            self.reach("allocate")
            return real(size, dtype, *like)

        clock = SimpleNamespace(monotonic=self.now, perf_counter=self.now, sleep=self.sleep)
        patches = [(allocator, "empty", empty), (waiting, "time", clock), *patches]
        patches = [(module, name, clock if value is None else value) for module, name, value in patches]
        before = [(module, name, getattr(module, name)) for module, name, _ in patches]
        try:
            for module, name, value in patches:
                setattr(module, name, value)
            yield
        finally:
            for module, name, value in before:
                setattr(module, name, value)

    def sleep(self, seconds):
        self.wait(lambda: False, self.now() + seconds)
