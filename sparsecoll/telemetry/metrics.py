"""Hands counters of traffic to Prometheus, and so to whatever reads its format, such as OpenTelemetry's collector."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from sparsecoll.telemetry.traffic import Counts, Traffic

COUNTERS = {  # by field of Counts: the name before _total, and what is counted
    "bytes_sent": ("sparsecoll_sent_bytes", "Bytes sent to other ranks"),
    "bytes_received": ("sparsecoll_received_bytes", "Bytes received from other ranks"),
    "messages_sent": ("sparsecoll_sent_messages", "Messages sent to other ranks"),
    "messages_received": ("sparsecoll_received_messages", "Messages received from other ranks"),
    "seconds": ("sparsecoll_seconds", "Seconds in collective calls"),
}


class Collector:
    """Counts the calls on communicators from now on, by algorithm and phase, and yields them to a registry.

    `prometheus_client.REGISTRY.register(Collector(world=sparsecoll.traffic(comm)))` exports
    `sparsecoll_sent_bytes_total{communicator="world", algorithm="oktopk", phase="split"}`, likewise `received_bytes`,
    `sent_messages`, `received_messages` and `seconds`, and `sparsecoll_calls_total` without a phase. A call counts when
    it has ended. The algorithm of a call that has none is the name of the call; the phase is "" outside of phases.
    Needs `pip install '.[metrics]'`.

    Args:
        traffic: counters of communicators by the label `communicator`, each in one Collector at most.
    """

    def __init__(self, **traffic: Traffic) -> None:
        self._counts: dict[tuple[str, str, str], Counts] = {}
        self._calls: dict[tuple[str, str], int] = {}
        self._ahead: dict[str, float] = {}  # seconds of phases that the total lacks, by communicator
        self._seen = {name: (counters.total, counters.copy()) for name, counters in traffic.items()}
        for name, counters in traffic.items():
            counters.observer = partial(self._count, name, counters)

    def _count(self, name: str, traffic: Traffic, algorithm: str) -> None:
        total, earlier = self._seen[name]
        moved = traffic.since(earlier if total is traffic.total else Traffic())  # which was reset
        self._seen[name] = traffic.total, traffic.copy()
        rest = Counts() - moved.total
        for phase, counts in moved.phases.items():
            rest += counts
            self._counts[name, algorithm, phase] = self._counts.get((name, algorithm, phase), Counts()) + counts
        rest.seconds += self._ahead.get(name, 0.0)
        self._ahead[name] = max(rest.seconds, 0.0)  # those of phases, while a call around this one has not ended
        rest.seconds = min(rest.seconds, 0.0)
        self._counts[name, algorithm, ""] = self._counts.get((name, algorithm, ""), Counts()) - rest
        self._calls[name, algorithm] = self._calls.get((name, algorithm), 0) + 1

    def collect(self) -> Iterator[Any]:
        """Yield the counters as prometheus_client's CounterMetricFamily."""
        from prometheus_client.core import CounterMetricFamily

        for field, about in COUNTERS.items():
            family = CounterMetricFamily(*about, labels=("communicator", "algorithm", "phase"))
            for labels, counts in self._counts.copy().items():
                family.add_metric(labels, getattr(counts, field))
            yield family
        family = CounterMetricFamily("sparsecoll_calls", "Collective calls", labels=("communicator", "algorithm"))
        for key, calls in self._calls.copy().items():
            family.add_metric(key, calls)
        yield family
