"""Every format: round trip, exact size beforehand, stated rounding, and no damage from damaged messages."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsecoll import CommunicationError, SparseVector, formats
from sparsecoll.formats import FORMATS
from sparsecoll.vector import VALUE_DTYPES

FEW = settings(max_examples=80, deadline=None)
names = st.sampled_from(sorted(FORMATS))


@st.composite
def vectors(draw, largest=2**40):
    dtype = draw(st.sampled_from(VALUE_DTYPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    span = draw(st.sampled_from([1, 7, 64, 1000, 20_000]))
    start = draw(st.integers(0, largest - span))
    nnz = draw(st.integers(0, min(span, 300)))
    places = start + np.sort(rng.choice(span, nnz, replace=False))
    values = rng.integers(1, 2**10, nnz) * rng.choice([-1, 1], nnz) / (8 if dtype.kind == "f" else 1)
    length = draw(st.integers(start + span, largest + span))
    return SparseVector(places, values.astype(dtype), length)


@FEW
@given(names, vectors())
def test_round_trip_and_size(name, x):
    if name == "dense" and x.nnz and int(x.indices[-1] - x.indices[0]) > 10**6:
        return
    buffer = formats.encode(x, name)
    assert buffer.dtype == np.uint8 and buffer.size == FORMATS[name].size(x)
    y = formats.decode(buffer, x.length)
    assert (y.length, y.dtype, y.indices.dtype) == (x.length, x.dtype, x.indices.dtype)
    np.testing.assert_array_equal(y.indices, x.indices)
    np.testing.assert_array_equal(y.values, x.values)


@FEW
@given(names, vectors(largest=10**5), st.sampled_from(["float16", "bfloat16"]))
def test_narrow_values_are_what_rounded_says(name, x, value_dtype):
    if x.dtype.kind != "f":
        return
    buffer = formats.encode(x, name, value_dtype)
    assert buffer.size == FORMATS[name].size(x, value_dtype)
    y, expected = formats.decode(buffer, x.length), formats.rounded(x, value_dtype)
    np.testing.assert_array_equal(y.values.astype(x.dtype), expected.values)
    error = np.abs(expected.values.astype(np.float64) - x.values.astype(np.float64))
    assert (error <= np.abs(x.values.astype(np.float64)) * (2**-11 if value_dtype == "float16" else 2**-8)).all()


def test_rounding_to_nearest_even_saturation_and_special_values():
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, 70000, -70000, np.inf, -np.inf, np.nan], np.float32)
    x = SparseVector(np.arange(values.size), values, 100)
    bf16 = formats.rounded(x, "bfloat16").values
    np.testing.assert_array_equal(bf16[:2], np.array([1, 1 + 2**-6], np.float32))
    assert np.isfinite(bf16[2]) and (bf16[5:7] == [np.inf, -np.inf]).all() and np.isnan(bf16[7])
    half = formats.rounded(x, "float16").values
    np.testing.assert_array_equal(half[2:7], np.array([65504, 65504, -65504, np.inf, -np.inf], np.float32))


def test_auto_takes_the_smaller_one():
    full = SparseVector(np.arange(500), np.ones(500, np.float32), 1000)
    thin = SparseVector(np.arange(0, 1000, 10), np.ones(100, np.float32), 1000)
    assert formats.encode(full, "auto").size == FORMATS["dense"].size(full) < FORMATS["coo"].size(full)
    assert formats.encode(thin, "auto").size == FORMATS["coo"].size(thin) < FORMATS["dense"].size(thin)


@FEW
@given(st.sampled_from(["coo", "dense"]), vectors(largest=10**5), st.data())
def test_damaged_messages_raise_and_never_give_an_invalid_vector(name, x, data):
    buffer = formats.encode(x, name)
    kind = data.draw(st.sampled_from(["cut", "grown", "flipped", "other length"]))
    length = x.length
    if kind == "cut":
        buffer = buffer[: data.draw(st.integers(0, buffer.size - 1))]
    elif kind == "grown":
        buffer = np.concatenate([buffer, np.zeros(data.draw(st.integers(1, 20)), np.uint8)])
    elif kind == "flipped":
        place = data.draw(st.integers(0, min(buffer.size, 40) - 1))
        buffer[place] ^= np.uint8(data.draw(st.integers(1, 255)))
    else:
        length = data.draw(st.integers(0, x.length))
    try:
        y = formats.decode(buffer.copy(), length)
    except CommunicationError:
        return
    SparseVector(y.indices, y.values, length)  # whatever comes through is a valid vector of that length
    assert kind != "cut" or name == "dense"


@pytest.mark.parametrize("name", FORMATS)
def test_header_that_promises_too_much_allocates_nothing(name):
    x = SparseVector([1], np.ones(1), 4)
    buffer = formats.encode(x, name)
    buffer[8:16] = 255
    with pytest.raises(CommunicationError):
        formats.decode(buffer, 2**62)


def test_registry_is_consistent():
    assert all(name == form.name for name, form in FORMATS.items())
    ids = [form.id for form in FORMATS.values()]
    assert len(ids) == len(set(ids))
    with pytest.raises(CommunicationError, match="no format has the id"):
        formats.decode(np.full(16, 77, np.uint8), 5)
    with pytest.raises(CommunicationError, match="no format has the id"):
        formats.decode(np.empty(0, np.uint8), 5)
