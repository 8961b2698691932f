"""Watchdog: a rank that waits logs for whom, and raises after the timeout."""

from __future__ import annotations

import functools
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsecoll.errors import CommunicationError, check_choice
from sparsecoll.transport import process

logger = logging.getLogger(__name__)

WATCHDOG_SECONDS = 60.0  # between warnings of a rank that waits
STALL_SECONDS = 1.0  # between checks of a rank that waits, whether it does so for ever
ERROR_SHOWN_SECONDS = 1.0  # before a rank that waits after an exception shows it
ON_TIMEOUT = "SPARSECOLL_ON_TIMEOUT"  # environment variable: "raise" (the default) or "abort"
FORKED, CALL_PARENT = "this process was forked", "make calls in the process that it was forked from"


def out_of_use(why: str, cure: str) -> CommunicationError:
    """Return the exception of calls on a communicator that can no longer be used."""
    return CommunicationError(f"communicator is out of use since {why}; {cure}")


@functools.cache
def check_environment() -> None:
    """Raise ValueError if SPARSECOLL_ON_TIMEOUT has a value that means nothing."""
    check_choice(ON_TIMEOUT, os.environ.get(ON_TIMEOUT) or "raise", ("raise", "abort"))


def usable(timeout: Any) -> bool:
    """Return whether a timeout is valid: a number of seconds above 0, or None."""
    if timeout is None:
        return True
    number = isinstance(timeout, (int, float, np.integer, np.floating)) and not isinstance(timeout, bool)
    return bool(number and timeout > 0 and math.isfinite(timeout))


def check_timeout(timeout: Any) -> None:
    """Raise unless a timeout is `usable`."""
    if not usable(timeout):
        kind = ValueError if isinstance(timeout, (int, float)) else TypeError
        raise kind(f"timeout: expected seconds above 0, or None to wait for ever, got {timeout!r}")


@dataclass
class Abandoned:
    """Stands for a transport whose ranks did not all make its first call, for the reason `why`."""

    why: str
    kept: Any = None

    def error(self) -> CommunicationError:
        """Return the exception of calls."""
        return out_of_use(self.why, "continue with a new one, once all ranks have made this call")


class Watchdog:
    """Call `check` from time to time while one rank waits for one event.

    Args:
        rank: this rank.
        what: says what the rank does, such as "waits for a message of rank 2".
        timeout: seconds until CommunicationError is raised; None for no limit.
        error: exception raised on this rank before; the first warning comes sooner and shows it.
        on_stall: called with True after STALL_SECONDS, or a quarter of the timeout if that is less, and with False each
            time that as much has passed again; None, the default, for nothing.
        abort: ends the whole job, if the environment asks for that.
        failure: makes the exception of a message.
        usable: raises if this rank may wait no longer.
    """

    def __init__(
        self,
        rank: int,
        what: Callable[[], str],
        timeout: float | None,
        error: Exception | None = None,
        on_stall: Callable[[bool], None] | None = None,
        abort: Callable[[], object] = lambda: os._exit(1),
        failure: Callable[[str], CommunicationError] = CommunicationError,
        usable: Callable[[], None] = lambda: None,
    ) -> None:
        self._rank, self._what, self._timeout, self._error = rank, what, timeout, error
        self._abort, self._failure, self._usable = abort, failure, usable
        self._start = self._warned = self._checked = time.monotonic()
        self._ended: float | None = None  # when the program was found to have ended
        self._on_stall, self._stalls = on_stall, 1
        self._stall = STALL_SECONDS if timeout is None else min(STALL_SECONDS, timeout / 4)

    def check(self) -> float:
        """Log a warning if it is due; return the seconds until the next check.

        Raises:
            CommunicationError: The timeout is over, or the program has ended and no rank has answered since.
            Exception: What `on_stall` or `usable` raises.
        """
        self._usable()
        now = self._checked = time.monotonic()
        patience = WATCHDOG_SECONDS if self._error is None else ERROR_SHOWN_SECONDS
        if self._timeout is not None and now - self._start >= self._timeout:
            self._time_out(self._timeout)
        why, limit = process.ended()
        if why:
            self._ended = now if self._ended is None else self._ended
            if now - self._ended >= limit:
                raise self._failure(f"rank {self._rank} {self._what()}, but {why}")
        if now - self._warned >= patience:
            self._warned, since = now, now - self._start
            logger.warning("rank %d %s, %.0f s so far", self._rank, self._what(), since, exc_info=self._error)
            self._error, patience = None, WATCHDOG_SECONDS
        due = self._warned + patience
        if self._on_stall is not None:
            if now >= self._start + self._stalls * self._stall:
                self._stalls += 1
                self._on_stall(self._stalls == 2)
            due = min(due, self._start + self._stalls * self._stall)
        due = min(due, now + STALL_SECONDS)  # for the end of the program, and `usable`
        return (due if self._timeout is None else min(due, self._start + self._timeout)) - now

    def _time_out(self, timeout: float) -> None:
        why = f"rank {self._rank} {self._what()} for {timeout} s: no answer within the timeout"
        if os.environ.get(ON_TIMEOUT) == "abort":
            logger.critical("%s; aborting the job (%s=abort)", why, ON_TIMEOUT)
            self._abort()
        raise self._failure(why)
