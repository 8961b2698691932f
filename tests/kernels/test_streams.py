"""Passes that write past the caches: the same bits as the reference, whatever the alignment and the length."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from test_kernels import FEW, dtypes, equal, indices, seeds, sizes, values

from sparsecoll.kernels import cpu, memory, reference
from sparsecoll.kernels.memory import ALIGNMENT


def placed(array, offset):
    """A copy that begins `offset` bytes after a multiple of ALIGNMENT."""
    raw = np.empty(array.nbytes + 2 * ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT + offset
    copy = raw[start : start + array.nbytes].view(array.dtype)
    copy[:] = array
    return copy


@pytest.fixture
def any_length(monkeypatch):
    """Arrays of any length are written past the caches, if they are aligned."""
    monkeypatch.setattr(cpu.lanes, "STREAMED", 0)


ALIGNED = settings(FEW, suppress_health_check=[HealthCheck.function_scoped_fixture])
offsets = st.sampled_from([0, 8, 32])


@ALIGNED
@given(dtypes, sizes, seeds, st.sampled_from([np.uint32, np.uint64]), st.data())
def test_dense_vectors_of_entries(any_length, dtype, size, seed, own, data):
    """All values are written: those of entries with their bits, or divided from +0 on, and zeros elsewhere."""
    i = indices(size, seed, own)
    length = (int(i[-1]) + 1 if i.size else 0) + data.draw(st.sampled_from([0, 1, 31, 32, cpu.sums.PART]))
    v = values(dtype, i.size, seed + 1)
    divisor = data.draw(st.sampled_from([None, 1, 3, 4])) if dtype.kind == "f" else None
    if divisor and i.size:
        v[0] = -np.finfo(dtype).smallest_subnormal  # its quotient is -0
    mine, theirs = placed(np.ones(length, dtype), data.draw(offsets)), np.ones(length, dtype)
    cpu.write_dense(mine, i, v, divisor)
    reference.write_dense(theirs, i, v, divisor)
    equal(mine, theirs)
    assert not divisor or divisor < 3 or not i.size or not np.signbit(mine[int(i[0])])


@ALIGNED
@given(st.sampled_from(["f", "d"]), sizes, seeds, st.sampled_from([np.uint32, np.uint64]), st.data())
def test_sums_of_vectors_written_as_dense_ones(any_length, dtype, size, seed, own, data):
    """All values are written, sums divided, in one pass over vectors that lie in groups of ascending indices."""
    together, groups, low, parts = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3)), 0, []
    dtype, divisor = np.dtype(dtype), data.draw(st.sampled_from([1, 2, 3, 4, 7]))
    for group in range(groups):
        drawn = [indices(size, seed + together * group + p, own) + own(low) for p in range(together)]
        low = max([low, *(int(i[-1]) + 1 for i in drawn if i.size)])
        parts += [(i, values(dtype, i.size, seed + n)) for n, i in enumerate(drawn)]
    length = low + data.draw(st.sampled_from([0, 1, 31, 32, cpu.sums.PART]))
    mine, theirs = placed(np.ones(length, dtype), data.draw(offsets)), np.ones(length, dtype)
    cpu.write_sum(mine, parts, divisor, together)
    reference.write_sum(theirs, parts, divisor, together)
    np.testing.assert_array_equal(mine, theirs)
    if not np.isnan(theirs.astype(np.float64)).any():
        equal(mine, theirs)
    merged, entry = np.zeros(length, dtype), reference.merge_sum(parts, dtype)
    reference.write_dense(merged, *entry, divisor)
    np.testing.assert_array_equal(mine, merged)


@pytest.mark.parametrize("divisor", [2, 3])
@pytest.mark.parametrize("wire", [np.float16, np.float32])
def test_a_quotient_is_not_minus_zero_and_narrow_values_are_summed_as_the_dense_ones(divisor, wire):
    i = np.array([1, 5], np.uint32)
    parts = [(i, np.array([-np.finfo(wire).smallest_subnormal, 1], wire)), (i[1:], np.array([2**-12], wire))]
    dense = np.ones(7, np.float32)
    cpu.write_sum(dense, parts, divisor, 2)
    assert not np.signbit(dense[1] if wire == np.float32 else dense[0])
    assert dense[5] == np.float32(1 + 2**-12) / np.float32(divisor)


@pytest.mark.skipif(not cpu.lanes.VECTORS, reason="LLVM alone does not write past the caches")
def test_only_long_aligned_arrays_are_written_past_the_caches():
    size = cpu.lanes.STREAMED // 4
    array = placed(np.zeros(size, np.float32), 0)
    assert cpu.lanes.streams_to(array)
    assert not cpu.lanes.streams_to(array[:-1]) and not cpu.lanes.streams_to(placed(array, 32))
    assert cpu.lanes.streams_to(memory.empty(size, np.float32))  # those of the pool are aligned
    done = memory.empty(size, np.float32)
    cpu.write_dense(done, np.array([3], np.uint32), np.array([8], np.float32), 2)
    assert done[3] == 4 and np.count_nonzero(done) == 1
