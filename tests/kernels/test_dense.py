"""Sparse vectors and their sums as dense ones: the same bits as the reference, whatever the length."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from test_kernels import FEW, dtypes, equal, indices, seeds, sizes, values

from sparsecoll.kernels import cpu, reference


@FEW
@given(dtypes, sizes, seeds, st.sampled_from([np.uint32, np.uint64]), st.data())
def test_dense_vectors_of_entries(dtype, size, seed, own, data):
    """All values are written: those of entries with their bits, or divided from +0 on, and zeros elsewhere."""
    i = indices(size, seed, own)
    length = (int(i[-1]) + 1 if i.size else 0) + data.draw(st.sampled_from([0, 1, 31, 32, cpu.sums.PART]))
    v = values(dtype, i.size, seed + 1)
    divisor = data.draw(st.sampled_from([None, 1, 3, 4])) if dtype.kind == "f" else None
    if divisor and i.size:
        v[0] = -np.finfo(dtype).smallest_subnormal  # its quotient is -0
    mine, theirs = np.ones(length, dtype), np.ones(length, dtype)
    cpu.write_dense(mine, i, v, divisor)
    reference.write_dense(theirs, i, v, divisor)
    equal(mine, theirs)
    assert not divisor or divisor < 3 or not i.size or not np.signbit(mine[int(i[0])])


@FEW
@given(st.sampled_from(["f", "d"]), sizes, seeds, st.sampled_from([np.uint32, np.uint64]), st.data())
def test_sums_of_vectors_written_as_dense_ones(dtype, size, seed, own, data):
    """All values are written, sums divided, in one pass over vectors that lie in groups of ascending indices."""
    together, groups, low, parts = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3)), 0, []
    dtype, divisor = np.dtype(dtype), data.draw(st.sampled_from([1, 2, 3, 4, 7]))
    for group in range(groups):
        drawn = [indices(size, seed + together * group + p, own) + own(low) for p in range(together)]
        low = max([low, *(int(i[-1]) + 1 for i in drawn if i.size)])
        parts += [(i, values(dtype, i.size, seed + n)) for n, i in enumerate(drawn)]
    length = low + data.draw(st.sampled_from([0, 1, 31, 32, cpu.sums.PART]))
    mine, theirs = np.ones(length, dtype), np.ones(length, dtype)
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
