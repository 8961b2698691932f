"""Counters of traffic in Prometheus's registry add up to `sparsecoll.traffic`."""

from itertools import pairwise

import numpy as np
import pytest

import sparsecoll
from sparsecoll import SparseVector, simulate, traffic
from sparsecoll.telemetry.metrics import COUNTERS, Collector

prometheus_client = pytest.importorskip("prometheus_client")


def exported(registry):
    """Name -> labels -> value of all samples."""
    found = {}
    for family in registry.collect():
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def calls(comm):
    x = SparseVector([comm.rank, 7], np.ones(2), 10)
    sparsecoll.allreduce(comm, x, "oktopk")
    sparsecoll.allreduce(comm, x, sparsecoll.OkTopk())
    sparsecoll.allreduce(comm, x, "dense")
    sparsecoll.alltoallv(comm, {0: x})
    sparsecoll.iallreduce(comm, x, "allgather").wait()


def test_they_add_up_to_the_traffic():
    def program(comm):
        counters, registry = traffic(comm), prometheus_client.CollectorRegistry()
        registry.register(Collector(world=counters))
        calls(comm)
        return exported(registry), counters.copy()

    for found, counters in simulate(3, program).results:
        assert set(found) == {f"{name}_total" for name, _ in COUNTERS.values()} | {"sparsecoll_calls_total"}
        for field, (name, _) in COUNTERS.items():
            assert sum(found[f"{name}_total"].values()) == pytest.approx(getattr(counters.total, field))
            for phase, counts in counters.phases.items():
                shown = sum(value for labels, value in found[f"{name}_total"].items() if labels[2] == phase)
                assert shown == pytest.approx(getattr(counts, field))
        algorithms = {"oktopk": 2, "dense": 1, "alltoallv": 1, "allgather": 1}
        assert found["sparsecoll_calls_total"] == {("world", name): count for name, count in algorithms.items()}
        assert found["sparsecoll_sent_bytes_total"]["world", "oktopk", "split"] > 0


def test_they_never_fall():
    """Also when counters are reset, and on two communicators."""

    def program(comm):
        other, registry = comm.Dup(), prometheus_client.CollectorRegistry()
        registry.register(Collector(world=traffic(comm), other=traffic(other)))
        states = [exported(registry)]
        for chosen in (comm, other, comm):
            calls(chosen)
            states.append(exported(registry))
            traffic(chosen).reset()
        return states

    for states in simulate(2, program).results:
        for before, after in pairwise(states):
            for name, samples in before.items():
                assert all(after[name][labels] >= value for labels, value in samples.items())
        sent = [state.get("sparsecoll_sent_bytes_total", {}) for state in states]
        world = [sum(value for labels, value in state.items() if labels[0] == "world") for state in sent]
        assert world[0] == 0 < world[1] == world[2] < world[3] <= 2 * world[1]


def test_the_text_that_prometheus_reads():
    def program(comm):
        registry = prometheus_client.CollectorRegistry()
        registry.register(Collector(world=traffic(comm)))
        sparsecoll.allreduce(comm, SparseVector([comm.rank], [1.0], 4), "allgather")
        return prometheus_client.generate_latest(registry).decode()

    text = simulate(2, program).results[0]
    line = 'sparsecoll_calls_total{algorithm="allgather",communicator="world"} 1.0'
    assert line in text and "# TYPE sparsecoll_sent_bytes_total counter" in text
