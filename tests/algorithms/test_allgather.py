"""Allgather and dense: their volume and messages are exactly the formulas."""

import itertools

import formulas
import numpy as np
import pytest
from cases import SUPPORTS
from volume import HEADER_WORDS, measure

import sparsecoll
from sparsecoll import Allgather, Dense, Network, SparseVector, allreduce, simulate
from sparsecoll.algorithms.primitives import estimates


@pytest.mark.parametrize("P", [2, 3, 5, 8, 16, 33])
@pytest.mark.parametrize("name", SUPPORTS)
def test_gathering_takes_at_most_the_words_of_the_formula(name, P):
    k = 2000
    volume = measure(Allgather, name, P, k)
    assert volume.received <= formulas.allgather_words(k, P) + HEADER_WORDS * P
    assert volume.messages == estimates.rounds(P)
    if name in ("random", "same", "one_region"):
        assert volume.received >= formulas.allgather_words(k, P)


@pytest.mark.parametrize("P", [2, 3, 5, 8, 16])
def test_a_dense_sum_takes_exactly_the_words_of_the_formula(P):
    n = 8192 * P
    volume = measure(Dense, "random", P, 100, n)
    assert volume.received == volume.sent == formulas.dense_words(n, P)
    assert volume.messages == 2 * (P - 1)


@pytest.mark.parametrize("dtype", ["float32", "complex64", "int16", "float16"])
@pytest.mark.parametrize("P", [2, 3, 8])
def test_between_hosts_long_dense_vectors_sum_to_the_bits_of_one_host_in_pieces(P, dtype):
    n = 150_000 * P - 1  # chunks of two or three pieces in the ring, of unequal length, and 16-bit ones of two at most

    def program(comm):
        x = np.random.default_rng(comm.rank).standard_normal(n, dtype=np.float32) * 99
        result = allreduce(comm, x.astype(dtype), "dense", return_reduction=True)
        return result.value.to_dense().tobytes(), result.traffic.phases["split"], result.traffic.phases["gather"]

    rows, beside = (simulate(P, program, ranks_per_node=count).results for count in (1, P))
    assert {row[0] for row in rows} == {row[0] for row in beside} == {rows[0][0]}
    size = np.dtype(dtype).itemsize
    pieces = -(-150_000 * size // 2**18) if P > 2 and dtype != "float16" else 1
    for phases in (row[1:] for row in rows):
        assert [counts.messages_received for counts in phases] == [(P - 1) * pieces] * 2
        assert all(abs(counts.bytes_received - n * size * (P - 1) / P) <= P * size for counts in phases)


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


@pytest.mark.parametrize("P", [2, 3, 5, 8])
@pytest.mark.parametrize("algo", ["allgather", "auto"])
def test_short_vectors_travel_with_the_arguments(algo, P):
    """One round of messages, not two; without a difference to the result where some rank has too many entries."""

    def program(comm):
        rng, found = np.random.default_rng(comm.rank), []
        for sizes in ([3] * P, [0] * P, [7000 if rank == P - 1 else 2 for rank in range(P)]):
            indices = np.sort(rng.choice(10**6, sizes[comm.rank], replace=False))
            x = sparsecoll.SparseVector(indices, rng.integers(1, 9, indices.size).astype(np.float32), 10**6)
            y = sparsecoll.allreduce(comm, x, algo, return_reduction=True)
            expected = sparsecoll.allreduce(comm, x, "sparcml")
            assert y.value == expected
            found.append((y.traffic.total.messages_sent, y.traffic.phases.get("agree")))
        return found

    for found in simulate(P, program, Network(50e-6, 8e-9)).results:
        assert found[0] == found[1] == ((P - 1).bit_length(), None)


def test_arguments_that_differ_where_entries_travel_with_them():
    x = sparsecoll.SparseVector([1, 5], np.ones(2), 9)
    calls = [
        ("allgather", {}),
        ("auto", {}),
        ("auto", {"k": 2}),
        ("dense", {}),
        ("sparcml", {}),
        ("auto", {"op": "max"}),
    ]
    for one, two in itertools.permutations(calls, 2):

        def program(comm, calls=(one, two)):
            algo, options = calls[comm.rank == 1]
            with pytest.raises(sparsecoll.CommunicationError, match="expected the same value on all ranks"):
                sparsecoll.allreduce(comm, x, algo, **options)
            return sparsecoll.allreduce(comm, x).values.tolist()

        assert simulate(3, program).results == [[3, 3]] * 3


@pytest.mark.parametrize("format", ["slots", "packed_codes"])
@pytest.mark.parametrize("P", [2, 3, 6])
def test_lossy_formats_give_the_same_bits_on_all_ranks(format, P):
    def program(comm):
        indices = np.unique(np.random.default_rng(comm.rank).integers(0, 40, 8))
        x = SparseVector(indices, np.random.default_rng(9).normal(size=indices.size).astype(np.float32), 40)
        y = sparsecoll.allreduce(comm, x, "allgather", format=format)
        return y.indices.tolist(), y.values.tobytes()

    results = simulate(P, program).results
    assert results == [results[0]] * P
