"""What happens to the transports of a process when its program ends, and when it is forked.

A program ends when the handlers of atexit run, when multiprocessing's function returns in a process that was forked, or
when an exception has ended its main thread. From then on a call of any thread waits for other ranks for LAST_SECONDS at
most, see `Watchdog`. The handler of this module runs after those that were registered after it. It waits until no
thread is in a call and the threads of the library have ended, since a thread that runs while the interpreter is
finalized may abort the process. Then each transport leaves its communicator.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from multiprocessing import parent_process, util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparsecoll.transport.base import Transport

LAST_SECONDS = 5.0  # for which a call waits for other ranks after the program has ended
FAILED_SECONDS = 1.0  # the same after an exception
BUSY_SECONDS = 60.0  # for which the end of calls that do not wait is waited for: a kernel may have to be compiled

_living: weakref.WeakSet[Transport] = weakref.WeakSet()
_why = ""  # how the program, or its use of MPI, has ended
_forked = False  # whether this process was forked from one that had this module


def add(transport: Transport) -> None:
    """Take care of a transport from now on."""
    _living.add(transport)
    if parent_process() is not None and (_forked or "--multiprocessing-fork" not in sys.orig_argv):
        util.Finalize(None, _end_forked, exitpriority=0)  # type: ignore[no-untyped-call]


def living() -> list[Transport]:
    """Return all transports of this process, except those of virtual ranks."""
    return [transport for transport in _living if not transport.virtual]


def ended() -> tuple[str, float]:
    """Return how the program has ended, "" if it runs, and the seconds for which a call may still wait."""
    error = getattr(sys, "last_value", None)  # the exception that has ended the main thread, or a line typed by a user
    if not _why and (error is None or threading.main_thread().is_alive()):
        return "", LAST_SECONDS
    if error is None:
        return _why, LAST_SECONDS
    return f"its program was ended by {error!r}", FAILED_SECONDS


def leave(transports: list[Transport], why: str) -> None:
    """End the calls of these transports, and let each leave its communicator; from now on none can make a call."""
    global _why
    before, _why = _why, _why or why
    try:
        deadline = time.monotonic() + BUSY_SECONDS
        for transport in transports:
            transport.finish(lambda: max(0.0, deadline - time.monotonic()))
        while transports := [transport for transport in transports if not transport.leave()]:
            time.sleep(0.001)
    finally:
        _why = before


@atexit.register
def _end() -> None:
    global _why
    _why = "its program has ended"
    leave(living(), _why)


def _end_forked() -> None:
    """End a process that multiprocessing has forked, which calls no handlers of atexit."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
    _end()


def _forget() -> None:
    global _forked
    _forked = True
    for transport in list(_living):
        transport.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
