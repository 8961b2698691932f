"""LowBit: the same bits on all ranks, nothing lost, the volume of its formula, and what it refuses."""

import formulas
import numpy as np
import pytest

import sparsecoll
from sparsecoll import LowBit, NonFiniteError, SparseVector, simulate
from sparsecoll.algorithms.primitives import pipeline

KINDS = [LowBit(bits=8), LowBit(bits=4), LowBit(bits=2), LowBit(bits=8, levels="float"), LowBit(bits=4, levels="float")]
KINDS += [LowBit(bits=bits, rounding="nearest") for bits in (4, 2, 1)]
RELATIVE = {8: 0.1, 4: 0.6, 2: 2.5, 1: 1.0}  # error of a sum by bits


def values(rank, n, dtype="float32"):
    return np.random.default_rng(rank).standard_normal(n).astype(dtype)


def reductions(P, algo, n, dtype="float32", **options):
    def program(comm):
        x = values(comm.rank, n, dtype)
        before = x.tobytes()
        y = sparsecoll.allreduce(comm, x, algo(), return_reduction=True, **options)
        assert x.tobytes() == before
        return y

    return simulate(P, program).results


@pytest.mark.parametrize("P", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("algo", KINDS, ids=LowBit.describe)
def test_same_bits_and_nothing_is_lost(algo, P):
    n = 6000
    results = reductions(P, lambda: LowBit(bits=algo.bits, levels=algo.levels, rounding=algo.rounding), n)
    assert len({(r.value.indices.tobytes(), r.value.values.tobytes()) for r in results}) == 1
    value, exact = results[0].value.to_dense(), np.sum([values(rank, n) for rank in range(P)], axis=0)
    entered = np.sum([r.contributed.to_dense().astype(np.float64) for r in results], axis=0)
    np.testing.assert_allclose(entered, value, rtol=1e-5, atol=1e-4)
    assert np.linalg.norm(value - exact) <= RELATIVE[algo.bits] * np.linalg.norm(exact) * (P > 1)


TOLERANCE = {"float16": 2e-3, "bfloat16": 1e-2}  # of means, which are rounded once more


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_every_dtype_gives_its_own_and_loses_nothing(dtype, op):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    results = reductions(3, LowBit, 3000, dtype, op=op)
    combine = np.sum if op == "sum" else np.mean
    entered = combine([r.contributed.to_dense().astype(np.float64) for r in results], axis=0)
    assert results[0].value.dtype == dtype
    np.testing.assert_allclose(
        entered, results[0].value.to_dense().astype(np.float64), rtol=TOLERANCE.get(dtype, 1e-6), atol=4e-3
    )


def test_a_dense_array_gives_a_dense_one_of_its_shape_and_a_sparse_one_a_sparse_one():
    def program(comm):
        x = values(comm.rank, 600).reshape(20, 30)
        y = sparsecoll.allreduce(comm, x, LowBit(), op="mean")
        planned = sparsecoll.allreduce_init(comm, x, LowBit(), op="mean")(x)
        sparse = sparsecoll.allreduce(comm, SparseVector([comm.rank], np.ones(1, np.float32), 40), LowBit())
        return y, planned, sparse

    for y, planned, sparse in simulate(2, program).results:
        expected = (values(0, 600) + values(1, 600)).reshape(20, 30) / 2
        np.testing.assert_allclose(y, expected, atol=0.05)
        assert y.tobytes() == planned.tobytes() and y.dtype == np.float32
        assert isinstance(sparse, SparseVector) and sparse.indices.tolist() == [0, 1]


@pytest.mark.parametrize("n", [0, 1, 7, 511, 513, 5000])
def test_vectors_of_any_length_are_summed(n):
    for r in reductions(5, lambda: LowBit(bits=8), n):
        np.testing.assert_allclose(r.value.to_dense(), np.sum([values(rank, n) for rank in range(5)], axis=0), atol=0.3)


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
@pytest.mark.parametrize("P", [2, 3, 5, 8])
def test_volume_is_that_of_the_formula(P, bits):
    n = 512 * 120
    for r in reductions(P, lambda: LowBit(bits=bits, rounding="nearest"), n):
        assert r.traffic.phases["split"].words_received + r.traffic.phases["gather"].words_received == pytest.approx(
            formulas.lowbit_words(n, P, bits)
        )
        assert r.traffic.total.messages_sent <= 2 * (P - 1) + 4


def test_chunks_change_no_bits(monkeypatch):
    def program(comm):
        return sparsecoll.allreduce(comm, values(comm.rank, 100_000), LowBit(bits=4)).tobytes()

    whole = simulate(3, program).results
    monkeypatch.setattr(pipeline, "CHUNK_BYTES", 2000)
    assert simulate(3, program).results == whole and len(set(whole)) == 1


def test_every_call_and_rank_draws_its_own_numbers():
    def program(comm):
        algo = LowBit(bits=2)
        return [sparsecoll.allreduce(comm, values(0, 4096), algo).tobytes() for _ in range(2)]

    first, second = simulate(2, program).results[0]
    assert first != second
    shares = reductions(3, lambda: LowBit(bits=2), 4096)
    assert (
        simulate(2, program).results == [[first, second]] * 2 and len({r.value.values.tobytes() for r in shares}) == 1
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_refused_on_all_ranks(bad):
    def program(comm):
        x = values(comm.rank, 3000)
        x[1700] = bad if comm.rank == 1 else 1
        with pytest.raises(NonFiniteError, match="expected finite values"):
            sparsecoll.allreduce(comm, x, LowBit(), nonfinite="pass")
        with pytest.raises(ValueError, match="the first at index 1700"):
            sparsecoll.allreduce(comm, x, LowBit())
        x[:] = 3e38
        with pytest.raises(NonFiniteError, match="expected finite values and sums"):
            sparsecoll.allreduce(comm, x, LowBit(bits=8))
        return sparsecoll.allreduce(comm, np.ones(3, np.float32), LowBit())

    for y in simulate(3, program).results:
        np.testing.assert_allclose(y, 3)


def test_wrong_options_are_refused():
    for options in (
        {"bits": 3},
        {"bits": 2, "levels": "float"},
        {"bits": 1},
        {"bucket": 4},
        {"k": 4},
        {"rounding": "up"},
        {"levels": "x"},
    ):
        with pytest.raises(ValueError, match="expected"):
            LowBit(**options)
    for options in ({"bits": 8.0}, {"bits": "8"}, {"bucket": 512.0}, {"seed": "a"}):
        with pytest.raises(TypeError, match=f"{next(iter(options))}: expected an integer, got"):
            LowBit(**options)

    def program(comm):
        with pytest.raises(TypeError, match="expected one of float16"):
            sparsecoll.allreduce(comm, np.ones(9, np.int32), LowBit())
        with pytest.raises(ValueError, match="value_dtype: expected None"):
            sparsecoll.allreduce(comm, np.ones(9, np.float32), LowBit(), value_dtype="float16")
        with pytest.raises(ValueError, match="op: expected 'sum' or 'mean'"):
            sparsecoll.allreduce(comm, np.ones(9, np.float32), LowBit(), op="max")
        for options in ({"k": 3}, {"density": 0.5}):
            with pytest.raises(ValueError, match="k, density: expected neither with algo='lowbit', which sums all"):
                sparsecoll.allreduce(comm, np.ones(9, np.float32), LowBit(), **options)

    simulate(2, program)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_one_rank_refuses_what_several_refuse(bad):
    def program(comm):
        x = values(0, 3000)
        x[1700] = bad
        with pytest.raises(NonFiniteError, match="expected finite values"):
            sparsecoll.allreduce(comm, x, LowBit(), nonfinite="pass")

    simulate(1, program)
