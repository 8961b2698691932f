"""What a rank is doing and for how long: kinds of work, told to whoever listens on this thread.

The library marks its own work (`doing`); nothing is recorded unless a listener is set, and then marking costs a
fraction of a microsecond. Listeners: `Recorder`, which keeps times, and the simulator, which lets work take time on the
virtual clock.

Kinds and the amounts told with them: "select" (values looked at), "encode" and "decode" (entries), "merge" (entries,
and coordinates from the first to the last), "dense" (values of dense vectors read or written), "wait" (nothing: for
messages to arrive or to leave).
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
    """Gets every piece of work of its thread."""

    def work(self, kind: str, amount: int, span: int) -> AbstractContextManager[object]:
        """Surrounds the work."""
        ...


class _OfThread(threading.local):
    listeners: tuple[Listener, ...] = ()  # the one that began last is the first


_of_thread = _OfThread()
_nothing = contextlib.nullcontext()


def doing(kind: str, amount: int = 0, span: int = 0) -> AbstractContextManager[object]:
    """Surround work of this kind with what this returns."""
    listeners = _of_thread.listeners
    if not listeners:
        return _nothing
    return listeners[0].work(kind, amount, span) if len(listeners) == 1 else _told(listeners, kind, amount, span)


@contextlib.contextmanager
def _told(listeners: tuple[Listener, ...], kind: str, amount: int, span: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for listener in listeners:
            stack.enter_context(listener.work(kind, amount, span))
        yield


L = TypeVar("L", bound=Listener)


@contextlib.contextmanager
def listening(listener: L) -> Iterator[L]:
    """Let a listener have this thread's work inside, beside those that already do.

    >>> with listening(Recorder()) as recorder:
    ...     y = sparsecoll.SparseVector.from_dense(np.ones(5))
    >>> [kind for kind, seconds in recorder.seconds.items() if seconds]
    ['dense']
    """
    before = _of_thread.listeners
    _of_thread.listeners = (listener, *before)
    try:
        yield listener
    finally:
        _of_thread.listeners = before


class Recorder:
    """Seconds by kind of work. Time inside inner work counts for the inner kind alone, so that kinds add up.

    Attributes:
        seconds: by kind.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self._now = now
        self._inner = [0.0]  # seconds of work inside each piece that is going on

    @contextlib.contextmanager
    def work(self, kind: str, amount: int, span: int = 0) -> Iterator[None]:
        """Surround work, see `doing`."""
        self._inner.append(0.0)
        start = self._now()
        try:
            yield
        finally:
            whole = self._now() - start
            self.seconds[kind] += whole - self._inner.pop()
            self._inner[-1] += whole
