"""SparCML: three schedules, their volume and messages, the switch to dense streams."""

import formulas
import numpy as np
import pytest
from cases import DISTRIBUTIONS, RANKS, SUPPORTS, case, same_bits
from oracles import oracle
from volume import HEADER_WORDS, measure

import sparsecoll
from sparsecoll import Network, SparCML, SparseVector, simulate
from sparsecoll.algorithms import sparcml
from sparsecoll.algorithms.primitives import estimates

VARIANTS = ["recursive_double", "split_allgather", "dynamic"]


@pytest.mark.parametrize("P", RANKS)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_exact(variant, name, P):
    inputs = [case(name, rank, P) for rank in range(P)]
    results = simulate(
        P, lambda comm: sparsecoll.allreduce(comm, inputs[comm.rank], SparCML(variant=variant), return_reduction=True)
    ).results
    expected = oracle(inputs, "sparcml", 0)
    assert all(same_bits(results[0].value, r.value) for r in results)
    np.testing.assert_array_equal(results[0].value.to_dense(), expected)
    np.testing.assert_array_equal(sum(r.contributed.to_dense() for r in results), expected)


@pytest.mark.parametrize("value_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("P", [3, 4, 6, 8])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_conserves_what_rounding_takes(variant, P, value_dtype):
    def program(comm):
        rng = np.random.default_rng(comm.rank)
        indices = np.sort(rng.choice(500, 200, replace=False))
        x = SparseVector(indices, (rng.integers(-(2**14), 2**14, 200) / 512).astype(np.float32), 500)
        return sparsecoll.allreduce(comm, x, SparCML(variant=variant), value_dtype=value_dtype, return_reduction=True)

    results = simulate(P, program).results
    assert all(same_bits(results[0].value, r.value) for r in results)
    entered = sum(r.contributed.to_dense().astype(np.float64) for r in results)
    np.testing.assert_array_equal(entered, results[0].value.to_dense())


@pytest.mark.parametrize("P", [2, 3, 4, 8, 16, 33])
@pytest.mark.parametrize("name", SUPPORTS)
def test_volume_of_split_and_gather(name, P):
    k, n = 2000, 400_000
    for variant in ("split_allgather", "dynamic"):
        volume = measure(lambda v=variant: SparCML(variant=v), name, P, k, n)
        headers = 2 * HEADER_WORDS * P
        if variant == "dynamic":
            assert (
                volume.received <= formulas.sparcml_words(n, P * k, P)[1] + headers
            )  # a region can get all P*k entries
        assert volume.received <= 2 * k * (P - 1) + 2 * volume.nnz + headers
        assert volume.messages == P - 1 + estimates.rounds(P)
    if name == "same":
        spread = measure(lambda: SparCML(variant="split_allgather"), name, P, k, n)
        assert spread.received >= 0.9 * formulas.sparcml_words(n, k, P)[0]


@pytest.mark.parametrize("P", [2, 4, 8, 16, 64])
def test_volume_of_recursive_doubling(P):
    k = 2000
    for name, words in (("same", 2 * k * estimates.rounds(P)), ("disjoint", 2 * k * (P - 1))):
        volume = measure(lambda: SparCML(variant="recursive_double"), name, P, k)
        assert words * 0.99 <= volume.received <= words + HEADER_WORDS * estimates.rounds(P)
        assert volume.messages == estimates.rounds(P)


@pytest.mark.parametrize("P", [3, 5, 12])
def test_volume_of_recursive_doubling_if_ranks_are_no_power_of_two(P):
    k, log = 2000, P.bit_length() - 1
    for name, words in (("same", 2 * k * (log + 1)), ("disjoint", 2 * k * P)):
        volume = measure(lambda: SparCML(variant="recursive_double"), name, P, k)
        assert words * 0.99 <= volume.received <= words + HEADER_WORDS * (log + 2)


def test_streams_go_dense_past_the_break_even():
    """Half-full regions: 8 bytes an entry for COO, 4 a coordinate for the dense stream; a few entries stay sparse."""

    def received(variant, density):
        def program(comm):
            rng = np.random.default_rng(comm.rank)
            indices = np.flatnonzero(rng.random(20_000) < density)
            x = SparseVector(indices, np.ones(indices.size, np.float32), 20_000)
            y = sparsecoll.allreduce(comm, x, SparCML(variant=variant), format="coo", return_reduction=True)
            return y.traffic.phases["gather"].bytes_received

        return max(simulate(8, program).results)

    assert received("dynamic", 0.3) < 0.6 * received("split_allgather", 0.3)
    assert received("dynamic", 0.01) == received("split_allgather", 0.01)
    assert received("dynamic", 0.3) <= 4 * 20_000 * 7 / 8 + 8 * 32 + 200


def test_each_region_decides_by_itself():
    def program(comm):
        full = np.arange(5000)
        thin = 5000 + np.arange(0, 5000, 50)
        x = SparseVector(np.concatenate([full, thin]), np.ones(5100, np.float32), 10_000)
        y = sparsecoll.allreduce(comm, x, SparCML(variant="dynamic"), format="coo", return_reduction=True)
        return y.traffic.phases["gather"].bytes_received

    dense, sparse = 24 + 4 * 5000, 16 + 8 * 100
    received = simulate(2, program).results
    assert abs(received[1] - dense) < 16 and abs(received[0] - sparse) < 16


def test_auto_follows_the_model():
    """Few entries: few messages win. Many: split and gather. Filled in: dense streams."""
    network = Network(alpha=1e-6)
    sizes = {"few": 500, "many": 40_000, "full": 300_000}
    times = {name: sparcml.sparcml_seconds(10**6, k, 16, network) for name, k in sizes.items()}
    best = {name: min(seconds, key=seconds.get) for name, seconds in times.items()}
    assert best == {"few": "recursive_double", "many": "split_allgather", "full": "dynamic"}
    for k, phase in ((3, "exchange"), (4000, "split")):

        def program(comm, k=k):
            x = np.random.default_rng(comm.rank).standard_normal(100_000).astype(np.float32)
            y = sparsecoll.allreduce(comm, x, SparCML(network=network), k=k, return_reduction=True)
            return y.traffic.phases

        assert phase in simulate(16, program).results[0]


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="variant: expected one of"):
        SparCML(variant="static")
    for kind in (SparCML, sparsecoll.Auto):
        with pytest.raises(TypeError, match=r"network: expected a sparsecoll.Network or None, got '1gbit'"):
            kind(network="1gbit")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("value", [np.float32(3e38), np.float32(np.inf)])
def test_sums_that_overflow_leave_no_nan_in_residuals(variant, value):
    def program(comm):
        x = SparseVector([3], np.array([value]), 10)
        options = {"nonfinite": "pass", "return_reduction": True}
        return sparsecoll.allreduce(comm, x, SparCML(variant=variant), **options).contributed.values.tolist()

    assert simulate(2, program).results == [[value]] * 2
