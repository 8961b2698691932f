"""The formats' kernels equal the reference, come back to what went in, and refuse what is damaged."""

import os

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from sparsecoll.kernels import cpu, reference
from sparsecoll.kernels.reference.rice import RICE_BLOCKS, RICE_PAD

FEW = settings(max_examples=int(os.environ.get("SPARSECOLL_EXAMPLES", "60")), deadline=None)
BOTH = (cpu, reference)


@st.composite
def positions(draw, largest=2**62):
    """Ascending unique indices: spread, in clusters, all adjacent, or with gaps of every magnitude."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.sampled_from([1, 2, 7, 63, 1023, 1024, 1025, 2500]))
    kind = draw(st.sampled_from(["spread", "clusters", "adjacent", "wild"]))
    if kind == "spread":
        gaps = rng.geometric(draw(st.sampled_from([0.5, 0.1, 0.001])), count)
    elif kind == "clusters":
        gaps = np.where(rng.random(count) < 0.05, rng.integers(1, 10**5, count), 1)
    elif kind == "adjacent":
        gaps = np.ones(count, np.int64)
    else:
        gaps = (2.0 ** rng.uniform(0, 50, count)).astype(np.int64)
    start = draw(st.integers(0, min(2**20, largest - 1)))
    indices = start + np.cumsum(gaps) - gaps[0]
    indices[draw(st.sampled_from([1, 512, 1024])) :] += draw(st.sampled_from([0, 0, 2**53 + 1, 2**60 + 1]))
    indices = indices[indices < largest]
    narrow = indices[-1] < 2**32 and draw(st.booleans())
    return indices.astype(np.uint32 if narrow else np.uint64)


def payload_of(kernels, indices, block=1024):
    table = kernels.rice_table(indices, block)
    size = int(kernels.rice_offsets(table, indices.size, block)[-1]) + RICE_PAD
    out = np.full(size, 77, np.uint8)
    kernels.rice_encode(indices, table, block, out)
    return table, out


@FEW
@given(positions(), st.sampled_from(RICE_BLOCKS))
def test_rice_codes_are_those_of_the_reference_and_come_back(indices, block):
    assert cpu.rice_block(indices) == reference.rice_block(indices)
    (table, payload), (own_table, own_payload) = (payload_of(kernels, indices, block) for kernels in (reference, cpu))
    assert table.tolist() == own_table.tolist()
    offsets = [kernels.rice_offsets(table, indices.size, block) for kernels in BOTH]
    assert offsets[0].dtype == offsets[1].dtype and offsets[0].tolist() == offsets[1].tolist()
    assert payload.tobytes() == own_payload.tobytes()
    limit = int(indices[-1]) + 1
    arguments = (table, payload, block, int(indices[0]), indices.size, limit, indices.dtype)
    for kernels in BOTH:
        back = kernels.rice_decode(*arguments)
        assert back.dtype == indices.dtype and back.tolist() == indices.tolist()
        if limit > 1:
            assert kernels.rice_decode(*arguments[:5], limit - 1, indices.dtype) is None


@FEW
@given(positions(), st.data())
def test_damaged_rice_gives_none_or_ascending_indices_below_the_limit(indices, data):
    table, payload = payload_of(cpu, indices)
    for _ in range(data.draw(st.integers(1, 5))):
        payload[data.draw(st.integers(0, payload.size - 1))] = data.draw(st.integers(0, 255))
    limit = int(indices[-1]) + 5
    arguments = (table, payload, 1024, int(indices[0]), indices.size, limit, indices.dtype)
    mine, theirs = cpu.rice_decode(*arguments), reference.rice_decode(*arguments)
    assert (mine is None) == (theirs is None)
    if mine is not None:
        assert mine.tolist() == theirs.tolist()
        assert cpu.first_unsorted(mine, limit) == -1


def test_rice_parameter_that_would_overflow_64_bits_is_refused():
    indices = np.array([5, 2**62 - 1], np.uint64)
    table, payload = payload_of(cpu, indices)
    assert table[0] >> 10 > 40
    for quotient in range(7):
        payload[0] = 1 | (2 << quotient)
        arguments = (table, payload, 1024, 5, 2, 2**63 - 1, np.uint64)
        mine, theirs = cpu.rice_decode(*arguments), reference.rice_decode(*arguments)
        assert (mine is None) == (theirs is None) and (mine is None or mine.tolist() == theirs.tolist())


@st.composite
def floats(draw):
    """Floats as they are stored, and the bits of their exponents: all alike, above a threshold, of any bits."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.sampled_from([0, 1, 63, 64, 65, 1023, 1024, 1025, 2500]))
    stored, bits = draw(st.sampled_from([(np.uint32, 8), (np.uint16, 8), (np.uint16, 5)]))
    size = 8 * np.dtype(stored).itemsize
    kind, spread = draw(st.sampled_from(["same", "normal", "sum", "any"])), draw(st.integers(0, 2**bits - 1))
    exponents = {
        "same": np.full(count, spread),
        "normal": spread - rng.geometric(0.6, count),
        "sum": spread + np.where(rng.random(count) < 0.1, rng.integers(-20, 9, count), 0),
        "any": rng.integers(0, 2**bits, count),
    }[kind] % 2**bits
    rest = rng.integers(0, 2 ** (size - 1 - bits), count) | rng.integers(0, 2, count) << (size - 1)
    return (rest | exponents << (size - 1 - bits)).astype(stored), bits


def coded(kernels, stored, bits):
    table = kernels.exponent_table(stored, bits)
    out = np.full(int(kernels.exponent_offsets(table, stored.size, bits, stored.itemsize)[-1]), 77, np.uint8)
    kernels.exponent_encode(stored, bits, table, out)
    return table, out


@FEW
@given(floats())
def test_exponents_are_those_of_the_reference_and_come_back(given):
    stored, bits = given
    (table, out), (own_table, own) = (coded(kernels, stored, bits) for kernels in (reference, cpu))
    assert table.dtype == own_table.dtype and table.tolist() == own_table.tolist()
    assert out.tobytes() == own.tobytes() and out.size <= stored.nbytes + 64 * (bits + 8)
    for kernels in BOTH:
        back = np.empty_like(stored)
        assert kernels.exponent_decode(out, bits, table, back) and back.tolist() == stored.tolist()


@FEW
@given(floats(), st.data())
def test_damaged_exponents_are_refused_or_give_values(given, data):
    stored, bits = given
    table, out = coded(cpu, stored, bits)
    for _ in range(data.draw(st.integers(1, 5)) if out.size else 0):
        out[data.draw(st.integers(0, out.size - 1))] = data.draw(st.integers(0, 255))
    mine, theirs = np.empty_like(stored), np.empty_like(stored)
    done = cpu.exponent_decode(out, bits, table, mine)
    assert done == reference.exponent_decode(out, bits, table, theirs)
    assert not done or mine.tolist() == theirs.tolist()


@FEW
@given(positions(largest=2**20), st.integers(0, 6))
def test_blocks_are_those_of_the_reference_and_come_back(indices, gap):
    (starts, lengths), theirs = (kernels.block_ranges(indices, gap) for kernels in BOTH)
    assert [array.tolist() for array in theirs] == [starts.tolist(), lengths.tolist()]
    heads = np.flatnonzero(np.isin(indices, starts))
    assert (np.diff(indices)[np.setdiff1d(np.arange(indices.size), heads) - 1] <= gap + 1).all()
    assert (starts[1:] - (starts + lengths)[:-1] >= gap + 1).all()
    values = np.random.default_rng(0).integers(1, 2**32, indices.size).astype(np.uint32)
    rows = [np.full(int(lengths.sum()), 9, np.uint32) for _ in BOTH]
    for kernels, row in zip(BOTH, rows, strict=True):
        kernels.block_write(indices, values, gap, row)
        held = np.flatnonzero(row)
        assert row[held].tolist() == values.tolist()
        found = kernels.block_indices(starts, lengths, held.astype(np.uint32), indices.dtype)
        assert (found.tolist(), found.dtype) == (indices.tolist(), indices.dtype)
    assert rows[0].tolist() == rows[1].tolist()


@FEW
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=20), st.integers(0, 60), st.booleans())
def test_blocks_that_do_not_fit_are_told_as_by_the_reference(ranges, length, sort):
    starts, lengths = np.array(sorted(ranges) if sort else ranges, np.uint64).reshape(-1, 2).T.copy()
    huge = starts.copy()
    huge[:1] = 2**64 - 1
    for first in (starts, huge):
        for total in (int(lengths.sum()), 7):
            assert cpu.blocks_fit(first, lengths, total, length) == reference.blocks_fit(first, lengths, total, length)


@FEW
@given(st.lists(st.integers(0, 2**64 - 1), max_size=40), st.integers(1, 8))
def test_numbers_of_any_width_come_back(numbers, width):
    numbers = np.array(numbers, np.uint64) & np.uint64(2 ** (8 * width) - 1)
    rows = [np.full(numbers.size * width, 9, np.uint8) for _ in BOTH]
    for kernels, row in zip(BOTH, rows, strict=True):
        kernels.numbers_write(numbers, width, row)
        assert kernels.numbers_read(row, width).tolist() == numbers.tolist()
    assert rows[0].tolist() == rows[1].tolist()


@FEW
@given(positions(largest=2**20))
def test_bitmaps_are_those_of_the_reference_and_come_back(indices):
    first, last = int(indices[0]), int(indices[-1])
    words = [np.full((last - first) // 64 + 1, 5, np.uint64) for _ in BOTH]
    for kernels, out in zip(BOTH, words, strict=True):
        kernels.bitmap_write(indices, first, out)
        assert kernels.bitmap_read(out, first, indices.size, indices.dtype).tolist() == indices.tolist()
        for wrong in (indices.size - 1, indices.size + 1):
            assert kernels.bitmap_read(out, first, wrong, indices.dtype) is None
    assert words[0].tobytes() == words[1].tobytes()


@FEW
@given(positions(), st.integers(1, 5000), st.lists(st.integers(0, 2**64 - 1), min_size=3, max_size=3))
def test_hashed_slots_are_those_of_the_reference(indices, slots, multipliers):
    found = [kernels.hash_slots(indices, slots, tuple(multipliers)) for kernels in BOTH]
    assert found[0].tolist() == found[1].tolist()
    assert found[0].min() >= 0 and found[0].max() < slots
    rows = [np.full(slots, 3, np.int64) for _ in BOTH]
    for kernels, out in zip(BOTH, rows, strict=True):
        kernels.slots_write(found[0], out)
    assert rows[0].tolist() == rows[1].tolist()
    expected = {slot: entry for entry, slot in enumerate(found[0].tolist())}
    assert {slot: entry for slot, entry in enumerate(rows[0].tolist()) if entry >= 0} == expected


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "int64"])
def test_marked_entries_are_counted_and_the_others_added(dtype):
    rng = np.random.default_rng(0)
    indices = rng.integers(0, 130, 500).astype(np.uint32)  # 100 and more: marks
    values = rng.integers(-9, 9, 500).astype(dtype)
    sums = [np.zeros(100, dtype) for _ in BOTH]
    marks = [kernels.scatter_add_marked(dense, indices, values) for kernels, dense in zip(BOTH, sums, strict=True)]
    assert marks[0] == marks[1] == (indices >= 100).sum()
    assert sums[0].tobytes() == sums[1].tobytes()


def test_narrow_floats_are_rounded_as_by_the_reference():
    rng = np.random.default_rng(1)
    bits = np.concatenate(
        [rng.integers(0, 2**32, 100_003, dtype=np.uint64).astype(np.uint32), [0x7F7FFFFF, 0x7F800000]]
    )
    special = np.array([0, -0.0, 1 + 2**-9, 65504, 65519, 65520, -1e6, 1e-8, 6e-8, np.inf, -np.inf, np.nan], np.float32)
    values = np.concatenate([bits.astype(np.uint32).view(np.float32), special, rng.standard_normal(1000).astype("f4")])
    for there, back, stored in (("to_bfloat16", "from_bfloat16", "u2"), ("to_float16", "from_float16", "f2")):
        narrow = [getattr(kernels, there)(values) for kernels in BOTH]
        assert narrow[0].dtype == narrow[1].dtype == np.dtype(stored)
        wide = [getattr(kernels, back)(narrow[0]) for kernels in BOTH]
        np.testing.assert_array_equal(getattr(cpu, back)(narrow[1]), wide[0])
        assert narrow[0][~np.isnan(wide[0])].tobytes() == narrow[1][~np.isnan(wide[0])].tobytes()
        np.testing.assert_array_equal(*wide)
        np.testing.assert_array_equal(np.isfinite(wide[0]), np.isfinite(values))
        np.testing.assert_array_equal(np.isnan(wide[0]), np.isnan(values))
