"""Ok-Topk in two levels: the result of one level in O(sqrt P) messages, for any P."""

import math

import numpy as np
import pytest
from cases import case, same_bits
from oracles import oracle

import sparsecoll
from sparsecoll import Network, OkTopk, SparseVector, simulate
from sparsecoll.algorithms.primitives import estimates
from sparsecoll.algorithms.primitives.estimates import oktopk_levels
from sparsecoll.algorithms.primitives.grid import Grid
from sparsecoll.transport import collectives

SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 17]


@pytest.mark.parametrize("size", [*range(1, 40), 1000, 4099])
def test_grid_has_every_rank_once_and_every_message_a_receiver(size):
    grid = Grid(size)
    assert sorted(grid.order()) == list(range(size)) and grid.first_region(grid.width) == size
    received = {rank: [] for rank in range(size)}
    for rank in range(size):
        for column in range(grid.width):
            if grid.receiver(rank, column) != rank:
                received[grid.receiver(rank, column)].append(rank)
    for rank in range(size):
        assert sorted(received[rank]) == sorted(grid.senders(rank))
        assert len(received[rank]) <= 3 * math.sqrt(size)


@pytest.mark.parametrize("P", SIZES)
@pytest.mark.parametrize("name", ["random", "ties", "disjoint", "one_region", "empty_ranks", "nnz_below_P"])
def test_equals_the_oracle_with_the_same_bits_on_all_ranks(P, name, monkeypatch):
    monkeypatch.setattr(collectives, "FEW_RANKS", 4)  # as with many ranks

    def program(comm):
        algo, x = OkTopk(levels=2), case(name, comm.rank, P)
        return [sparsecoll.allreduce(comm, x, algo, k=40, return_reduction=True) for _ in range(2)]

    results = simulate(P, program).results
    expected = oracle([case(name, rank, P) for rank in range(P)], "oktopk", 40)
    for first, second in results:
        np.testing.assert_array_equal(first.value.to_dense(), expected)
        assert same_bits(second.value, results[0][1].value)
    entered = np.sum([first.contributed.to_dense() for first, _ in results], axis=0)
    np.testing.assert_array_equal(entered, expected)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_rounding_takes_from_sums_of_rows_did_not_contribute(dtype):
    def program(comm):
        rng = np.random.default_rng(comm.rank)
        support = np.sort(rng.choice(400, 80, replace=False))
        x = SparseVector(support, (rng.integers(-(2**14), 2**14, 80) / 512).astype(dtype), 400)
        return sparsecoll.allreduce(comm, x, OkTopk(levels=2), k=60, value_dtype="float16", return_reduction=True)

    results = simulate(7, program).results
    entered = np.sum([r.contributed.to_dense().astype(np.float64) for r in results], axis=0)
    np.testing.assert_allclose(entered, results[0].value.to_dense(), rtol=2e-3 if dtype == "float16" else 0)


@pytest.mark.parametrize(("P", "similar"), [(16, False), (24, False), (24, True)])
def test_two_levels_take_fewer_messages_and_half_as_many_words_again(P, similar):
    """2 sqrt P messages, and at most 1.5 times the words of one level, in a steady call."""
    n, k = 200_000, 6000

    def program(comm, levels):
        rng, algo = np.random.default_rng(0 if similar else comm.rank), OkTopk(levels=levels, tau_prime=1000)
        x = SparseVector(np.sort(rng.choice(n, k, replace=False)), rng.standard_normal(k).astype(np.float32), n)
        for _ in range(2):
            reduction = sparsecoll.allreduce(comm, x, algo, k=k, format="coo", return_reduction=True)
        total, phases = reduction.traffic.total, reduction.traffic.phases
        return total.words_received, phases["split"].messages_sent, total.messages_sent

    one, two = (np.array(simulate(P, lambda c, levels=levels: program(c, levels)).results) for levels in (1, 2))
    assert one[:, 1].min() == P - 1 and two[:, 1].max() <= 2 * math.ceil(math.sqrt(P)) - 2
    assert two[:, 2].max() <= two[:, 1].max() + 2 * math.ceil(math.log2(P)) + 4
    assert two[:, 0].mean() <= 1.5 * one[:, 0].mean() + 30 * P


def test_the_model_takes_two_levels_where_messages_cost_more_than_volume():
    slow, fast = Network(50e-6, 8e-9), Network(50e-6, 8e-8)
    assert oktopk_levels(10**5, 1000, 8, slow) == oktopk_levels(10**9, 10**7, 300, slow) == 1
    assert oktopk_levels(10**5, 1000, 4096, slow) == 2 and oktopk_levels(10**8, 10**6, 1000, fast) == 1
    assert OkTopk(levels=1).levels == 1
    with pytest.raises(ValueError, match="levels: expected None, 1 or 2"):
        OkTopk(levels=3)


@pytest.mark.parametrize(("beta", "two"), [(8e-12, True), (8e-6, False)])
def test_the_number_of_levels_follows_the_network(beta, two, monkeypatch):
    """Those of the simulator's network here: for its own usual ones, of 1 Gb/s, the entries would be few."""
    monkeypatch.setattr(estimates, "MANY_RANKS", 9)

    def program(comm):
        algo, x = OkTopk(), SparseVector(np.arange(500) * (1 + comm.rank), np.ones(500, np.float32), 5000)
        sparsecoll.allreduce(comm, x, algo)
        return algo._on_grid

    assert set(simulate(9, program, Network(1e-6, beta)).results) == {two}


@pytest.mark.parametrize("P", [1, 3, 5, 8, 11])
def test_sums_and_maxima_by_either_way(P, monkeypatch):
    def program(comm):
        return collectives.sums_and_maxima(comm.transport, [comm.rank, 7, 2**40 * (comm.rank + 1)])[:2]

    expected = ([P * (P - 1) // 2, 7 * P, 2**40 * P * (P + 1) // 2], [P - 1, 7, 2**40 * P])
    for few in (0, 64):
        monkeypatch.setattr(collectives, "FEW_RANKS", few)
        assert simulate(P, program).results == [expected] * P
