"""Hashed slots: Algorithm 1 of DRAGONN, Lemma A.5's collision rate, constant size, decoding in any order."""

import numpy as np
import pytest

import sparsecoll
from sparsecoll import CommunicationError, DenseVector, Residual, SparseVector, formats, select
from sparsecoll.formats import SlotsFormat


def vector(nnz=1000, length=10**6, seed=0):
    rng = np.random.default_rng(seed)
    indices = np.sort(rng.choice(length, nnz, replace=False))
    return SparseVector(indices, rng.standard_normal(nnz).astype(np.float32), length)


def test_collision_rate_of_lemma_a5():
    """Entry i of n survives with probability ((m - 1) / m)^(n - i), i = 1..n; averaged over 2,000 hash functions."""
    n, m, functions = 300, 200, 2000
    x = vector(n)
    survived = np.zeros(n)
    for seed in range(functions):
        survived += np.isin(x.indices, SlotsFormat(m, seed).roundtrip(x).indices, assume_unique=True)
    expected = ((m - 1) / m) ** (n - np.arange(1, n + 1))
    deviation = np.sqrt(expected * (1 - expected) / functions)
    assert (np.abs(survived / functions - expected) < 4.5 * deviation + 1e-9).all()
    assert survived[-1] == functions


def test_what_arrives_is_what_was_reported_and_the_later_entry_wins():
    for m in (1, 100, 1000, 5000):
        form, x = SlotsFormat(m, seed=3), vector()
        kept = form.roundtrip(x)
        assert 0 < kept.nnz <= min(m, x.nnz)
        for source in (x, kept):
            message = form.encode(source)
            assert message.size == form.size(source) == 24 + 8 * m  # constant, whatever is held
            arrived = formats.decode(message, x.length)
            assert arrived.indices.tolist() == kept.indices.tolist()
            assert arrived.values.tolist() == kept.values.tolist()
    assert SlotsFormat(1).roundtrip(vector()).indices.tolist() == [vector().indices[-1]]


def test_residual_keeps_what_was_overwritten():
    residual, gradient = Residual(10_000), np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    for step in range(5):
        before = residual.array + gradient
        sent = SlotsFormat(m=200, seed=step).roundtrip(select.topk(residual.compensate(gradient), 100))
        residual.update(sent)
        assert sent.nnz < 100
        np.testing.assert_array_equal(residual.array + sent.to_dense(), before)


def test_other_seeds_let_other_entries_through():
    x = vector(100)
    lost = [set(x.indices.tolist()) - set(SlotsFormat(100, seed).roundtrip(x).indices.tolist()) for seed in range(40)]
    assert not set.intersection(*lost[:20])
    assert x.indices[0] not in set.intersection(*lost)


def test_decoding_of_many_messages_in_one_pass_needs_no_order():
    parts = [vector(500, 10**4, seed) for seed in range(8)]
    dense = DenseVector(np.zeros(10**4, np.float32))
    formats.add_into(dense, [SlotsFormat(1000, seed).encode(x) for seed, x in enumerate(parts)])
    expected = np.zeros(10**4, np.float32)
    for seed, x in enumerate(parts):
        expected += SlotsFormat(1000, seed).roundtrip(x).to_dense()
    np.testing.assert_array_equal(dense.values, expected)


def test_lengths_around_2_to_the_32():
    for length in (2**32 - 1, 2**32, 2**32 + 1, 2**60):
        x = SparseVector([0, length - 1], np.array([1.0, 2.0]), length)
        message = SlotsFormat(m=64, seed=1).encode(x)
        assert message.size == 24 + 64 * ((4 if length < 2**32 else 8) + 8)
        assert formats.decode(message, length).indices.tolist() == [0, length - 1]


def test_same_index_in_two_slots_is_refused():
    x = SparseVector([4], np.ones(1, np.float32), 10)
    message = SlotsFormat(m=4).encode(x)
    message[8:16].view(np.uint64)[0] = 2
    message[24:40].view(np.uint32)[:2] = 4
    message[24:40].view(np.uint32)[2:] = 2**32 - 1
    with pytest.raises(CommunicationError, match="two slots hold the same index"):
        formats.decode(message, 10)


def test_allreduce_with_slots_conserves_and_needs_an_algorithm_that_sends_no_sums():
    def program(comm):
        x = vector(300, 10**4, comm.rank)
        y = sparsecoll.allreduce(comm, x, "allgather", format=SlotsFormat(m=400), return_reduction=True)
        with pytest.raises(ValueError, match="expected one that loses nothing with algo='oktopk'"):
            sparsecoll.allreduce(comm, x, "oktopk", format="slots")
        return y.value.to_dense(), y.contributed.to_dense()

    results = sparsecoll.simulate(3, program).results
    total = sum(contributed.astype(np.float64) for _, contributed in results)
    assert 0 < np.count_nonzero(results[0][1]) < 300
    for value, _ in results:
        np.testing.assert_allclose(value, total, atol=1e-6)
        assert value.tobytes() == results[0][0].tobytes()


def test_without_a_number_of_slots_nothing_is_lost_however_often_it_is_sent_on():
    x = vector(1000, 10**6)
    for part in (x, *x.split([0, 3000, 10**5, 10**6])):
        form = SlotsFormat(seed=5)
        message = form.encode(part)
        assert message.size == form.size(part) == 24 + 2 * part.nnz * 8
        assert formats.decode(message, x.length) == form.roundtrip(part) == part


class Ring(sparsecoll.Algorithm):
    """Sends on what it has received, as in docs/architecture.md."""

    name = "ring"
    semantics = "exact_sum"
    sends_sums = False

    def __call__(self, channel, x, k):
        parts = {channel.rank: x}
        for source in range(channel.rank, channel.rank - channel.size + 1, -1):
            channel.isend((channel.rank + 1) % channel.size, parts[source % channel.size])
            parts[(source - 1) % channel.size] = channel.recv((channel.rank - 1) % channel.size)
        return sparsecoll.Reduction(channel.merge([parts[rank] for rank in range(channel.size)]), x)


TAKES_LOSSY = [Ring, *(algo for algo in sparsecoll.ALGORITHMS.values() if not algo.sends_sums)]


@pytest.mark.parametrize("format", ["slots", SlotsFormat(seed=7), SlotsFormat(m=900)])
@pytest.mark.parametrize("algo", TAKES_LOSSY, ids=lambda algo: algo.name)
@pytest.mark.parametrize("P", [1, 2, 3])
def test_every_algorithm_reports_what_arrives_on_all_ranks(P, algo, format):
    def program(comm):
        x = vector(500, 10**4, comm.rank)
        r = sparsecoll.allreduce(comm, x, algo(), k=400, format=format, return_reduction=True)
        return r.value.to_dense(), r.contributed.to_dense()

    results = sparsecoll.simulate(P, program).results
    assert {value.tobytes() for value, _ in results} == {results[0][0].tobytes()}
    np.testing.assert_allclose(results[0][0], np.sum([c for _, c in results], axis=0), atol=1e-6)


@pytest.mark.parametrize("P", [1, 3])
def test_gathered_vectors_lose_nothing_without_a_number_of_slots(P):
    vectors = [vector(500, 10**4, rank) for rank in range(P)]

    def program(comm):
        x = vectors[comm.rank]
        return sparsecoll.allgather(comm, x, format="slots"), sparsecoll.gather(comm, x, root=0, format="slots")

    results = sparsecoll.simulate(P, program).results
    assert [everywhere for everywhere, _ in results] == [vectors] * P and results[0][1] == vectors


def test_bad_options():
    for m in (0, -1, 2**32):
        with pytest.raises(ValueError, match="m: expected 1 to 4294967295, got"):
            SlotsFormat(m)
    for options in ({"m": 2.5}, {"seed": None}):
        with pytest.raises(TypeError, match=f"{next(iter(options))}: expected an integer, got"):
            SlotsFormat(**options)
