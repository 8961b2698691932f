"""Packed: near the entropy for uniform positions, below it for clustered ones, never far above it."""

from math import lgamma, log

import numpy as np
import pytest

import sparsecoll
from sparsecoll import CommunicationError, SparseVector, formats
from sparsecoll.formats import FORMATS, PackedCodesFormat
from sparsecoll.formats.packed import PackedIndices
from sparsecoll.testing.formats import check_vector, damaged


def entropy(n, k):
    """log2 of the number of k-subsets of n, per index."""
    return (lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)) / log(2) / k


def bits(indices, n):
    """Bits per index, with the header and all that is not values."""
    x = SparseVector(indices, np.ones(indices.size, np.float16), n)
    return (FORMATS["packed"].size(x) - 2 * x.nnz) * 8 / x.nnz


@pytest.mark.parametrize("density", [0.001, 0.01, 0.05, 0.1])
def test_uniform_positions_cost_their_entropy_and_2_percent(density):
    n = 10**8 if density < 0.01 else 10**7
    rng = np.random.default_rng(0)
    indices = np.unique(rng.integers(0, n, round(n * density)))
    assert bits(indices, n) < 1.02 * entropy(n, indices.size)


def test_layers_of_different_density_cost_less():
    """Blocks of 1,024 indices follow the density of regions (layers, say) that hold several of them."""
    rng = np.random.default_rng(0)
    density = 0.03 * np.repeat(rng.gamma(0.3, size=25), 800_000)
    indices = np.flatnonzero(rng.random(density.size) < density)
    assert bits(indices, density.size) < 0.93 * entropy(density.size, indices.size)


def test_worst_cases_stay_near_raw_indices():
    far = np.concatenate([np.arange(1023), [2**32 - 1]])  # one gap of 32 bits among 1,022 of none
    assert bits(far, 2**32) < 34
    evens = np.arange(0, 2 * 10**5, 2)
    assert bits(evens, 2 * 10**5) < 2.1


def test_half_the_bytes_of_coo_at_1_percent_with_float16():
    indices = np.sort(np.random.default_rng(0).choice(10**7, 10**5, replace=False))
    x = SparseVector(indices, np.ones(10**5, np.float32), 10**7)
    assert formats.encode(x, "packed").size < 0.64 * formats.encode(x, "coo").size  # 40 of 64 bits
    assert formats.encode(x, "packed", "float16").size < 0.39 * formats.encode(x, "coo").size  # 24 of 64 bits


@pytest.mark.parametrize("indices", [[], [7], range(0, 3000), [0, 2**32, 2**40]], ids=["none", "one", "all", "far"])
def test_messages_of_indices_alone_come_back(indices):
    x = SparseVector(np.array(indices, np.int64), np.zeros(len(indices)), max([2999, *indices]) + 1)
    message = PackedIndices().encode(x)
    assert message.size == PackedIndices().size(x) == FORMATS["packed"].size(x) - 8 * x.nnz
    y = PackedIndices().decode(message, x.length)
    assert np.array_equal(y.indices, x.indices) and y.values.all() and y.length == x.length


def test_damaged_indices_are_refused_or_valid():
    rng = np.random.default_rng(0)
    messages = [
        PackedIndices().encode(SparseVector(np.arange(0, 900, step), np.ones(900 // step), 1000)) for step in (1, 9)
    ]
    refused = 0
    for count in range(3000):
        message = damaged(rng, messages[count % 2], messages[1 - count % 2])
        try:
            check_vector(PackedIndices().decode(message, 1000), 1000)
        except CommunicationError:
            refused += 1
    assert refused > 1000


def drawn(seed, nnz, dtype=np.float32, n=10**5):
    rng = np.random.default_rng(seed)
    return SparseVector(np.sort(rng.choice(n, nnz, replace=False)), rng.standard_t(4, nnz).astype(dtype), n)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("nnz", [0, 1, 511, 1000, 1001])
@pytest.mark.parametrize(("bits", "error"), [(4, 1 / 3), (8, 1 / 16)])
def test_values_in_few_bits_are_within_a_level(bits, error, nnz, dtype):
    form, x = PackedCodesFormat(bits), drawn(0, nnz, dtype)
    message = form.encode(x)
    y = formats.decode(message, x.length)
    assert message.size == form.size(x) and y.dtype == np.float32 and np.array_equal(y.indices, x.indices)
    assert np.array_equal(y.values, form.roundtrip(x).values) and form.roundtrip(x).dtype == dtype
    assert np.array_equal(form.roundtrip(y).values, y.values)  # coding twice is coding once
    for values, arrived in zip(np.split(x.values, [512]), np.split(y.values, [512]), strict=True):
        least = np.abs(values).max(initial=0) * 2.0**-6
        assert (np.abs(arrived - values) <= error * np.maximum(np.abs(values), 2 * least)).all()


def test_values_of_4_bits_take_12_bits_with_their_indices_at_1_percent():
    x = drawn(0, 10**4, n=10**6)
    assert PackedCodesFormat().size(x) * 8 / x.nnz < 12.4 and PackedCodesFormat(8).size(x) * 8 / x.nnz < 16.4
    for bad in (lambda: PackedCodesFormat(2), lambda: PackedCodesFormat().encode(drawn(0, 9, np.float16))):
        with pytest.raises(ValueError, match="expected"):
            bad()


def test_a_sum_in_few_bits_conserves_what_rounding_takes():
    def program(comm):
        y = sparsecoll.allreduce(comm, drawn(comm.rank, 900), "allgather", format="packed_codes", return_reduction=True)
        return y.value.to_dense(), y.contributed.to_dense()

    results = sparsecoll.simulate(3, program).results
    np.testing.assert_allclose(results[0][0], sum(own for _, own in results), rtol=1e-5, atol=1e-6)
