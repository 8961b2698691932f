"""Spans of work by kind, reported to the listeners of the current thread.

The library marks its own work with `span`. Without a listener nothing is recorded, and a mark costs a fraction of a
microsecond. There are three listeners: `Recorder` adds up seconds, a virtual rank advances its clock, and
`sparsecoll.torch` lets torch.profiler show them.

The kinds, and the amounts reported with them, are "select" (values read), "encode" and "decode" (entries), "merge"
(entries, and coordinates from the first to the last), "dense" (values of dense vectors read or written), and "wait"
(for messages to arrive or to be sent; no amount).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

KINDS = ("select", "encode", "decode", "merge", "dense", "wait")


class Listener(Protocol):
    """Receives every span of work in its thread."""

    def span(self, kind: str, /, *, amount: int, extent: int) -> AbstractContextManager[object]:
        """Return the context manager in which a span of work runs; for the arguments see `span`."""
        ...


class _OfThread(threading.local):
    listener: Listener | None = None  # one, or several as a _Pair


_of_thread = _OfThread()
_nothing = contextlib.nullcontext()


def listening() -> bool:
    """Return whether there is a listener, for spans whose amounts take time to compute."""
    return _of_thread.listener is not None


def span(kind: str, amount: int = 0, extent: int = 0) -> AbstractContextManager[object]:
    """Mark a span of work: `with span("merge", entries, coordinates): ...`.

    Args:
        kind: one of KINDS.
        amount: how much work it is, in the unit of the kind.
        extent: for "merge", the number of coordinates from the first index to the last.
    """
    listener = _of_thread.listener
    return _nothing if listener is None else listener.span(kind, amount=amount, extent=extent)


class _Pair:
    """A listener, and the one that was there before it."""

    def __init__(self, listener: Listener, before: Listener) -> None:
        self._listener, self._before = listener, before

    @contextlib.contextmanager
    def span(self, kind: str, /, **sizes: int) -> Iterator[None]:
        with self._listener.span(kind, **sizes), self._before.span(kind, **sizes):
            yield


L = TypeVar("L", bound=Listener)
T = TypeVar("T")


@contextlib.contextmanager
def record(listener: L) -> Iterator[L]:
    """Context manager: report the work of this thread to `listener`, too.

    >>> with record(Recorder()) as recorder:
    ...     y = sparsecoll.SparseVector.from_dense(np.ones(5))
    >>> [kind for kind, seconds in recorder.seconds.items() if seconds]
    ['dense']
    """
    before = _of_thread.listener
    _of_thread.listener = listener if before is None else _Pair(listener, before)
    try:
        yield listener
    finally:
        _of_thread.listener = before


def carried(call: Callable[[], T]) -> Callable[[], T]:
    """Return a call for another thread, whose work is reported to this thread's listener."""
    listener = _of_thread.listener
    return call if listener is None else record(listener)(call)


class Recorder:
    """Adds up seconds by kind of work.

    The time of a nested span counts only for the inner kind, so that the sum over the kinds is the total.

    Args:
        now: clock, in seconds.

    Attributes:
        seconds: dict from kind to seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.seconds, self._now = dict.fromkeys(KINDS, 0.0), now
        self._open: list[list[float]] = [[0.0, 0.0]]  # the start of each open span, and the seconds of nested work

    @contextlib.contextmanager
    def span(self, kind: str, /, *, amount: int = 0, extent: int = 0) -> Iterator[None]:
        """Time a span of work, as a listener."""
        self._open.append([self._now(), 0.0])
        try:
            yield
        finally:
            start, inner = self._open.pop()
            whole = self._now() - start
            self.seconds[kind] += whole - inner
            self._open[-1][1] += whole
