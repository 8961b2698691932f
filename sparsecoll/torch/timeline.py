"""What each thread did when: a trace for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Timeline:
    """Records spans of time; give one to DistributedOptimizer as `timeline`.

    Rows of the trace: "back-propagation" on the thread that trains; on the thread that communicates one span a bucket
    with the kinds of work of `telemetry.trace` inside. Memory: some 200 bytes a span, until `save` or `clear`.

    Args:
        rank: the process number of the trace.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self._events: list[tuple[str, float, float, int, dict[str, Any]]] = []

    @contextlib.contextmanager
    def span(self, name: str, **about: Any) -> Iterator[None]:
        """Record what happens inside."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, start, time.perf_counter(), **about)

    def add(self, name: str, start: float, end: float, **about: Any) -> None:
        """Record a span of this thread, by time.perf_counter."""
        self._events.append((name, start, end, threading.get_ident(), about))

    def work(self, kind: str, amount: int, span: int = 0) -> contextlib.AbstractContextManager[None]:
        """A listener's part, see `telemetry.trace`."""
        return self.span(kind, amount=amount)

    def clear(self) -> None:
        """Forget all spans."""
        self._events.clear()

    def save(self, path: str | Path) -> None:
        """Write Chrome's JSON, microseconds since the first span."""
        first = min((start for _, start, *_ in self._events), default=0.0)
        numbers: dict[int, int] = {}
        events: list[dict[str, Any]] = []
        for name, start, end, thread, about in self._events:
            number = numbers.setdefault(thread, len(numbers))
            times = {"ts": (start - first) * 1e6, "dur": (end - start) * 1e6}
            events.append({"name": name, "ph": "X", "pid": self.rank, "tid": number, **times, "args": about})
        head = {"name": "process_name", "ph": "M", "pid": self.rank, "args": {"name": f"rank {self.rank}"}}
        Path(path).write_text(json.dumps({"traceEvents": [head, *events]}))
