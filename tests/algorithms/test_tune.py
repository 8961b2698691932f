"""The costs by which `auto` decides: measured once, briefly, and not before a call is worth it; files of them."""

import importlib
import json
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from measuring import LONG, unmodelled

import sparsecoll
from sparsecoll import Allgather, Network, SparseVector, Tuning, simulate
from sparsecoll.algorithms.auto import costmodel
from sparsecoll.algorithms.auto.tune import tuning_of
from sparsecoll.cli.main import main
from sparsecoll.telemetry.traffic import Counts
from sparsecoll.transport.call import AGREEMENT_BYTES
from sparsecoll.transport.collectives import allgather
from sparsecoll.transport.network import Costs

tune = importlib.import_module("sparsecoll.algorithms.auto.tune")


def test_tune_measures_the_network_of_the_simulator():
    network = Network(alpha=30e-6, beta=2e-9)
    for P in (2, 5):
        results = simulate(P, sparsecoll.tune, network).results
        assert all(tuning == results[0] for tuning in results)
        assert results[0].alpha == pytest.approx(30e-6, rel=0.01) and results[0].beta == pytest.approx(2e-9, rel=0.01)
        assert results[0].overhead < 1e-7 and results[0].merge == results[0].code == 0
    assert simulate(1, sparsecoll.tune).results[0] == Tuning(0, 0, 0, 0, 0, 0, 0)


def test_the_simulator_knows_its_costs_and_runs_no_kernel_to_measure_them(monkeypatch):
    for name in ("_lower_quartile", "_kernels"):
        monkeypatch.setattr(tune, name, lambda *_: pytest.fail("measured"))

    def program(comm):
        y = sparsecoll.allreduce(comm, LONG, return_reduction=True)
        counted = sparsecoll.traffic(comm)
        return y.traffic.total.bytes_received == counted.total.bytes_received, counted.set_up

    assert simulate(3, program).results == [(True, Counts())] * 3
    costs = Costs(merge=1e-9, encode=2e-9, decode=3e-9, dense=4e-10, call=1e-6)
    assert simulate(2, lambda comm: tuning_of(comm.transport), costs=costs).results == [costs.tuning(Network())] * 2


def test_measuring_waits_for_a_call_that_is_worth_it_and_counts_in_no_total():
    def program(comm):
        unmodelled(comm)
        traffic, rows = sparsecoll.traffic(comm), []
        for x in (SparseVector([comm.rank], np.ones(1), 9), LONG, LONG):
            before = traffic.total.bytes_received
            y = sparsecoll.allreduce(comm, x, "auto", return_reduction=True)
            assert y.traffic.total.bytes_received == traffic.total.bytes_received - before
            assert traffic.total.bytes_received == sum(c.bytes_received for c in traffic.phases.values())
            rows.append(traffic.set_up.bytes_sent)
        return rows

    for before, measured, after in simulate(3, program).results:
        assert before == 0 < measured == after < 2e7


def test_the_kernels_that_are_measured_are_those_that_will_run(monkeypatch):
    started = []
    monkeypatch.setattr(tune, "host_kernels", lambda: started.append(True))
    tune._measured(sparsecoll.transport.LocalTransport(), tune.BRIEF)
    simulate(2, lambda comm: tuning_of(comm.transport))
    assert started == [True]


def test_a_measurement_survives_a_failed_call_and_is_agreed_on_again():
    def program(comm, forgetful):
        transport = unmodelled(comm)
        first, sent = tuning_of(transport), sparsecoll.traffic(comm).set_up.bytes_sent
        with pytest.raises(ValueError, match="finite"):
            sparsecoll.allreduce(comm, SparseVector([1], np.array([np.nan]), 9))
        if forgetful and comm.rank == 1:
            transport.measured = None
        second = tuning_of(transport)
        return first == second, sparsecoll.traffic(comm).set_up.bytes_sent - sent < 1000, second

    for forgetful in (False, True):
        rows = simulate(3, lambda comm, f=forgetful: program(comm, f)).results
        assert [row[1] for row in rows] == [not forgetful] * 3
        assert len({row[2] for row in rows}) == 1
        assert forgetful or all(row[0] for row in rows)


def test_one_rank_measures_nothing_and_a_hierarchy_does_so_once():
    def alone(comm):
        unmodelled(comm)
        sparsecoll.allreduce(comm, LONG)
        return sparsecoll.traffic(comm).set_up

    assert simulate(1, alone).results == [Counts()]

    def program(comm):
        unmodelled(comm)
        algorithm, sent = sparsecoll.Hierarchical(inner="auto"), []
        for _ in range(3):
            sparsecoll.allreduce(comm, LONG, algorithm)
            sent.append(sparsecoll.traffic(comm).set_up.bytes_sent)
        return sent

    for rank, sent in enumerate(simulate(4, program, ranks_per_node=2).results):
        assert sent[0] == sent[1] == sent[2] and (sent[0] > 0) == (rank % 2 == 0)


def test_saved_measurements(tmp_path, monkeypatch, capsys):
    path = tmp_path / "tuning.json"
    main(["tune", "--json", str(path)])
    assert "alpha" in capsys.readouterr().out
    tuning = json.loads(path.read_text())["tuning"]
    assert tuning["alpha"] == 0 and tuning["merge"] > 0  # one rank: nothing to send
    Tuning(alpha=1.0).save(path)
    monkeypatch.setenv("SPARSECOLL_TUNING", str(path))
    assert simulate(2, lambda comm: tuning_of(comm.transport).alpha).results == [1.0, 1.0]
    monkeypatch.setenv("SPARSECOLL_TUNING", str(tmp_path / "missing.json"))
    with pytest.raises(ValueError, match="rank 0: SPARSECOLL_TUNING: expected a file that `sparsecoll tune --save` wr"):
        simulate(2, lambda comm: sparsecoll.allreduce(comm, LONG))
    path.write_text(json.dumps({"alpha": 1, "gamma": 2}))
    with pytest.raises(ValueError, match="expected the numbers alpha, overhead, beta"):
        Tuning.load(path)


def test_the_file_of_costs_is_read_once_on_a_communicator_and_after_a_failure(tmp_path, monkeypatch):
    """All calls choose by the same costs, whatever happens to the environment between them."""
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    Tuning(alpha=1.0).save(first)
    Tuning(alpha=2.0).save(second)
    monkeypatch.setenv("SPARSECOLL_TUNING", str(first))

    def program(comm):
        found = [tuning_of(comm.transport).alpha]
        allgather(comm.transport, np.zeros(1))
        monkeypatch.setenv("SPARSECOLL_TUNING", str(second))
        found.append(tuning_of(comm.transport).alpha)
        with pytest.raises(ValueError, match="k: expected"):
            sparsecoll.allreduce(comm, LONG, k=-1)
        return [*found, tuning_of(comm.transport).alpha]

    assert simulate(2, program).results == [[1.0, 1.0, 2.0]] * 2


@pytest.mark.parametrize("others", [None, Tuning(alpha=2.0)])
@pytest.mark.parametrize("known", [False, True])
def test_costs_of_a_file_that_not_all_ranks_have_are_refused_on_all(others, known):
    """Ranks would choose other algorithms, and wait for messages of others."""
    rows = sparsecoll.RowSparse([1], np.ones((1, 2)), 9)
    both = sparsecoll.Hierarchical(inner="auto")

    def program(comm):
        own = others if comm.rank else Tuning(alpha=1.0)
        texts = []
        for x, algo, k in (
            (LONG, "auto", None),
            (LONG, "auto", 9),
            (LONG, "oktopk", 9),
            (LONG, both, 9),
            (rows, "auto", None),
        ):
            if known:
                comm.transport.saved_tuning = None
                sparsecoll.allreduce(comm, x, algo, k=k)
            comm.transport.saved_tuning = own
            with pytest.raises(sparsecoll.CommunicationError, match="SPARSECOLL_TUNING: expected the same") as caught:
                sparsecoll.allreduce(comm, x, algo, k=k)
            texts.append(str(caught.value))
        comm.transport.saved_tuning = own
        mine = Tuning(alpha=3.0)
        return texts, sparsecoll.allreduce(comm, LONG, sparsecoll.Auto(tuning=mine)).nnz

    results = simulate(3, program, ranks_per_node=2).results
    assert results == [results[0]] * 3
    assert all(
        f"on rank 0, {'nothing' if others is None else 'costs'}" in text.replace("'", "") for text in results[0][0]
    )


def test_whole_calls_contain_what_predictions_do(monkeypatch):
    """Timed calls repeat, without comparing arguments, which is a part of what is predicted."""
    monkeypatch.setattr(tune, "_call_seconds", lambda *_, **__: 0.25)
    tuning = Tuning(alpha=1e-2, call=1e-3)
    calls = simulate(4, lambda comm: tune._whole_calls(comm.transport, tuning)).results[0]
    compared = costmodel.agreement(4, tuning)
    assert compared >= 2e-2
    assert {round(took, 9) for rows in calls.values() for _, took in rows} == {round(0.25 + compared + 2e-3, 9)}


def test_the_short_call_that_is_timed_has_entries_and_sends_them_with_the_arguments(monkeypatch):
    """As a call of `allreduce` does: a call without entries, or with another round for them, takes another time."""
    sent, early = [], Allgather.early

    def noted(self, channel, x):
        message = early(self, channel, x)
        sent.append((x.nnz, message.size, bool(channel.gathered)))
        return message

    monkeypatch.setattr(Allgather, "early", noted)

    def program(comm):
        tune._fixed(comm.transport, Tuning())
        return comm.transport.traffic

    rank = simulate(3, program).results[0]
    assert all(entries >= tune.SHORT_ENTRIES / 2 and size > AGREEMENT_BYTES for entries, size, _ in sent)
    assert len(sent) == 3 * (tune.SHORT_TURNS + 2) and not any(gathered for *_, gathered in sent)
    assert "gather" in rank.phases and "agree" not in rank.phases


def test_vectors_that_are_timed_have_nearly_the_entries_asked_for():
    for entries, length in ((16, 1 << 14), (1 << 13, 100 << 13), (1 << 14, 1 << 18), (1, 1 << 14)):
        x = tune._uniform(entries, length)
        assert 0.5 * entries < x.nnz <= entries or entries == 1
        assert x.nnz == 0 or ((np.diff(x.indices) > 0).all() and x.indices[-1] < length)


def test_set_up_is_in_no_phase_and_no_total():
    def program(comm):
        transport = comm.transport
        with transport.phase("outer"), transport.set_up(), transport.phase("inner"):
            allgather(transport, np.zeros(1))
        with transport.phase("inner"):
            allgather(transport, np.zeros(1))
        traffic = transport.traffic
        assert str(traffic).splitlines()[-1].split()[:4] == ["set-up", "8", "8", "1"]
        counts = [traffic.phases[name].bytes_sent for name in ("outer", "inner")]
        return *counts, traffic.total.bytes_sent, traffic.set_up.bytes_sent, traffic.copy().set_up == traffic.set_up

    assert simulate(2, program).results == [(0, 8, 8, 8, True)] * 2


def test_sharing_is_measured_and_the_same_on_all_ranks(monkeypatch):
    """The processor time of rank r is 1 / (r + 2) of the time that passes; that of all ranks together counts."""
    own = threading.local()

    def passed():
        own.now += 1e-3
        return own.now

    monkeypatch.setattr(
        tune, "time", SimpleNamespace(perf_counter=passed, thread_time=lambda: own.now / (own.rank + 2))
    )

    def program(comm):
        own.now, own.rank = 0.0, comm.rank
        return tune._sharing(comm.transport, lambda: None)

    assert simulate(3, program).results == [pytest.approx(3 / (1 / 2 + 1 / 3 + 1 / 4))] * 3
    assert simulate(1, program).results == [1.0]


def test_the_processor_time_of_a_message_is_that_of_all_turns_by_their_bytes(monkeypatch):
    own = threading.local()

    def used():
        own.calls = getattr(own, "calls", 0) + 1
        return 3.0 * own.calls

    monkeypatch.setattr(tune, "time", SimpleNamespace(thread_time=used))
    effort = replace(tune.BRIEF, warm=1, repeats=3)
    network = Network(alpha=0.5, beta=1e-3)
    found = simulate(3, lambda comm: tune._long_ring(comm.transport, effort, 1000), network).results
    assert found == [pytest.approx([1.5, 3.0 / 4 / 1000])] * 3


def test_calls_of_a_few_lengths_correct_all_predictions_of_about_that_length(monkeypatch):
    """Brief: allgather alone is timed, for all choices that send entries; far longer calls are not corrected."""
    timed = []

    def twice(transport, tuning, name, shape, seconds):
        timed.append((name, shape, seconds))
        late = len(timed) == len(tune.BRIEF_CALLS)  # which takes longer than the first one of its shape
        return (3 if late else 2) * costmodel.seconds(shape, tuning)[name]

    monkeypatch.setattr(tune, "_whole", twice)
    tuning = Tuning(alpha=1e-5, beta=1e-9, call=1e-5)
    calls = simulate(1, lambda comm: tune._brief_calls(comm.transport, tuning)).results[0]
    assert calls.keys() == costmodel.CHOICES.keys() - {"dense", "native"}
    assert {(name, seconds) for name, _, seconds in timed} == {("allgather", tune.BRIEF_SECONDS)}
    assert timed[0] == timed[2] != timed[1] and len(timed) == len(tune.BRIEF_CALLS)
    corrected = replace(tuning, calls=calls)
    far = costmodel.Shape(1 << 28, 1 << 26, 1, 4, 1 << 28)
    for shape, off in [(timed[0][1], 2), (timed[1][1], 2), (costmodel.Shape(1 << 14, 1, 1, 4, 1 << 14), 1), (far, 1)]:
        before, after = costmodel.seconds(shape, tuning), costmodel.seconds(shape, corrected)
        assert all(after[name] == pytest.approx(off * before[name], rel=1e-3) for name in calls)
        assert after["dense"] == before["dense"]


def test_calls_that_would_take_long_are_not_timed(monkeypatch):
    monkeypatch.setattr(tune, "_whole", lambda *_, **__: pytest.fail("timed"))
    slow = Tuning(alpha=1e-2, beta=1e-6)
    calls = simulate(4, lambda comm: tune._brief_calls(comm.transport, slow)).results[0]
    assert all(Tuning(calls=calls).corrected("allgather", seconds) == seconds for seconds in (1e-3, 1.0, 100.0))


@pytest.mark.parametrize(
    ("first", "long", "beta"), [(5e-4, [8e-3, 4e-3, 5e-3], 5e-3), (2e-3, [40e-3], 40e-3), (0.5, [], 0.5)]
)
def test_the_bandwidth_of_a_fast_link_is_measured_three_times_and_that_of_a_slow_one_with_shorter_messages(
    monkeypatch, first, long, beta
):
    """The longer messages are 16 times as long; between machines only."""
    own = threading.local()

    def ring(transport, effort, size):
        own.took = getattr(own, "took", iter([first, *long]))
        sizes.append(size)
        return [next(own.took), 0.0]

    sizes: list[int] = []
    monkeypatch.setattr(tune, "_long_ring", ring)
    monkeypatch.setattr(tune, "_fixed", lambda *_: 0.0)
    monkeypatch.setattr(tune, "_sharing", lambda *_: 1.0)

    def program(comm):
        transport = unmodelled(comm)
        transport.virtual = False
        return tune._measured(transport, tune.BRIEF).beta

    size = tune.LONG_BETWEEN_NODES if long else tune.BRIEF.large
    assert simulate(2, program, Network(alpha=0.0, beta=0.0)).results == [pytest.approx(beta / size, rel=0.01)] * 2
    assert sorted(sizes) == sorted([tune.BRIEF.large, *[tune.LONG_BETWEEN_NODES] * len(long)] * 2)
