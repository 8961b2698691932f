"""Polling with patience: spin, then sleep between polls; log who waits for whom, and raise after the timeout."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial

from mpi4py import MPI

from sparsecoll.errors import CommunicationError

logger = logging.getLogger(__name__)

WATCHDOG_SECONDS = 60.0  # between warnings of a rank that waits
ERROR_SHOWN_SECONDS = 1.0  # before a rank that waits after an exception shows it
ON_TIMEOUT = "SPARSECOLL_ON_TIMEOUT"  # environment variable: "raise" (the default) or "abort"
_SPINS = 20  # polls before a waiting rank yields its core
_YIELDS = 2000  # polls that yield it; after them the rank sleeps between polls
_SLEEP_SECONDS = 50e-6
_yield_core = getattr(os, "sched_yield", partial(time.sleep, 0))  # sleep(0) takes as long as a short sleep on Linux


class Waiter:
    """Call `pause` between polls for one event.

    Args:
        comm: communicator of the rank that waits.
        what: says what the rank does, such as "waits for a message of rank 2".
        timeout: seconds until CommunicationError is raised; None for no limit.
        error: exception raised on this rank before; the first warning comes sooner and shows it.
    """

    def __init__(
        self, comm: MPI.Intracomm, what: Callable[[], str], timeout: float | None, error: Exception | None = None
    ) -> None:
        self._comm = comm
        self._what = what
        self._timeout = timeout
        self._error = error
        self._polls = 0
        self._start = 0.0
        self._warned = 0.0

    def pause(self) -> None:
        """Let some time pass; log a warning when it is due.

        Raises:
            CommunicationError: The timeout is over.
        """
        self._polls += 1
        if self._polls < _SPINS:
            return
        now = time.monotonic()
        if self._polls == _SPINS:
            self._start = self._warned = now
        if self._timeout is not None and now - self._start > self._timeout:
            self._give_up(self._timeout)
        if now - self._warned > (WATCHDOG_SECONDS if self._error is None else ERROR_SHOWN_SECONDS):
            self._warned = now
            since = now - self._start
            logger.warning("rank %d %s, %.0f s so far", self._comm.rank, self._what(), since, exc_info=self._error)
            self._error = None
        if self._polls < _SPINS + _YIELDS:
            _yield_core()
        else:
            time.sleep(_SLEEP_SECONDS)

    def _give_up(self, timeout: float) -> None:
        why = f"rank {self._comm.rank} {self._what()} for {timeout} s: no answer within the timeout"
        if os.environ.get(ON_TIMEOUT) == "abort":
            logger.critical("%s; aborting the job (%s=abort)", why, ON_TIMEOUT)
            self._comm.Abort(1)
        raise CommunicationError(why)
