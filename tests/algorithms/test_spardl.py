"""SparDL: exactly 4k(P-1)/P words and 2 ceil(log2 P) messages for any P, other sums with teams, and nothing lost."""

import formulas
import numpy as np
import pytest
from cases import SUPPORTS, case, same_bits
from oracles import oracle_top
from volume import HEADER_WORDS, measure

import sparsecoll
from sparsecoll import SparDL, SparseVector, select, simulate
from sparsecoll.algorithms.primitives import estimates


@pytest.mark.parametrize("P", [2, 3, 6, 7, 16, 33])
@pytest.mark.parametrize("name", SUPPORTS)
def test_volume_is_at_most_that_of_the_formula_in_two_rounds_a_level(name, P):
    k = 3000
    volume = measure(SparDL, name, P, k)
    assert volume.received <= formulas.spardl_words(k, P) + 4 * P + 2 * HEADER_WORDS * P
    assert volume.messages == 2 * estimates.rounds(P)
    assert volume.nnz <= k
    if name in ("random", "same"):  # nearly full blocks: nearly the formula
        assert volume.received >= 0.8 * formulas.spardl_words(k, P)


@pytest.mark.parametrize("P", [4, 6, 7])
def test_full_blocks_meet_the_formula(P):
    """Dense input: every block has its k/P, so that every message is full."""
    k = 6000

    def program(comm):
        x = np.random.default_rng(comm.rank).standard_normal(60_000).astype(np.float32)
        y = sparsecoll.allreduce(comm, x, "spardl", k=k, format="coo", return_reduction=True)
        return sum(y.traffic.phases[p].words_received for p in ("split", "gather")), y.value.nnz

    for words, nnz in simulate(P, program).results:
        assert nnz == k
        assert (
            formulas.spardl_words(k, P) - 4 * P <= words <= formulas.spardl_words(k, P) + 4 * P + 2 * HEADER_WORDS * P
        )


@pytest.mark.parametrize("P", [3, 8])
def test_discarded_mass_is_collected(P):
    """Over steps with a residual: what was put in is in the results and the residuals."""
    n, k = 2000, 100

    def program(comm):
        rng, residual = np.random.default_rng(comm.rank), sparsecoll.Residual(n, np.float64)
        entered, results = np.zeros(n), np.zeros(n)
        for _ in range(5):
            gradient = rng.standard_normal(n)
            entered += gradient
            acc = residual.compensate(gradient)
            y = sparsecoll.allreduce(comm, acc.values, "spardl", k=k, return_reduction=True)
            residual.update(y.contributed)
            results += y.value.to_dense()
        return entered, results, residual.array.copy()

    rows = simulate(P, program).results
    np.testing.assert_allclose(sum(r[0] for r in rows), rows[0][1] + sum(r[2] for r in rows), atol=1e-9)


def test_selection_is_by_blocks():
    x = np.arange(1, 101, dtype=np.float32)
    assert SparDL().select(sparsecoll.DenseVector(x), 4, ranks=4).indices.tolist() == [24, 49, 74, 99]
    sparse = SparseVector.from_dense(x)
    assert SparDL().select(sparse, 4, ranks=4).indices.tolist() == [24, 49, 74, 99]
    chosen = SparDL(selector=select.TopK()).select(sparse, 4, ranks=4)
    assert chosen.indices.tolist() == [96, 97, 98, 99]


def test_nan_that_arises_in_a_sum_raises_on_every_rank():
    def program(comm):
        x = SparseVector([1, 5], np.array([np.inf if comm.rank % 2 else -np.inf, 1.0]), 9)
        with pytest.raises(ValueError, match="got NaN"):
            sparsecoll.allreduce(comm, x, "spardl", k=9)
        return sparsecoll.allreduce(comm, SparseVector([2], np.ones(1), 9), "spardl", k=9).values[0]

    assert simulate(5, program).results == [5.0] * 5


TEAMS = [(2, 2, 2), (4, 2, 2), (6, 2, 2), (6, 3, 3), (6, 4, 3), (7, 2, 1), (8, 4, 4), (8, 8, 8), (12, 4, 4), (12, 6, 6)]


def with_teams(inputs, k, d):
    """Steps 1 to 4 on dense vectors; the inputs' sums are exact in any order."""
    P, n = len(inputs), inputs[0].length
    T = P // d
    edges, shares = [n * j // T for j in range(T + 1)], np.diff([k * j // T for j in range(T + 1)])
    top = [
        [oracle_top(x.to_dense()[a:b], s) for a, b, s in zip(edges, edges[1:], shares, strict=False)] for x in inputs
    ]
    steps = [2**t for t in reversed(range((T - 1).bit_length()))]
    for distance in steps:
        before = [list(blocks) for blocks in top]
        for rank in range(P):
            team, position = divmod(rank, T)
            to = team * T + (position + distance) % T
            for offset in range(distance, min(2 * distance, T)):
                block = (position + offset) % T
                top[to][block] = oracle_top(before[to][block] + before[rank][block], shares[block])
    result = []
    for block in range(T):
        held = [top[team * T + block][block] for team in range(d)]
        if d & (d - 1):
            held = [oracle_top(sum(held), shares[block])]
        while len(held) > 1:
            held = [oracle_top(a + b, shares[block]) for a, b in zip(held[::2], held[1::2], strict=True)]
        result.append(held[0])
    return np.concatenate(result)


@pytest.mark.parametrize(("P", "teams", "d"), TEAMS)
@pytest.mark.parametrize("name", ["random", "ties", "same_support", "empty_ranks", "cancelling"])
def test_teams_equal_the_oracle_with_the_same_bits_and_nothing_lost(name, P, teams, d):
    inputs = [case(name, rank, P) for rank in range(P)]
    for options in ({}, {"format": "dense"}):
        reductions = simulate(
            P,
            lambda comm, o=options: sparsecoll.allreduce(
                comm, inputs[comm.rank], SparDL(teams=teams), k=50, return_reduction=True, **o
            ),
        ).results
        assert all(same_bits(reductions[0].value, r.value) for r in reductions)
        np.testing.assert_array_equal(reductions[0].value.to_dense(), with_teams(inputs, 50, d))
        entered = np.sum([r.contributed.to_dense() for r in reductions], axis=0)
        np.testing.assert_array_equal(entered, reductions[0].value.to_dense())


@pytest.mark.parametrize(("P", "teams", "d"), TEAMS)
def test_teams_take_the_words_and_messages_of_the_formula(P, teams, d):
    """Dense input on the same positions: every message is full."""
    k, T = 12_000, P // d

    def program(comm):
        x = np.random.default_rng(1).standard_normal(60_000).astype(np.float32)
        y = sparsecoll.allreduce(comm, x, SparDL(teams=teams), k=k, format="coo", return_reduction=True)
        phases = [y.traffic.phases[p] for p in ("split", "teams", "gather") if p in y.traffic.phases]
        return sum(p.words_received for p in phases), sum(p.messages_sent for p in phases)

    formula = formulas.spardl_words(k, P, d)
    for words, messages in simulate(P, program).results:
        assert messages == 2 * estimates.rounds(T) + estimates.rounds(d)
        assert formula - 4 * P <= words <= formula + 4 * P + 2 * HEADER_WORDS * P


@pytest.mark.parametrize("P", [6, 8])
def test_rounding_between_teams_is_part_of_what_did_not_contribute(P):
    def program(comm):
        rng = np.random.default_rng(comm.rank)
        x = (rng.integers(-(2**14), 2**14, 2000) / 512).astype(np.float32)
        r = sparsecoll.allreduce(comm, x, SparDL(teams=P // 2), k=300, value_dtype="float16", return_reduction=True)
        return r.value, r.contributed.to_dense()

    rows = simulate(P, program).results
    assert all(same_bits(rows[0][0], value) for value, _ in rows)
    np.testing.assert_array_equal(np.sum([c for _, c in rows], axis=0), rows[0][0].to_dense())


def test_fewer_than_one_team_is_refused():
    with pytest.raises(ValueError, match="teams: expected at least 1, got 0"):
        SparDL(teams=0)
