"""Auto: nearly as fast as the best single choice, never much slower than dense; a pure function of the call."""

import json

import numpy as np
import pytest
from cases import same_bits, support

import sparsecoll
from sparsecoll import Allgather, Auto, Costs, Dense, DenseStream, Network, SparCML, SparseVector, select, simulate
from sparsecoll.algorithms.auto.costmodel import ALL, CHOICES, fastest
from sparsecoll.telemetry.traffic import Counts
from sparsecoll.transport.all_ranks import allgather
from sparsecoll.transport.network import BETWEEN_NODES, ONE_NODE

ALONE = {
    "dense": Dense,
    "allgather": Allgather,
    "recursive doubling": lambda: SparCML(variant="recursive_double"),
    "split and gather": lambda: SparCML(variant="split_allgather"),
    "dynamic": lambda: SparCML(variant="dynamic"),
    "densestream": DenseStream,
    "densestream, even": lambda: DenseStream(repartition="even"),
    "densestream, histogram": lambda: DenseStream(repartition="histogram"),
}
NETWORKS = {"1 Gb/s": Network(50e-6, 8e-9), "10 Gb/s": Network(20e-6, 8e-10)}
COSTS = Costs(
    encode=3e-9, decode=1.8e-9, merge=7e-9, dense_merge=1.8e-9, dense_merge_span=2e-10, dense=2e-10, call=1e-4
)
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

    times = simulate(P, program, network, costs=COSTS).results
    return max(end for _, end in times) - max(start for start, _ in times)


@pytest.mark.parametrize(
    ("network", "name", "density", "P"),
    [(network, *point, (2, 12, 3)[(i + j) % 3]) for j, network in enumerate(NETWORKS) for i, point in enumerate(GRID)],
)
def test_at_most_10_percent_slower_than_the_best_and_than_dense(network, name, density, P):
    """For the uniform supports that it assumes; otherwise at most 50 %."""
    times = {choice: seconds(make, name, P, density, NETWORKS[network]) for choice, make in ALONE.items()}
    found = seconds(Auto, name, P, density, NETWORKS[network])
    assert found <= (1.1 if name == "random" else 1.5) * min(times.values()), times


@pytest.mark.parametrize("make", [lambda: "auto", Auto])
@pytest.mark.parametrize(("name", "P"), [("same", 8), ("random", 8), ("skewed", 3), ("random", 16), ("same", 70)])
def test_every_repetition_and_every_run_gives_the_same_bits(name, P, make):
    """Of random floats, whatever other calls come between."""
    n = 30_000

    def program(comm):
        algo, results = make(), []
        rng = np.random.default_rng([comm.rank, 5])
        inputs = [
            SparseVector(indices, rng.standard_normal(indices.size).astype(np.float32), n)
            for indices in (support(name, comm.rank, P, k, rng, n) for k in (20, 300, 3000))
        ]
        for _ in range(2):
            results.append([sparsecoll.allreduce(comm, x, algo) for x in inputs])
            sparsecoll.allreduce(comm, 2 * inputs[2], algo)
        return results

    (first, again), *_ = simulate(P, program).results
    other = simulate(P, program).results[-1][0]
    assert all(same_bits(a, b) and same_bits(a, c) for a, b, c in zip(first, again, other, strict=True))


@pytest.mark.parametrize(
    ("n", "k", "name"), [(9, 1, "allgather"), (10**6, 500_000, "dynamic"), (10**5, 90_000, "dense")]
)
@pytest.mark.parametrize("limit", [False, True])
def test_nothing_is_sent_beyond_the_sum_and_the_agreement(n, k, name, limit):
    """The first call counts what the algorithm by its name does, in the format that takes the least time."""
    form = sparsecoll.formats.AutoFormat(beta=BETWEEN_NODES.beta)

    def program(comm, algo, **options):
        x = SparseVector(np.arange(k), np.full(k, 0.5, np.float32), n)
        sparsecoll.allreduce(comm, x, algo, k=k if limit else None, **options)
        return sparsecoll.traffic(comm)

    named = simulate(4, lambda comm: program(comm, CHOICES[name](), format=form)).results
    for mine, theirs in zip(simulate(4, lambda comm: program(comm, "auto")).results, named, strict=True):
        if not limit:  # the numbers of entries go with the arguments
            for traffic in (mine, theirs):
                compared = traffic.phases.pop("agree", Counts())
                traffic.total.bytes_sent -= compared.bytes_sent
                assert compared.bytes_sent <= 3 * (16 + 8)
        assert mine.total.bytes_sent == theirs.total.bytes_sent and mine.phases.keys() == theirs.phases.keys()
        assert mine.set_up == theirs.set_up == Counts()


def test_the_choice_follows_the_network():
    slow, fast = Network(50e-6, 8e-9), Network(1e-3, 8e-11)
    assert [fastest(10**6, 10**5, 8, 4, False, network) for network in (slow, fast)] == ["dynamic", "dense"]
    assert {fastest(10**7, k, 2, 4, True, ONE_NODE) for k in (10, 10**4, 10**6)} == {"allgather"}
    assert fastest(10**5, 50, 256, 4, False, slow) == "recursive_double"
    assert fastest(10**7, 10**5, 16, 4, False, slow, ALL) == "oktopk"

    def program(comm, network):
        x = SparseVector(np.arange(0, 10**6, 10) + comm.rank, np.ones(10**5, np.float32), 10**6)
        y = sparsecoll.allreduce(comm, x, Auto(network=network), k=10**5, return_reduction=True)
        return y.traffic.total.bytes_received

    received = [max(simulate(8, lambda comm, n=network: program(comm, n)).results) for network in (slow, fast)]
    assert received[0] < 5 * 10**6 < received[1] < 7.1 * 10**6
    with pytest.raises(sparsecoll.CommunicationError, match="algo: expected the same value on all ranks"):
        simulate(3, lambda comm: program(comm, fast if comm.rank else slow))


def test_entries_go_with_the_arguments_where_allgather_is_chosen():
    def program(comm):
        auto, results = Auto(), []
        for length in (3_000, 2_000 + 1_000 * (comm.rank == 1), 300_000):
            x = SparseVector(np.arange(comm.rank, 30 * length, 30), np.full(length, 0.1 * comm.rank), 10**7)
            y = sparsecoll.allreduce(comm, x, auto, return_reduction=True)
            assert same_bits(y.value, sparsecoll.allreduce(comm, x, "allgather"))
            results.append(set(y.traffic.phases))
        return results

    for results in simulate(5, program).results:
        assert results[0] == results[1] == {"gather"} and "agree" in results[2]


def test_the_state_of_oktopk_is_saved():
    def program(comm):
        auto, restored = Auto(want="top_k_of_sum"), Auto(want="top_k_of_sum")
        x = np.random.default_rng(comm.rank).standard_normal(10**6, np.float32)
        for _ in range(2):
            sparsecoll.allreduce(comm, x, auto, k=30_000)
        restored.load_state_dict(json.loads(json.dumps(auto.state_dict())))
        assert restored.replicated_state() == auto.replicated_state() and auto.replicated_state()[0] == 2
        mine, theirs = (sparsecoll.allreduce(comm, x, algo, k=30_000) for algo in (auto, restored))
        return same_bits(mine, theirs)

    assert simulate(4, program).results == [True] * 4


@pytest.mark.parametrize("P", [1, 2, 3, 8])
@pytest.mark.parametrize("density", [0.0005, 0.02, 0.3])
def test_the_top_k_of_the_sum_is_that_of_exact_oktopk(P, density):
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


def test_an_unknown_want_is_refused():
    with pytest.raises(ValueError, match="want: expected one of exact_sum, top_k_of_sum, got 'all'"):
        Auto(want="all")


@pytest.mark.parametrize("limit", [{"density": 1.0}, {"density": 0.1}, {"k": 2**70}])
def test_a_limit_far_above_the_entries_is_not_taken_for_their_number(limit):
    def program(comm):
        x = SparseVector([comm.rank, 2**61], np.ones(2), 2**62)
        sums = [sparsecoll.allreduce(comm, x, **limit), sparsecoll.allreduce_init(comm, x, **limit)(x)]
        return [y.values.tolist() for y in sums]

    assert sparsecoll.simulate(3, program).results == [[[1.0, 1.0, 1.0, 3.0]] * 2] * 3


def test_a_state_of_the_other_want_is_refused():
    auto = Auto(want="top_k_of_sum")
    before = auto.state_dict()
    with pytest.raises(ValueError, match="state: expected that of Auto, got one without 'oktopk'"):
        auto.load_state_dict(Auto().state_dict())
    assert auto.state_dict() == before


def test_a_state_that_does_not_fit_changes_nothing():
    """Neither an object of another want, nor a part of one before the part that is wrong."""
    old, new = Auto(want="top_k_of_sum"), Auto()
    with pytest.raises(ValueError, match="want='exact_sum'"):
        new.load_state_dict(old.state_dict())
    assert simulate(2, lambda comm: sparsecoll.allreduce(comm, {3: 1}, Auto())).results[0] == {3: 2}
    assert new._oktopk is None
    one = sparsecoll.Hierarchical(selector=select.SampledThreshold(), inner="gtopk")
    one.selector._calls = 5
    other = sparsecoll.Hierarchical(selector=select.SampledThreshold(), inner="oktopk")
    with pytest.raises(ValueError, match="expected that of OkTopk"):
        other.load_state_dict(one.state_dict())
    assert other.selector._calls == 0
