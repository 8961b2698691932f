"""The kernels of quantised values: both give the same bits, errors and values add up, and levels stay levels."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from sparsecoll.kernels import cpu, reference
from sparsecoll.kernels.keys import Code
from sparsecoll.kernels.reference.quantization import code_bytes

KINDS = [(8, "linear"), (4, "linear"), (2, "linear"), (8, "float"), (4, "float"), (2, "mean"), (1, "mean")]


def drawn(count, special):
    rng = np.random.default_rng(count)
    values = (rng.standard_normal(count) ** 3).astype(np.float32)
    if special and count > 200:
        values[:3], values[9] = (0, -0.0, 1), np.inf if count % 2 else np.nan
        values[60:110], values[120:170] = 0, values[120:170] * np.float32(1e-38)
    return values


def coded(kernels, values, first, kind, bucket, seed, keep=False):
    buckets = (first + values.size - 1) // bucket - first // bucket + 1 if values.size else 0
    scales, codes = (
        np.full(buckets, 9, np.float32),
        np.full(code_bytes(first, values.size, kind[0], bucket), 9, np.uint8),
    )
    kernels.quantize(values, first, Code(*kind, bucket), seed, scales, codes, keep)
    return codes, scales


def decoded(kernels, codes, scales, first, kind, bucket, out, add=False):
    kernels.dequantize(codes, first, Code(*kind, bucket), scales, out, add)
    return out


@pytest.mark.parametrize("kind", KINDS, ids=str)
@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from([None, 0, 2**64 - 1]),
    st.sampled_from([0, 1, 63, 300, 1025]),
    st.integers(0, 2**40),
    st.sampled_from([8, 50, 512]),
)
def test_kernels_equal_the_reference(kind, seed, count, first, bucket):
    results = []
    for kernels in (cpu, reference):
        for keep in (False, True):
            error = drawn(count, special=True)
            codes, scales = coded(kernels, error, first, kind, bucket, seed, keep)
            back = decoded(kernels, codes, scales, first, kind, bucket, np.ones(count, np.float32))
            total = decoded(kernels, codes, scales, first, kind, bucket, drawn(count, special=False), add=True)
            assert keep or error.tobytes() == drawn(count, special=True).tobytes()
            results.append([codes.tobytes(), scales.tobytes(), back.tobytes(), np.nan_to_num(total).tobytes()])
            if keep:
                results[-1].append(error.tobytes())
    assert results[0] == results[2] and results[1] == results[3] and results[0] == results[1][:4]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("seed", [None, 3])
def test_value_and_error_add_up_and_levels_stay(kind, seed):
    given = drawn(3000, special=False)
    error = given.copy()
    codes, scales = coded(cpu, error, 7, kind, 512, seed, keep=True)
    once = decoded(cpu, codes, scales, 7, kind, 512, np.empty(3000, np.float32))
    np.testing.assert_allclose(error + once, given, rtol=1e-6, atol=1e-5)
    if kind[1] != "mean":
        again = decoded(cpu, *coded(cpu, once.copy(), 7, kind, 512, 99), 7, kind, 512, np.empty(3000, np.float32))
        np.testing.assert_array_equal(again, once)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind[1] != "mean"], ids=str)
def test_random_rounding_is_right_on_average(kind):
    given, total = np.random.default_rng(0).standard_normal(2048).astype(np.float32), np.zeros(2048)
    for seed in range(300):
        total += decoded(cpu, *coded(cpu, given, 0, kind, 512, seed), 0, kind, 512, np.empty(2048, np.float32))
    largest = np.abs(given).max() / (2 ** (kind[0] - 1) - 1 if kind[1] == "linear" else 4)
    assert np.abs(total / 300 - given).max() < 5.5 * largest / 2 / np.sqrt(300)


@pytest.mark.parametrize(("kind", "most"), [((8, "linear"), 2e-4), ((4, "linear"), 0.03), ((4, "float"), 0.05)])
def test_the_nearest_level_is_near(kind, most):
    given = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    error = given.copy()
    coded(cpu, error, 0, kind, 512, None, keep=True)
    assert np.square(error).sum() < most * np.square(given).sum()


@pytest.mark.parametrize(("bits", "most"), [(1, 0.38), (2, 0.13)])
def test_what_the_mean_magnitude_leaves(bits, most):
    """1 - 2/pi of normal values with one bit, and 0.119 with two (Max, "Quantizing for Minimum Distortion", 1960)."""
    error = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    before = np.square(error).sum()
    coded(cpu, error, 0, (bits, "mean"), 512, None, keep=True)
    assert np.square(error).sum() < most * before
