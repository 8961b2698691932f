"""PackedCodes: idempotent, its special values and dtypes, and what rounding takes does not count as contributed."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import sparsecoll
from sparsecoll import SparseVector, formats
from sparsecoll.formats import PackedCodesFormat


def vector(seed=0, n=5000, nnz=3000, dtype=np.float32):
    rng = np.random.default_rng(seed)
    indices = np.sort(rng.choice(n, nnz, replace=False)) + 10**6
    return SparseVector(indices, rng.standard_normal(nnz).astype(dtype), 10**7)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([4, 8]), st.integers(0, 2**32), st.integers(0, 300))
def test_coding_twice_is_coding_once(bits, seed, nnz):
    form = PackedCodesFormat(bits)
    x = vector(seed, 600, nnz)
    message = form.encode(x)
    assert message.size == form.size(x)
    once = formats.decode(message, x.length)
    again = form.roundtrip(once)
    assert again.indices.tolist() == once.indices.tolist() and again.values.tolist() == once.values.tolist()


def test_wrong_options_and_dtypes_are_refused():
    with pytest.raises(ValueError, match="bits: expected 8 or 4, got 3"):
        PackedCodesFormat(3)
    for bits in (4.0, "4"):
        with pytest.raises(TypeError, match=f"bits: expected an integer, got {bits!r}"):
            PackedCodesFormat(bits)
    with pytest.raises(ValueError, match="expected float32 or float64"):
        PackedCodesFormat().encode(vector(dtype=np.float16))


@pytest.mark.parametrize("bits", [8, 4])
def test_only_finite_values(bits):
    """Large ones of float64 become the largest of float32; what no scale can express is refused on all ranks."""

    def program(comm, value, nonfinite):
        x = SparseVector([1, 2, 5], np.array([value, 2.0, 3.0]), 10)
        return sparsecoll.allreduce(
            comm, x, "allgather", format=PackedCodesFormat(bits), nonfinite=nonfinite
        ).to_dense()

    for nonfinite in ("raise", "pass"):
        large = sparsecoll.simulate(2, lambda comm, how=nonfinite: program(comm, -1e300, how)).results[0]
        np.testing.assert_allclose(large[1], 2 * np.finfo(np.float32).min.astype(np.float64), rtol=1e-6)
        for value in (np.nan, np.inf):
            with pytest.raises(ValueError, match="rank 0: x: expected finite values"):
                sparsecoll.simulate(2, lambda comm, how=nonfinite, v=value: program(comm, v, how))


def test_allreduce_conserves_what_quantisation_takes():
    def program(comm):
        x = vector(comm.rank)
        y = sparsecoll.allreduce(comm, x, "allgather", format=PackedCodesFormat(4), return_reduction=True)
        return y.value.to_dense(), y.contributed

    results = sparsecoll.simulate(3, program).results
    total = sum(contributed.to_dense().astype(np.float64) for _, contributed in results)
    np.testing.assert_allclose(results[0][0], total, atol=1e-5)
