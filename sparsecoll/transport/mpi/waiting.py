"""Polling MPI with patience: yield the core between polls, then sleep, each time twice as long, up to a limit.

MPI has no wait that sleeps. docs/training.md has the latency and the processor time that this rule takes, as
perf/waiting.py measures them. A yield takes half a microsecond; where ranks share cores, the one that is to send may
need this one's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

from mpi4py import MPI

from sparsecoll.transport.waiting import Watchdog

YIELD_SECONDS = 100e-6  # for which a rank yields its core between polls, before it sleeps
SHORTEST_SECONDS, LONGEST_SECONDS = 50e-6, 700e-6  # of a sleep
POLLS = 2  # after a sleep: MPI may need two to find a message
yield_core = getattr(os, "sched_yield", partial(time.sleep, 0))  # sleep(0) takes as long as a short sleep on Linux


class Waiter(Watchdog):
    """Call `pause` between polls for one event.

    Args:
        comm: communicator of the rank that waits.
        what: says what the rank does, such as "waits for a message of rank 2".
        timeout: seconds until CommunicationError is raised; None for no limit.
        error: exception raised on this rank before; the first warning comes sooner and shows it.
        on_stall: see Watchdog.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        what: Callable[[], str],
        timeout: float | None,
        error: Exception | None = None,
        on_stall: Callable[[bool], None] | None = None,
    ) -> None:
        super().__init__(comm.rank, what, timeout, error, partial(comm.Abort, 1), on_stall)
        self._seconds, self._polls = SHORTEST_SECONDS, 1

    def pause(self, moving: bool = False) -> bool:
        """Let some time pass; log a warning when it is due.

        Args:
            moving: whether only polls move on what this rank waits for, so that sleeps stay short (default: False).

        Returns:
            Whether the rank has slept.

        Raises:
            CommunicationError: The timeout is over.
        """
        self._polls -= 1
        if self._polls:
            return False
        self.check()
        if self._checked - self._start < YIELD_SECONDS:
            yield_core()
            self._polls = 1
            return False
        time.sleep(self._seconds)
        self._seconds = SHORTEST_SECONDS if moving else min(2 * self._seconds, LONGEST_SECONDS)
        self._polls = POLLS
        return True
