"""Auto: nearly as fast as the best single choice, never much slower than dense; measured once, saved, agreed on."""

import json

import numpy as np
import pytest
from cases import support

import sparsecoll
from sparsecoll import Allgather, Auto, Dense, DenseStream, Network, SparCML, SparseVector, Tuning, model, simulate
from sparsecoll.__main__ import main
from sparsecoll.transport.collectives import allgather
from sparsecoll.tune import tuning_of

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
        places = support(name, comm.rank, P, k, np.random.default_rng([comm.rank, 1]), N)
        x, algorithm = SparseVector(places, np.ones(places.size, np.float32), N), make()
        sparsecoll.allreduce(comm, x, algorithm)
        allgather(comm.transport, np.zeros(1))
        start = comm.transport.now()
        sparsecoll.allreduce(comm, x, algorithm)
        return start, comm.transport.now()

    times = simulate(P, program, network).results
    return max(end for _, end in times) - max(start for start, _ in times)


@pytest.mark.parametrize("P", [2, 3, 12])
@pytest.mark.parametrize(("name", "density"), GRID)
@pytest.mark.parametrize("network", NETWORKS)
def test_at_most_10_percent_slower_than_the_best_and_than_dense(network, name, density, P):
    times = {choice: seconds(make, name, P, density, NETWORKS[network]) for choice, make in CHOICES.items()}
    assert seconds(Auto, name, P, density, NETWORKS[network]) <= 1.1 * min(times.values()), times


def test_tune_measures_the_network_of_the_simulator():
    network = Network(alpha=30e-6, beta=2e-9)
    for P in (2, 5):
        results = simulate(P, sparsecoll.tune, network).results
        assert all(tuning == results[0] for tuning in results)
        assert results[0].alpha == pytest.approx(30e-6, rel=0.01) and results[0].beta == pytest.approx(2e-9, rel=0.01)
        assert results[0].overhead < 1e-7 and results[0].merge == results[0].code == 0
    assert simulate(1, sparsecoll.tune).results[0] == Tuning(0, 0, 0, 0, 0, 0, 0)


def test_a_communicator_is_measured_once():
    def program(comm):
        x = SparseVector([comm.rank], np.ones(1), 9)
        rows = [sparsecoll.allreduce(comm, x, "auto", return_reduction=True).traffic.phases for _ in range(2)]
        return ["tune" in phases for phases in rows]

    assert simulate(3, program).results == [[True, False]] * 3


def test_saved_measurements(tmp_path, monkeypatch, capsys):
    path = tmp_path / "tuning.json"
    main(["tune", "--save", str(path)])
    assert "alpha" in capsys.readouterr().out
    tuning = Tuning.load(path)
    assert tuning.alpha == 0 and tuning.merge > 0  # one rank: nothing to send
    Tuning(alpha=1.0).save(path)
    monkeypatch.setenv("SPARSECOLL_TUNING", str(path))
    assert simulate(2, lambda comm: tuning_of(comm.transport).alpha).results == [1.0, 1.0]
    path.write_text(json.dumps({"alpha": 1, "gamma": 2}))
    with pytest.raises(ValueError, match="expected the numbers alpha, overhead, beta"):
        Tuning.load(path)


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


def test_overlap_and_skew_are_learned():
    def program(comm):
        auto, places = Auto(), np.arange(0, 2000, 2)
        x = SparseVector(places, np.ones(places.size, np.float32), 100_000)
        sparsecoll.allreduce(comm, x, auto)
        state, other = auto.state_dict(), Auto()
        other.load_state_dict(state)
        return auto._reach, auto._skew, other.state_dict() == state

    reach, skew, same = simulate(4, program).results[0]
    assert reach == pytest.approx(0.01, rel=0.01) and skew == 4.0 and same


def test_reach_inverts_fill_in():
    for n, k, P in ((10**6, 1000, 8), (10**6, 200_000, 4), (5000, 100, 64)):
        for support_size in (k, 2 * k, n):
            total = model.fill_in(support_size, k, P)
            assert model.reach(n, k, P, round(total)) == pytest.approx(support_size, rel=0.1)


def test_bad_option():
    with pytest.raises(ValueError, match="want: expected one of exact_sum, top_k_of_sum, got 'all'"):
        Auto(want="all")


def test_predictions_are_corrected_by_whole_calls(tmp_path):
    """Times measured over predicted at a call's length, log-linear between two, as at the ends beyond them."""
    tuning = Tuning(calls={"dense": [(1e-3, 2e-3), (1e-1, 8e-1)]})
    for seconds, factor in ((1e-3, 2), (1e-2, 4), (1e-1, 8), (1e-6, 2), (10.0, 8)):
        assert tuning.corrected("dense", seconds) == pytest.approx(factor * seconds)
        assert tuning.corrected("allgather", seconds) == seconds
    tuning.save(tmp_path / "tuning.json")
    assert Tuning.load(tmp_path / "tuning.json") == tuning


def test_a_whole_phase_counts_what_phases_inside_send():
    def program(comm):
        transport = comm.transport
        with transport.phase("outer", whole=True), transport.phase("inner"):
            allgather(transport, np.zeros(1))
        with transport.phase("inner"):
            allgather(transport, np.zeros(1))
        phases = transport.traffic.phases
        return phases["outer"].bytes_sent, phases["inner"].bytes_sent, transport.traffic.bytes_sent

    assert simulate(2, program).results == [(8, 8, 16)] * 2
