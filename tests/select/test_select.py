"""Local selection, threshold reuse and error feedback."""

import numpy as np
import pytest

import sparsecoll
from sparsecoll import DenseVector, Residual, RowResidual, RowSparse, SparseVector, select, simulate
from sparsecoll.select import ThresholdReuse


def test_topk_never_takes_zeros():
    x = np.array([0, -2.0, 0, 1.0, -0.0])
    assert select.topk(x, 4).indices.tolist() == [1, 3]
    assert select.threshold(x, 0).indices.tolist() == [1, 3]
    assert select.topk(SparseVector([2, 7], np.array([0.0, 3.0]), 9), 2).indices.tolist() == [7]


def test_bad_arguments():
    with pytest.raises(ValueError, match="k: expected at least 0"):
        select.topk(np.ones(3), -1)
    with pytest.raises(ValueError, match=r"t: expected in \[0, inf\]"):
        select.threshold(np.ones(3), float("nan"))
    with pytest.raises(ValueError, match="NaN"):
        select.topk(np.array([np.nan, 1.0]), 1)
    assert select.topk(np.array([np.inf, 1.0]), 1).values.tolist() == [np.inf]


def test_reused_threshold_stays_within_its_tolerance_and_is_exact_when_due():
    rng = np.random.default_rng(0)
    x, reuse = rng.standard_normal(20_000), ThresholdReuse(period=10)
    for step in range(30):
        x += 0.1 * rng.standard_normal(x.size)
        chosen = reuse.select(DenseVector(x), 500)
        assert chosen.nnz <= 500 * 1.1
        if step % 10 == 0:
            assert chosen.nnz == 500
        assert chosen.nnz >= 500 / 1.1
        assert np.abs(chosen.values).min() >= np.partition(np.abs(x), -600)[-600]


def test_steady_decay_is_followed_without_lag():
    """A scale that falls by 3 % a step: a plain proportional threshold would select 10 % too few, steadily."""
    rng = np.random.default_rng(1)
    x, reuse, counts = rng.standard_normal(100_000) ** 3, ThresholdReuse(period=1000), []
    for step in range(60):
        counts.append(reuse.select(DenseVector(x * 0.97**step), 1000).nnz)
    assert np.abs(np.array(counts[10:]) / 1000 - 1).mean() < 0.005


class Counted(DenseVector):
    """A vector that counts the passes over it."""

    passes = 0

    def topk(self, k):
        Counted.passes += 1
        return super().topk(k)

    def threshold(self, *arguments):
        Counted.passes += 1
        return super().threshold(*arguments)


@pytest.mark.parametrize(("spread", "passes"), [(0.0, 103), (0.3, 108)])
def test_thresholds_that_change_too_fast_cost_no_second_pass(spread, passes, monkeypatch):
    """Of norms that differ by 30 % from call to call, and of steady ones, from which one in 32 is exact."""
    rng = np.random.default_rng(2)
    x, reuse = rng.standard_normal(100_000), ThresholdReuse()
    monkeypatch.setattr(Counted, "passes", 0)
    for step in range(100):
        y = x * 0.99**step * np.exp(spread * rng.standard_normal())
        chosen = reuse.select(Counted(y), 1000)
        assert 1000 / 1.1 <= chosen.nnz <= 1000 * 1.1
        if spread and chosen.nnz == 1000:
            assert set(chosen.indices.tolist()) == set(np.argsort(-np.abs(y))[:1000].tolist())
    assert Counted.passes <= passes


def test_all_equal_all_zero_and_empty_inputs():
    reuse = ThresholdReuse()
    for x in (np.ones(100), np.zeros(100), np.empty(0), np.ones(100)):
        for _ in range(3):
            chosen = reuse.select(DenseVector(x), 10)
            assert chosen.nnz == min(10, np.count_nonzero(x))


def test_what_is_sent_and_what_the_residual_keeps_add_up():
    residual = Residual(6, np.float64)
    gradient = np.array([1.0, -4, 2, 0, 3, 0.5])
    for _ in range(3):
        before = residual.array.copy()
        sent = select.topk(residual.compensate(gradient, 0.5), 2)
        residual.update(sent)
        np.testing.assert_array_equal(residual.array + sent.to_dense(), before + 0.5 * gradient)
        assert (residual.array[sent.indices] == 0).all()
    residual.update(DenseVector(residual.array.copy()))
    assert not residual.array.any()


def test_a_residual_refuses_entries_of_another_length_and_stays_as_it_was():
    """The kernels that add entries write where an index says."""
    residual = Residual(6)
    fits, foreign = (SparseVector([1], np.ones(1, np.float32), length) for length in (6, 7))
    one = DenseVector(np.ones(1, np.float32))  # NumPy would subtract it everywhere
    for call, text in (
        (lambda: residual.update(foreign), "contributed: expected length 6, got 7"),
        (lambda: residual.update(one), "contributed: expected length 6, got 1"),
        (lambda: residual.restore(foreign), "taken: expected length 6, got 7"),
        (lambda: residual.restore(fits, foreign), "contributed: expected length 6, got 7"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
        assert not residual.array.any()
    for wrong, got in ((None, "NoneType"), (np.ones(6), "ndarray"), (fits.astype(np.complex64), "complex64")):
        with pytest.raises(TypeError, match=f"contributed: expected .* got {got}"):
            residual.update(wrong)
        assert not residual.array.any()


def test_vector_views_and_counts():
    x = SparseVector([1, 4, 2**32 - 1], np.array([1.0, 2, 3]), 2**32)
    assert x.indices.dtype == np.uint32
    assert x.searchsorted([0, 2, 2**32 - 1, 2**32]).tolist() == [0, 1, 2, 3]
    assert [p.nnz for p in x.split([0, 2, 2, 2**32])] == [1, 0, 2]
    assert np.shares_memory(x.split([0, 5])[0].values, x.values)
    assert SparseVector([], np.empty(0), 0).density == 0.0
    assert SparseVector.from_dense(np.array([0, 1, -0.0, np.nan])).indices.tolist() == [1, 3]
    assert "nnz=3" in repr(x) and "length=3" in repr(DenseVector(np.ones(3)))


@pytest.mark.parametrize("dtype", ["float32", "int32", "uint8", "float16"])
def test_a_negative_threshold_selects_all(dtype):
    """Such as a mean less two standard deviations."""
    x = SparseVector([0, 1, 5], np.array([1, 2, 0], dtype), 9)
    assert [x.threshold(t).nnz for t in (-1.5, -np.inf, 0.0, 1.5)] == [3, 3, 3, 1] and x.count_at_least(-1.5) == 3


def test_thresholds_are_found_anew_where_they_have_become_zero():
    """With any tolerance, each of these counts is near enough, and lowers the threshold."""
    x, reuse = np.zeros(10_000), select.ThresholdReuse(tolerance=float("inf"))
    x[:100] = np.random.default_rng(0).standard_normal(100)
    assert {reuse.select(DenseVector(x), 300).nnz for _ in range(100)} == {100}


def test_a_residual_without_a_selector_is_as_before():
    residual, gradient = Residual(4), np.ones(4, np.float32)
    with pytest.raises(TypeError, match=r"selector: expected an object of sparsecoll\.select, got None"):
        residual.take(gradient, None, 2)
    taken = residual.take(gradient, select.TopK(), 2)
    assert taken.values.tolist() == [1.0, 1.0]
    residual.restore(DenseVector(taken.to_dense()))
    assert residual.array.tolist() == [1.0] * 4


def test_thresholds_follow_values_that_fall_by_more_than_floats_can_hold():
    selector = ThresholdReuse()
    for scale in (1e200, 1e-200, 1e200):
        assert selector.select(DenseVector(scale * np.arange(1, 101)), 10).nnz >= 10


@pytest.mark.parametrize(
    ("wrong", "algo"), [(np.inf, "dense"), (-np.inf, "allgather"), (np.nan, "dense"), (np.inf, "oktopk")]
)
def test_nothing_is_left_of_an_infinity_or_nan_that_was_sent(wrong, algo):
    class Everything(select.Selector):
        def select(self, x, k):
            return DenseVector(x.values.copy()).to_sparse()

    def program(comm):
        gradient = np.array([1, 2, 3, 4], np.float32)
        gradient[comm.rank] = wrong
        density = None if algo == "dense" else 1.0
        given, seen = {"nonfinite": "pass", "return_reduction": True}, []
        dense, sparse, rows = Residual(4), Residual(4), RowResidual(4, 1)
        for _ in range(2):
            acc = dense.compensate(gradient)
            dense.update(sparsecoll.allreduce(comm, acc, algo, density=density, **given).contributed)
            taken = sparse.take(gradient, Everything(), 4)
            sparse.restore(taken, sparsecoll.allreduce(comm, taken, **given).contributed)
            x = rows.compensate(RowSparse(np.arange(4), gradient[:, None], 4))
            rows.update(sparsecoll.allreduce(comm, x, **given).contributed)
            seen += [dense.array, sparse.array, rows.rows.values]
            gradient = np.ones(4, np.float32)
        return all(np.isfinite(values).all() for values in seen)

    assert all(simulate(2, program).results)
