"""Packed: near the entropy for uniform positions, below it for clustered ones, never far above it."""

from math import lgamma, log

import numpy as np
import pytest

import sparsecoll
from sparsecoll import CommunicationError, RowSparse, SparseVector, formats, select
from sparsecoll.formats import FORMATS, PackedCodesFormat
from sparsecoll.formats.base import HEADER, WIRE_DTYPES
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


def selected(density, dtype, n=10**6):
    """The entries of largest magnitude of what is drawn from Student's t with 4 degrees of freedom."""
    return select.topk(np.random.default_rng(0).standard_t(4, n).astype(np.float32), round(density * n)).astype(dtype)


@pytest.mark.parametrize(("wire", "rest", "all_bits"), [("float32", 24, 8), ("bfloat16", 8, 8), ("float16", 11, 5)])
@pytest.mark.parametrize(("density", "bits"), [(0.01, 2.3), (0.1, 2.4)])
def test_exponents_of_selected_values_take_about_two_bits(wire, rest, all_bits, density, bits):
    x = selected(density, np.float32)
    indices = 8 * PackedIndices().size(x) / x.nnz
    coded = 8 * FORMATS["packed"].size(x, wire) / x.nnz - indices - rest
    assert 1 < coded < bits < all_bits


WIDE = 2.0 ** np.random.default_rng(0).uniform(-20, 20, 1500)
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, -1e-39, 3e38, 1.0]


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("values", [np.ones(1023), np.ones(1024), -np.ones(1025), WIDE, SPECIAL * 300, WIDE.repeat(9)])
def test_values_with_coded_exponents_come_back(values, wire):
    values = np.array(values).astype(np.float32)
    x = SparseVector(np.arange(values.size), values, 20_000)
    message = formats.encode(x, "packed", wire)
    y = formats.decode(message, x.length)
    plain = formats.decode(formats.encode(x, "coo", wire), x.length)
    assert message.size == FORMATS["packed"].size(x, wire)
    assert y.values.dtype == plain.values.dtype and y.values.tobytes() == plain.values.tobytes()
    assert message.size <= PackedIndices().size(x) + values.size * (4 if wire == "float32" else 2)


def test_rows_have_coded_exponents():
    rng = np.random.default_rng(0)
    x = RowSparse(np.arange(0, 900, 3), rng.standard_normal((300, 64)).astype(np.float32), 1000)
    message = formats.encode(x, "packed")
    y = formats.decode(message, 1000, 64)
    assert message.size < 0.87 * x.values.nbytes and np.array_equal(y.values, x.values)


@pytest.mark.parametrize("wire", ["float32", "float16"])
def test_damaged_exponents_are_refused_or_valid(wire):
    rng = np.random.default_rng(0)
    x, other = selected(0.002, np.float32), selected(0.003, np.float32)
    messages = [formats.encode(each, "packed", wire) for each in (x, other)]
    refused = 0
    for _ in range(1500):
        message = damaged(rng, *messages)
        try:
            check_vector(formats.decode(message, x.length), x.length)
        except CommunicationError:
            refused += 1
    assert refused > 500


EMPTY_OR_SHORT = [("float32", 0, 0), ("float64", 0, 0), ("float32", 0, 7), ("float32", 999, 9)]


@pytest.mark.parametrize("size", range(16, 60))
@pytest.mark.parametrize(("wire", "width", "nnz"), EMPTY_OR_SHORT)
def test_short_messages_with_coded_exponents_are_refused(wire, width, nnz, size):
    message = np.zeros(size, np.uint8)
    HEADER.pack_into(message, 0, 11, WIRE_DTYPES[wire].id, 4, 1, width, nnz)
    with pytest.raises(CommunicationError, match="message: "):
        formats.decode(message, 1000, width)


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
