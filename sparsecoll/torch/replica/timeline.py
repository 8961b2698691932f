"""Timeline: traces of training steps for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sparsecoll.telemetry import trace
from sparsecoll.torch.tensors.private import profiled


class Timeline:
    """Records spans of time; pass one as `timeline` to a wrapper, a HookState or `sparsecoll.torch.fsdp.attach`.

    The trace has a row per thread: on the progress thread one span per bucket, with nested spans by kind of work
    (select, encode, decode, merge, dense, wait), and on the training thread, with DistributedOptimizer alone,
    "gradients", from the first gradient to the last one: back-propagation without what it computes before the first. A
    span takes some 200 bytes of memory until `clear`.

    Args:
        rank: process number in the trace (default: 0).
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self._events: list[tuple[str, float, float, int, dict[str, Any]]] = []

    @contextlib.contextmanager
    def span(self, name: str, **about: Any) -> Iterator[None]:
        """Context manager: record the enclosed code as a span of this thread.

        Args:
            name: name of the span.
            about: further values, shown with the span.
        """
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, start, time.perf_counter(), **about)

    def add(self, name: str, start: float, end: float, **about: Any) -> None:
        """Record a span of this thread that is over.

        Args:
            name: name of the span.
            start: its beginning, in seconds of time.perf_counter.
            end: its end, in seconds of time.perf_counter.
            about: further values, shown with the span.
        """
        self._events.append((name, start, end, threading.get_ident(), about))

    def clear(self) -> None:
        """Delete all spans."""
        self._events.clear()

    def save(self, path: str | Path) -> None:
        """Write Chrome's JSON format, with times in microseconds since the first span.

        Args:
            path: name of the file.
        """
        first = min((start for _, start, *_ in self._events), default=0.0)
        numbers: dict[int, int] = {}
        events: list[dict[str, Any]] = []
        for name, start, end, thread, about in self._events:
            number = numbers.setdefault(thread, len(numbers))
            times = {"ts": (start - first) * 1e6, "dur": (end - start) * 1e6}
            events.append({"name": name, "ph": "X", "pid": self.rank, "tid": number, **times, "args": about})
        head = {"name": "process_name", "ph": "M", "pid": self.rank, "args": {"name": f"rank {self.rank}"}}
        Path(path).write_text(json.dumps({"traceEvents": [head, *events]}))


@contextlib.contextmanager
def bucket_span(timeline: Timeline | None, index: int, length: int) -> Iterator[trace.Recorder]:
    """Record the reduction of a bucket: for torch.profiler, on a timeline (if any), and by kind of work."""
    name = f"bucket {index}"
    with contextlib.ExitStack() as stack:
        if profiled():
            stack.enter_context(torch.profiler.record_function(f"sparsecoll: {name}"))
        if timeline is not None:
            stack.enter_context(timeline.span(name, values=length))
            stack.enter_context(trace.record(timeline))
        yield stack.enter_context(trace.record(trace.Recorder()))
