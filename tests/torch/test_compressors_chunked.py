"""ChunkedTopK: what is sent, in how many bytes, by which way, and what damaged messages do."""

from functools import partial

import numpy as np
import pytest

pytest.importorskip("torch")

from formulas import chunktopk_words
from one_bucket import normal, one, step

from sparsecoll import simulate
from sparsecoll.errors import CommunicationError
from sparsecoll.kernels import host_kernels
from sparsecoll.torch.compressors import ChunkedTopK, Compressor, StepContext
from sparsecoll.torch.compressors.chunked import decode, encode
from sparsecoll.torch.tensors.layout import Layout

WAYS = {
    "allgather": {"algo": "allgather"},
    "owners": {"algo": "owners"},
    "requantized": {"algo": "owners", "requantize": True},
}


def bound(comm, n, **options):
    own = ChunkedTopK(**options)
    own.bind(Layout(0, (n,), ("p",), ((n,),), np.dtype(np.float32)), comm.transport, StepContext())
    return own


@pytest.mark.parametrize("P", [1, 2, 5])
@pytest.mark.parametrize("way", WAYS)
def test_the_mean_and_the_residuals_hold_the_gradients(way, P):
    """In parameters of several lengths, some of them shorter than a chunk."""
    shapes = ((700,), (3, 5), (1,), (256, 2))
    gradients = normal(P, 700 + 15 + 1 + 512, dtype=np.float64)
    results = one(ChunkedTopK(4, 64, **WAYS[way]), gradients, 3, shapes)
    assert len({np.array(means).tobytes() for means, _ in results}) == 1
    total = P * sum(results[0][0]) + sum(own.residual for _, own in results)
    np.testing.assert_allclose(total, 3 * sum(gradients), rtol=0, atol=1e-9)


def test_gathered_means_are_those_of_what_the_ranks_sent():
    gradients = normal(3, 10_000)
    (mean,), _ = one(ChunkedTopK(algo="allgather"), gradients)[0]
    sent = [np.zeros_like(x) for x in gradients]
    for x, entries in zip(gradients, sent, strict=True):
        for a, b, k in ((0, 4096, 64), (4096, 8192, 64), (8192, 10_000, 28)):
            largest = a + np.argsort(-np.abs(x[a:b]), kind="stable")[:k]
            entries[largest] = x[largest]
    assert np.array_equal(mean != 0, np.any(sent, axis=0))
    assert np.linalg.norm(mean - sum(sent) / 3) < 0.07 * np.linalg.norm(mean)


def test_short_parameters_send_as_many_values_as_whole_chunks():
    """The last chunk of a longer parameter sends fewer, in proportion, since it shares its magnitudes."""
    own = one(ChunkedTopK(4, 64), normal(1, 150 + 5 + 2), 1, ((150,), (5,), (2,)))[0][1]
    assert own._regions[0].chunks.counts.tolist() == [4, 4, 1, 4, 2]


@pytest.mark.parametrize("largest", [9.0, float(np.finfo(np.float32).max)])
def test_a_mean_that_is_added_at_once_is_the_one_that_is_formed(largest):
    """The largest value of float32 leaves it finite; beside it, all others are too small for a magnitude."""

    def program(comm):
        own = bound(comm, 5000, algo="allgather")
        gradient, start = normal(2, 5000)
        gradient[:2] = largest, -largest
        message = own.compress(own.compensate(gradient))
        reduced = own.communicate(comm.transport, message)
        formed, added = start.copy(), start.copy()
        Compressor.add_mean(own, formed, reduced, -0.4)
        own.add_mean(added, reduced, -0.4)
        return formed, added, start

    for formed, added, start in simulate(3, program).results:
        assert np.isfinite(added).all() and added[0] - start[0] < -0.1 * largest
        assert np.count_nonzero(added != start) == (78 if largest < 10 else 2)
        np.testing.assert_allclose(added, formed, rtol=1e-6, atol=1e-6)


def test_decay_is_the_factor_of_the_residual():
    for decay, equal in ((0.0, True), (0.5, False)):
        first, second = one(ChunkedTopK(4, 64, decay=decay), normal(1, 500), 2)[0][0]
        assert np.array_equal(first, second) is equal


def test_owners_send_nearly_the_gathered_mean():
    """Their regions divide blocks that share magnitudes, and sums are rounded to eight bits."""
    gathered, owned = (one(ChunkedTopK(16, 256, algo=a), normal(4, 6000))[0][0][0] for a in ("allgather", "owners"))
    assert (gathered[owned != 0] != 0).all() and np.linalg.norm(owned - gathered) < 0.1 * np.linalg.norm(gathered)


def test_zeros_are_not_sent():
    gradients = [np.zeros(5000, np.float32) for _ in range(3)]
    gradients[1][7] = -2
    for way in WAYS.values():
        mean = one(ChunkedTopK(**way), gradients)[0][0][0]
        assert np.flatnonzero(mean).tolist() == [7] and mean[7] == pytest.approx(-2 / 3, rel=1 / 16)


@pytest.mark.parametrize(("P", "n", "chunk"), [(4, 1 << 18, 4096), (16, 1 << 18, 4096), (64, 1 << 17, 2048)])
def test_counted_bytes_are_those_of_the_formula(P, n, chunk):
    for expected, way in zip(chunktopk_words(n, P), WAYS.values(), strict=True):
        words = counted(P, n, k=chunk // 64, chunk=chunk, **way)
        assert 0.97 * expected <= words <= 1.06 * expected + 10 * 2 * P


@pytest.mark.slow
def test_counted_bytes_of_256_ranks_are_those_of_the_formula():
    n = 1 << 17
    words = counted(256, n, k=8, chunk=512, requantize=True)
    expected = chunktopk_words(n, 256)[2]
    assert 0.97 * expected <= words <= 1.06 * expected + 10 * 2 * 256


def counted(P, n, **options):
    """The words that a rank receives, on average, beside those of the agreement."""

    def program(comm):
        own = bound(comm, n, **options)
        before = comm.transport.traffic.copy()
        step(own, comm.transport, np.random.default_rng(comm.rank).standard_normal(n).astype(np.float32))
        phases = comm.transport.traffic.since(before).phases
        return sum(phase.words_received for name, phase in phases.items() if name != "agree")

    return np.mean(simulate(P, program).results)


@pytest.mark.parametrize(
    ("P", "requantize", "expected"), [(2, True, False), (3, True, True), (16, False, False), (64, False, True)]
)
def test_auto_takes_the_way_of_fewer_bytes(P, requantize, expected):
    def program(comm):
        return bound(comm, 1 << 16, requantize=requantize)._by_owners

    assert set(simulate(P, program).results) == {expected}
    gathered, owned, again = chunktopk_words(1 << 16, P)
    assert ((again if requantize else owned) < gathered) is expected


def test_an_entry_takes_at_most_9_6_bits():
    def program(comm):
        own = bound(comm, 1 << 20)
        taken = own.compress((np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32), None))
        return encode(taken[0]).size

    assert 8 * simulate(1, program).results[0] <= 9.6 * (1 << 14)


def test_damaged_messages_are_refused_or_decode_to_valid_entries():
    def program(comm):
        own = bound(comm, 20_000)
        region, out, refused = own._regions[0], np.zeros(20_000, np.float32), 0
        rng = np.random.default_rng(6)
        message = encode(own.compress((rng.standard_normal(20_000).astype(np.float32), None))[0])
        decode(message, region)
        for number in range(3000):
            damaged = message.copy()
            at = rng.integers(0, message.size if number % 2 else 40, rng.integers(1, 4))
            damaged[at] = rng.integers(0, 256, at.size)
            if number % 5 == 0:
                damaged = np.resize(damaged, rng.integers(0, 2 * message.size))
            try:
                taken = decode(damaged, region)
            except CommunicationError:
                refused += 1
                continue
            assert (np.diff(taken[0].astype(np.int64)) > 0).all() and (not taken[0].size or taken[0][-1] < 20_000)
            host_kernels().chunk_sum([taken], region.starts, 1, out, False)
            assert np.isfinite(out).all()
        return refused

    assert simulate(1, program).results[0] > 1000


@pytest.mark.parametrize("way", WAYS)
def test_nan_on_one_rank_is_refused_on_all_with_the_name_of_the_parameter(way):
    def program(comm):
        own = bound(comm, 9000, **WAYS[way])
        gradient = np.ones(9000, np.float32)
        if comm.rank == 2:
            gradient[8000] = np.nan
        with pytest.raises(ValueError, match=r"gradient of 'p': expected finite values, got NaN or infinity"):
            step(own, comm.transport, gradient)

    simulate(3, program)


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (partial(ChunkedTopK, 0), "k"),
        (partial(ChunkedTopK, 65, 64), "k"),
        (partial(ChunkedTopK, 1, 0), "chunk"),
        (partial(ChunkedTopK, decay=1.5), "decay"),
        (partial(ChunkedTopK, algo="oktopk"), "algo"),
    ],
)
def test_options_out_of_range_are_refused(make, option):
    with pytest.raises(ValueError, match=f"^{option}: "):
        make()
