"""Polling MPI with patience: yield the core between polls, then sleep.

MPI has no wait that sleeps. A message moves only while its sender and its receiver poll, so that they keep polling
while one is on its way: without a pause inside a machine, where it moves in small pieces, and after a few polls every
50 us or more between machines, where the operating system buffers megabytes of it. A rank that waits for others to
send sleeps for a fraction of the time that it has waited, or, where the last waits were all long, of the time that it
is likely to wait. Between machines something that comes on a connection ends the sleep (`connections.py`), and the
sleep may be longer once that has proved true. Before its first sleep a rank yields the core for a while: where ranks
share cores, the one that is to send may need this one's, and a yield takes half a microsecond where they do not. If
another thread of it computes, which would lose that time, it does so for a few polls only.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from mpi4py import MPI

from sparsecoll.transport.mpi.connections import Connections
from sparsecoll.transport.waiting import Watchdog

SPINS = 20  # polls for a message before a Waiter is needed
_YIELDS, _YIELDS_BETWEEN_NODES = 2000, 50  # polls that yield it while a message is on its way, before it sleeps
_YIELD_SECONDS = 1e-3  # for which a rank yields it while nothing is on its way
_SLEEP_SECONDS, _LONGEST_SECONDS = 50e-6, 2e-3
_SLEEPS = 16  # the time waited so far, divided by that of a sleep
_MOVING_SLEEPS = 32  # the same while a message is on its way between machines
_ANNOUNCED_SLEEPS = 2  # the same for the limit of a sleep that a message ends,
_ANNOUNCED_SECONDS, _LONGEST_ANNOUNCED_SECONDS = 10e-3, 50e-3  # which is within these, or divided by
_MOVING_SHARE = 5  # while a message is on its way, since MPI may then have more to do than what has come
_ANNOUNCED_EXPECTED = 2  # and at least so many times the time that a wait is expected to take
_EXPECTED_SLEEPS = 4  # the time that a wait is expected to take, divided by that of a sleep
_REMEMBERED = 3  # waits, all of which were long where the next one is expected to be
POLLS = 3  # after a sleep: MPI may need several to find a message
yield_core = getattr(os, "sched_yield", partial(time.sleep, 0))  # sleep(0) takes as long as a short sleep on Linux


class Pace:
    """How long a rank has waited for messages lately."""

    def __init__(self) -> None:
        self._last: deque[float] = deque([0.0] * _REMEMBERED, _REMEMBERED)

    def note(self, seconds: float) -> None:
        """A wait is over."""
        self._last.append(seconds)

    @property
    def expected(self) -> float:
        """Seconds that a wait is likely to take: one short wait, as in a chain of messages, makes it short."""
        return min(self._last)

    @property
    def slow(self) -> bool:
        """Whether the next wait is likely to be so long that a rank sleeps at once."""
        return self.expected > _YIELD_SECONDS


class Waiter(Watchdog):
    """Call `pause` between polls for one event.

    Args:
        comm: communicator of the rank that waits.
        what: says what the rank does, such as "waits for a message of rank 2".
        timeout: seconds until CommunicationError is raised; None for no limit.
        error: exception raised on this rank before; the first warning comes sooner and shows it.
        expected: seconds that the wait is likely to take.
        one_node: whether all ranks are on one machine.
        overlapped: whether this rank computes meanwhile (a nonblocking call): between machines it then sleeps at once.
        connections: by which messages come from other machines.
        alone: whether no message comes from this machine.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        what: Callable[[], str],
        timeout: float | None,
        error: Exception | None = None,
        expected: float = 0.0,
        one_node: bool = True,
        overlapped: bool = False,
        connections: Connections | None = None,
        alone: bool = False,
    ) -> None:
        super().__init__(comm.rank, what, timeout, error, partial(comm.Abort, 1))
        self._polls = 0
        self._connections, self._alone, self._one_node = None if one_node else connections, alone, one_node
        sleeps = overlapped and not one_node
        self._yields = _YIELDS if one_node else 0 if sleeps else _YIELDS_BETWEEN_NODES
        self._yield_seconds = 0.0 if sleeps or expected > _YIELD_SECONDS else _YIELD_SECONDS
        self._least = max(expected / _EXPECTED_SLEEPS, _SLEEP_SECONDS)
        self._least_announced = max(expected * _ANNOUNCED_EXPECTED, _ANNOUNCED_SECONDS)

    def pause(self, moving: Callable[[], bool] = lambda: True) -> bool:
        """Let some time pass; log a warning when it is due.

        Args:
            moving: tells whether a message is on its way, which polls move on (default: yes).

        Returns:
            Whether the rank has slept.

        Raises:
            CommunicationError: The timeout is over.
        """
        self._polls += 1
        due = self.check()
        waited = self._checked - self._start
        brief = waited < self._yield_seconds
        on_its_way = not brief and moving()
        if brief or (on_its_way and self._polls < self._yields):
            yield_core()
            return False
        self._sleep(waited, on_its_way, due)
        return True

    def _sleep(self, waited: float, on_its_way: bool, most: float) -> None:
        if not on_its_way:
            seconds = max(waited / _SLEEPS, self._least)
        else:
            seconds = _SLEEP_SECONDS if self._one_node else max(waited / _MOVING_SLEEPS, _SLEEP_SECONDS)
        seconds = min(seconds, _LONGEST_SECONDS)
        connections = self._connections
        announced = connections is not None and connections.announcing and self._alone
        if connections is None or (on_its_way and not announced):
            time.sleep(seconds)
            return
        if on_its_way:  # some bytes gather before they wake this rank
            time.sleep(seconds)
        if announced:
            least, longest = self._least_announced, _LONGEST_ANNOUNCED_SECONDS
            if on_its_way:
                least, longest = _ANNOUNCED_SECONDS / _MOVING_SHARE, longest / _MOVING_SHARE
            seconds = min(max(waited / _ANNOUNCED_SLEEPS, least), longest, most)
        connections.sleep(seconds, on_its_way)
