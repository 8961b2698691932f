"""Auto: nearly as fast as the best single choice, never much slower than dense; the same bits in every repetition;
measured at most once, briefly, and not before a call is worth it."""

import importlib
import json
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from cases import same_bits, support

import sparsecoll
from sparsecoll import Allgather, Auto, Dense, DenseStream, Network, SparCML, SparseVector, Tuning, simulate
from sparsecoll.algorithms.auto import costmodel, overlap
from sparsecoll.algorithms.auto.auto import SAMPLING_RATIO
from sparsecoll.algorithms.auto.tune import tuning_of
from sparsecoll.algorithms.primitives import estimates
from sparsecoll.cli.main import main
from sparsecoll.telemetry.traffic import Counts
from sparsecoll.transport.call import AGREEMENT_BYTES
from sparsecoll.transport.collectives import allgather
from sparsecoll.transport.network import Costs

module, tune = (importlib.import_module(f"sparsecoll.algorithms.auto.{name}") for name in ("auto", "tune"))

CHOICES = {
    "dense": Dense,
    "allgather": Allgather,
    "recursive doubling": lambda: SparCML(variant="recursive_double"),
    "split and gather": lambda: SparCML(variant="split_allgather"),
    "dynamic": lambda: SparCML(variant="dynamic"),
    "densestream": DenseStream,
    "densestream, even": lambda: DenseStream(repartition="even"),
    "densestream, histogram": lambda: DenseStream(repartition="histogram"),
}
NETWORKS = {"1 Gb/s": Network(50e-6, 8e-9), "100 Gb/s": Network(2e-6, 8e-11)}
N = 60_000
GRID = [(name, density) for name in ("random", "same") for density in (0.0005, 0.01, 0.1, 0.4)]
GRID += [("skewed", density) for density in (0.0005, 0.01, 0.1)]  # it has no room for more


def seconds(make, name, P, density, network):
    """Modelled time of the second call of an object."""
    k = round(N * density)

    def program(comm):
        indices = support(name, comm.rank, P, k, np.random.default_rng([comm.rank, 1]), N)
        x, algorithm = SparseVector(indices, np.ones(indices.size, np.float32), N), make()
        sparsecoll.allreduce(comm, x, algorithm)
        allgather(comm.transport, np.zeros(1))
        start = comm.transport.now()
        sparsecoll.allreduce(comm, x, algorithm)
        return start, comm.transport.now()

    times = simulate(P, program, network).results
    return max(end for _, end in times) - max(start for start, _ in times)


@pytest.mark.parametrize(
    ("network", "name", "density", "P"),
    [(network, *point, (2, 12, 3)[(i + j) % 3]) for j, network in enumerate(NETWORKS) for i, point in enumerate(GRID)],
)
def test_at_most_10_percent_slower_than_the_best_and_than_dense(network, name, density, P):
    """Where a call is too short to look how supports overlap, and they do, at most 40 %."""
    times = {choice: seconds(make, name, P, density, NETWORKS[network]) for choice, make in CHOICES.items()}
    looking = overlap.seconds(P, 0, Costs().tuning(NETWORKS[network]))  # computation takes no time here
    short = name != "random" and min(times.values()) < 2 * SAMPLING_RATIO * looking
    assert seconds(Auto, name, P, density, NETWORKS[network]) <= (1.4 if short else 1.1) * min(times.values()), times


def test_tune_measures_the_network_of_the_simulator():
    network = Network(alpha=30e-6, beta=2e-9)
    for P in (2, 5):
        results = simulate(P, sparsecoll.tune, network).results
        assert all(tuning == results[0] for tuning in results)
        assert results[0].alpha == pytest.approx(30e-6, rel=0.01) and results[0].beta == pytest.approx(2e-9, rel=0.01)
        assert results[0].overhead < 1e-7 and results[0].merge == results[0].code == 0
    assert simulate(1, sparsecoll.tune).results[0] == Tuning(0, 0, 0, 0, 0, 0, 0)


def unmodelled(comm):
    """A virtual rank's transport that has to measure like a real one."""
    comm.transport.modelled = lambda: None
    return comm.transport


LONG = SparseVector(np.arange(0, 4_000_000, 20), np.ones(200_000, np.float32), 4_000_000)  # worth measuring for


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


@pytest.mark.parametrize("make", [lambda: "auto", Auto])
@pytest.mark.parametrize("name", ["same", "random", "skewed"])
def test_every_repetition_gives_the_same_bits(name, make):
    """Of random floats, whatever other calls come between, measuring among them."""
    n, P = 30_000, 8

    def program(comm):
        unmodelled(comm)
        algo, results = make(), []
        rng = np.random.default_rng([comm.rank, 5])
        inputs = [
            SparseVector(indices, rng.standard_normal(indices.size).astype(np.float32), n)
            for indices in (support(name, comm.rank, P, k, rng, n) for k in (20, 300, 3000))
        ]
        for turn in range(3):
            results.append([sparsecoll.allreduce(comm, x, algo) for x in inputs])
            sparsecoll.allreduce(comm, LONG if turn == 0 else 2 * inputs[2], algo)
        return results

    for first, *others in simulate(P, program).results:
        assert all(same_bits(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(("k", "P"), [(1000, 2), (1000, 3), (1000, 8), (1000, 64), (100_000, 3), (100_000, 8)])
def test_the_sample_tells_overlap_and_skew(k, P):
    n = 40 * k if P < 64 else 400 * k  # disjoint supports must find room

    def program(comm, name):
        indices = support(name, comm.rank, P, k, np.random.default_rng([comm.rank, 3]), n)
        return overlap.estimate(comm.transport, SparseVector(indices, np.ones(indices.size, np.float32), n), k), indices

    for name in ("same", "random", "disjoint", "one_region"):
        results = simulate(P, lambda comm, m=name: program(comm, m)).results
        assert all(estimate == results[0][0] for estimate, _ in results)
        union = np.unique(np.concatenate([indices for _, indices in results])).size
        effective_length, skew = results[0][0]
        expected = estimates.fill_in(int(effective_length), k, P)
        assert expected == pytest.approx(union, rel=0.25) or union > estimates.fill_in(n, k, P)
        assert (skew > P / 2) == (name == "one_region") or P == 2


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


@pytest.mark.parametrize("P", [1, 2, 3, 8])
@pytest.mark.parametrize("density", [0.0005, 0.02, 0.3])
def test_top_k_of_the_sum(P, density):
    """Equal to Ok-Topk with exact thresholds, whatever is chosen."""
    k = round(density * 4000)

    def program(comm, algorithm):
        x = np.random.default_rng(comm.rank).integers(-500, 500, 4000).astype(np.float32)
        y = sparsecoll.allreduce(comm, x, algorithm(), k=k, return_reduction=True)
        return y.value.to_dense(), y.contributed.to_dense()

    mine = simulate(P, lambda comm: program(comm, lambda: Auto(want="top_k_of_sum"))).results
    theirs = simulate(P, lambda comm: program(comm, lambda: sparsecoll.OkTopk(exact=True))).results
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_array_equal(a[0], b[0])
        np.testing.assert_array_equal(a[1], b[1])


def test_an_object_keeps_its_choices_and_saves_them():
    """A second input of the same size goes the way of the first, also after a restart from a checkpoint."""

    def program(comm):
        auto, restored, rng = Auto(), Auto(), np.random.default_rng(comm.rank)
        same = SparseVector(np.arange(0, 200_000, 2), rng.standard_normal(100_000), 1_000_000)
        other = SparseVector(np.arange(comm.rank, 10**6, 10), rng.standard_normal(100_000), 10**6)
        phases = [set(sparsecoll.allreduce(comm, x, auto, return_reduction=True).traffic.phases) for x in (same, other)]
        restored.load_state_dict(json.loads(json.dumps(auto.state_dict())))
        again = sparsecoll.allreduce(comm, other, restored, return_reduction=True)
        fresh = sparsecoll.allreduce(comm, other, "auto", return_reduction=True)
        kept = sparsecoll.allreduce(comm, other, auto)
        return phases, same_bits(kept, again.value), "overlap" in again.traffic.phases, set(fresh.traffic.phases)

    (first, second), same, looked, fresh = simulate(4, program).results[0]
    assert "overlap" in first and "overlap" not in second and same and not looked
    assert fresh - {"overlap"} != first - {"overlap", "agree"}


def test_entries_go_with_the_arguments_once_allgather_was_chosen():
    """In the first call, complete overlap would have made another choice faster."""

    def program(comm):
        auto, results = Auto(), []
        for length in (30_000, 30_000, 20_000 + 10_000 * (comm.rank == 1)):  # one rank alone has a known number
            x = SparseVector(np.arange(comm.rank, 30 * length, 30), np.full(length, 0.1 * comm.rank), 10**6)
            y = sparsecoll.allreduce(comm, x, auto, return_reduction=True)
            same = same_bits(y.value, sparsecoll.allreduce(comm, x, "allgather"))
            results.append((same, set(y.traffic.phases)))
        return results

    for results in simulate(5, program).results:
        assert results[0] == (True, {"agree", "overlap", "gather"})
        assert results[1] == (True, {"gather"})
        assert results[2][0] and "gather" in results[2][1] - {"overlap"}


def test_a_rank_with_a_little_fewer_entries_sends_them_with_the_arguments_too():
    """Choices are kept for k to within 3 %, and the entries of some ranks are beyond that."""

    def program(comm):
        auto, phases = Auto(), []
        for length in (30_000, 30_000 - 500 * (comm.rank % 2)):
            x = SparseVector(np.arange(comm.rank, 30 * length, 30), np.ones(length), 10**6)
            phases.append(set(sparsecoll.allreduce(comm, x, auto, return_reduction=True).traffic.phases))
        return phases

    assert module._rounded(30_000) != module._rounded(29_500)
    for first, second in simulate(5, program).results:
        assert "overlap" in first and second == {"gather"}


@pytest.mark.parametrize(("length", "skew", "differ"), [(0.95, 1.05, False), (0.5, 1.0, True), (1.0, 1.5, True)])
def test_a_sample_that_looks_uniform_is_taken_for_uniform(length, skew, differ, monkeypatch):
    shapes = []
    monkeypatch.setattr(overlap, "estimate", lambda _, x, k: (length * x.length, skew))
    monkeypatch.setattr(Auto, "predictions", lambda self, shape, _: shapes.append(shape) or {"allgather": 1.0})
    simulate(2, lambda comm: sparsecoll.allreduce(comm, LONG, k=100_000))
    assert any((s.effective_length, s.skew) != (s.n, 1.0) for s in shapes) == differ


def test_bad_option():
    with pytest.raises(ValueError, match="want: expected one of exact_sum, top_k_of_sum, got 'all'"):
        Auto(want="all")


def test_whole_calls_contain_what_predictions_do(monkeypatch):
    """Timed calls repeat, without comparing arguments, which is a part of what is predicted."""
    monkeypatch.setattr(tune, "_call_seconds", lambda *_: 0.25)
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


@pytest.mark.parametrize("P", [1, 3])
def test_dense_sums_are_the_librarys_own_without_mpi(P):
    def program(comm, algo):
        return sparsecoll.allreduce(comm, SparseVector([comm.rank, 5], np.array([-1.0, 0.5]), 8), algo)

    mine, theirs = (simulate(P, lambda comm, a=a: program(comm, a)).results[0] for a in (Dense(native=True), Dense()))
    assert same_bits(mine, theirs)


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


@pytest.mark.parametrize("limit", [{"density": 1.0}, {"density": 0.1}, {"k": 2**70}])
def test_a_limit_far_above_the_entries_is_not_taken_for_their_number(limit):
    def program(comm):
        x = SparseVector([comm.rank, 2**61], np.ones(2), 2**62)
        sums = [sparsecoll.allreduce(comm, x, **limit), sparsecoll.allreduce_init(comm, x, **limit)(x)]
        return [y.values.tolist() for y in sums]

    assert sparsecoll.simulate(3, program).results == [[[1.0, 1.0, 1.0, 3.0]] * 2] * 3
