"""Polling MPI with patience: yield the core between polls, then sleep, each time twice as long, up to a limit.

MPI has no wait that sleeps. docs/training.md has the latency and the processor time that this rule takes, as
perf/waiting.py measures them. A yield takes half a microsecond; the rank that is to send may need this core.
"""

from __future__ import annotations

import os
import time
from functools import partial

from sparsecoll.transport.waiting import Watchdog

YIELD_SECONDS = 100e-6  # for which a rank yields its core between polls, before it sleeps
SHORTEST_SECONDS, LONGEST_SECONDS = 50e-6, 700e-6  # of a sleep
POLLS = 2  # after a sleep: MPI may need two to find a message
yield_core = getattr(os, "sched_yield", partial(time.sleep, 0))  # sleep(0) takes as long as a short sleep on Linux


class Waiter(Watchdog):
    """Call `pause` between polls for one event."""

    _seconds, _polls = SHORTEST_SECONDS, 1

    def pause(self) -> bool:
        """Let some time pass, and log a warning when it is due; return whether the rank has slept.

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
        self._seconds, self._polls = min(2 * self._seconds, LONGEST_SECONDS), POLLS
        return True
