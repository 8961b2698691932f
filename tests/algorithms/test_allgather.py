"""Allgather and dense: their volume and messages are exactly the formulas."""

import formulas
import numpy as np
import pytest
from cases import SUPPORTS
from volume import HEADER_WORDS, measure

from sparsecoll import Allgather, Dense, allreduce, simulate
from sparsecoll.algorithms.primitives import estimates


@pytest.mark.parametrize("P", [2, 3, 5, 8, 16, 33])
@pytest.mark.parametrize("name", SUPPORTS)
def test_allgather(name, P):
    k = 2000
    volume = measure(Allgather, name, P, k)
    assert volume.received <= formulas.allgather_words(k, P) + HEADER_WORDS * P
    assert volume.messages == estimates.rounds(P)
    if name in ("random", "same", "one_region"):
        assert volume.received >= formulas.allgather_words(k, P)


@pytest.mark.parametrize("P", [2, 3, 5, 8, 16])
def test_dense(P):
    n = 8192 * P
    volume = measure(Dense, "random", P, 100, n)
    assert volume.received == volume.sent == formulas.dense_words(n, P)
    assert volume.messages == 2 * (P - 1)


@pytest.mark.parametrize("P", [4, 5, 7, 12, 16, 128])
@pytest.mark.parametrize("n", [10, 30_000])
def test_short_dense_vectors_take_2_log_P_messages_and_no_more_words(n, P):
    volume = measure(Dense, "random", P, 5, n)
    assert abs(volume.received - formulas.dense_words(n, P)) <= 2 * min(P, n)
    assert volume.messages == 2 * estimates.rounds(P)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int64"])
@pytest.mark.parametrize("value_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("P", [4, 5, 6, 7, 9])
def test_short_dense_vectors_sum_to_the_same_bits_and_conserve_what_rounding_takes(P, value_dtype, dtype):
    """Multiples of 1/512 need more bits than float16 and bfloat16 have; sums in float32 are exact."""
    if dtype == "int64" and value_dtype:
        return
    scale = 1 if dtype == "int64" else 512
    inputs = [(np.random.default_rng(r).integers(-(2**14), 2**14, 23) / scale).astype(dtype) for r in range(P)]
    options = {"value_dtype": value_dtype, "return_reduction": True}
    rows = simulate(P, lambda comm: allreduce(comm, inputs[comm.rank], "dense", **options)).results
    first = rows[0].value.to_dense()
    assert all(r.value.to_dense().tobytes() == first.tobytes() for r in rows)
    entered = np.sum([r.contributed.to_dense().astype(np.float64) for r in rows], axis=0)
    np.testing.assert_array_equal(entered, first)
    if value_dtype is None and dtype != "float16":
        np.testing.assert_array_equal(first, np.sum(inputs, axis=0, dtype=dtype))
