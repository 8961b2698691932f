"""Spans of work by kind, reported to the listeners of the current thread.

The library marks its own work with `span`. Without a listener nothing is recorded, and a mark costs a fraction of a
microsecond. There are three listeners: `Recorder` adds up seconds, a virtual rank advances its clock, and
`sparsecoll.torch.Timeline` records spans.

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
from typing import Any, Protocol, TypeVar

KINDS = ("select", "encode", "decode", "merge", "dense", "wait")


class Listener(Protocol):
    """Receives every span of work in its thread."""

    def span(self, kind: str, /, *, amount: int, extent: int) -> AbstractContextManager[object]:
        """Return the context manager in which a span of work runs; for the arguments see `span`."""
        ...


class _OfThread(threading.local):
    listeners: tuple[Listener, ...] = ()  # the most recent one first


_of_thread = _OfThread()
_nothing = contextlib.nullcontext()


def listening() -> bool:
    """Return whether there is a listener, for spans whose amounts take time to compute."""
    return bool(_of_thread.listeners)


def span(kind: str, amount: int = 0, extent: int = 0) -> AbstractContextManager[object]:
    """Mark a span of work: `with span("merge", entries, coordinates): ...`.

    Args:
        kind: one of KINDS.
        amount: how much work it is, in the unit of the kind.
        extent: for "merge", the number of coordinates from the first index to the last.
    """
    listeners = _of_thread.listeners
    if not listeners:
        return _nothing
    if len(listeners) == 1:
        return listeners[0].span(kind, amount=amount, extent=extent)
    return _Nested(listeners, kind, amount, extent)


class _Nested:
    """The context managers of several listeners, for one span."""

    __slots__ = ("_spans",)

    def __init__(self, listeners: tuple[Listener, ...], kind: str, amount: int, extent: int) -> None:
        self._spans = [listener.span(kind, amount=amount, extent=extent) for listener in listeners]

    def __enter__(self) -> None:
        for span in self._spans:
            span.__enter__()

    def __exit__(self, *error: Any) -> None:
        for span in reversed(self._spans):
            span.__exit__(*error)


L = TypeVar("L", bound=Listener)


@contextlib.contextmanager
def record(listener: L) -> Iterator[L]:
    """Context manager: report the work of this thread to `listener`, too.

    >>> with record(Recorder()) as recorder:
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
    """Adds up seconds by kind of work.

    The time of a nested span counts only for the inner kind, so that the sum over the kinds is the total.

    Args:
        now: clock, in seconds.

    Attributes:
        seconds: dict from kind to seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self._now = now
        self._inner = [0.0]  # seconds of nested work in each open span

    def span(self, kind: str, /, *, amount: int = 0, extent: int = 0) -> AbstractContextManager[None]:
        """Time a span of work, as a listener."""
        return _Recorded(self, kind)


class _Recorded:
    """A span of a Recorder: a class, since a generator takes three times as long."""

    __slots__ = ("_kind", "_recorder", "_start")

    def __init__(self, recorder: Recorder, kind: str) -> None:
        self._recorder, self._kind = recorder, kind

    def __enter__(self) -> None:
        self._recorder._inner.append(0.0)
        self._start = self._recorder._now()

    def __exit__(self, *error: object) -> None:
        recorder = self._recorder
        whole = recorder._now() - self._start
        recorder.seconds[self._kind] += whole - recorder._inner.pop()
        recorder._inner[-1] += whole
