"""Auto: nearly as fast as the best single choice, never much slower than dense; the same bits in every repetition."""

import importlib
import json

import numpy as np
import pytest
from cases import same_bits, support
from measuring import LONG, unmodelled

import sparsecoll
from sparsecoll import Allgather, Auto, Dense, DenseStream, Network, SparCML, SparseVector, simulate
from sparsecoll.algorithms.auto import overlap
from sparsecoll.algorithms.auto.auto import SAMPLING_RATIO
from sparsecoll.algorithms.primitives import estimates
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


@pytest.mark.parametrize("P", [1, 3])
def test_dense_sums_are_the_librarys_own_without_mpi(P):
    def program(comm, algo):
        return sparsecoll.allreduce(comm, SparseVector([comm.rank, 5], np.array([-1.0, 0.5]), 8), algo)

    mine, theirs = (simulate(P, lambda comm, a=a: program(comm, a)).results[0] for a in (Dense(native=True), Dense()))
    assert same_bits(mine, theirs)


@pytest.mark.parametrize("limit", [{"density": 1.0}, {"density": 0.1}, {"k": 2**70}])
def test_a_limit_far_above_the_entries_is_not_taken_for_their_number(limit):
    def program(comm):
        x = SparseVector([comm.rank, 2**61], np.ones(2), 2**62)
        sums = [sparsecoll.allreduce(comm, x, **limit), sparsecoll.allreduce_init(comm, x, **limit)(x)]
        return [y.values.tolist() for y in sums]

    assert sparsecoll.simulate(3, program).results == [[[1.0, 1.0, 1.0, 3.0]] * 2] * 3
