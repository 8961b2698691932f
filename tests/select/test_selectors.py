"""Every selector: about k of the largest entries, fused with error feedback in one pass, conserving, resumable."""

import math

import numpy as np
import pytest
from cases import same_bits
from hypothesis import given, settings, strategies as st

import sparsecoll
from sparsecoll import DenseVector, Residual, RowResidual, RowSparse, SparseVector, select
from sparsecoll.kernels import kernels_of
from sparsecoll.kernels.keys import Momentum
from sparsecoll.kernels.sampling import stride_for
from sparsecoll.residual import LazyAccumulator
from sparsecoll.select import SELECTORS, GaussianK, RandomK, SampledThreshold, TopK
from sparsecoll.select.stats import MagnitudeStats
from sparsecoll.testing import check_selector

ALL = sorted(SELECTORS)


def heavy(n=100_000, seed=0, dtype=np.float32):
    return (np.random.default_rng(seed).standard_normal(n) ** 3).astype(dtype)


def largest(x, k):
    return np.partition(np.abs(x), x.size - k)[x.size - k]


@pytest.mark.parametrize("name", ALL)
def test_every_selector_keeps_the_contract(name):
    check_selector(SELECTORS[name]())


@pytest.mark.parametrize("name", ALL)
def test_no_zeros_and_no_more_than_k(name):
    for x, k in ((np.zeros(50), 5), (np.ones(50), 5), (np.ones(3), 9), (heavy(50), 0), (heavy(9), 9), (heavy(), 300)):
        chosen = SELECTORS[name]().select(DenseVector(x), k)
        assert name == "randomk" or (chosen.values != 0).all()
        assert chosen.nnz <= max(min(k, x.size), np.count_nonzero(x) if name in ("gaussian", "dgc") else 0)
    with pytest.raises(ValueError, match="k: expected at least 0"):
        SELECTORS[name]().select(DenseVector(np.ones(4)), -1)
    with pytest.raises(ValueError, match="NaN"):
        SELECTORS[name]().select(DenseVector(np.full(3000, np.nan)), 5)


def test_about_k_entries_are_selected():
    x, k = heavy(), 1000
    assert TopK().select(DenseVector(x), k).nnz == k
    for seed in range(5):
        y = heavy(seed=seed)
        for selector in (SampledThreshold(), select.ThresholdReuse()):
            assert k / 1.25 <= selector.select(DenseVector(y), k).nnz <= 1.25 * k
        assert 2 * k / 3 <= GaussianK().select(DenseVector(y), k).nnz <= 4 * k / 3
    ties = DenseVector(np.repeat(np.arange(1.0, 21.0), 1000))
    assert GaussianK().select(ties, 500).nnz == 500  # all thresholds select a multiple of 1000
    normal = np.random.default_rng(0).standard_normal(x.size)
    assert 2 * k / 3 <= GaussianK().select(DenseVector(normal), k).nnz <= 4 * k / 3
    assert GaussianK().select(DenseVector(1e160 * normal), k).nnz == k  # their squares are beyond the range
    assert RandomK().select(DenseVector(x), k).nnz == k


def test_no_integer_reaches_an_infinite_threshold():
    for dtype in ("bool", "int8", "int64", "uint64", "float16", "float32", "complex64"):
        x = np.ones(5, dtype)
        for vector in (x, DenseVector(x).to_sparse()):
            assert select.threshold(vector, np.inf).nnz == 0 and select.threshold(vector, 1).nnz == 5
        for t in (np.inf, np.nan):
            assert DenseVector(x).threshold(t).nnz == 0
        for t in (-np.inf, np.nan):
            with pytest.raises(ValueError, match=r"t: expected in \[0, inf\]"):
                select.threshold(x, t)


def test_only_large_entries_are_selected():
    x, k = heavy(), 1000
    for selector in (TopK(), SampledThreshold()):
        chosen = selector.select(DenseVector(x), k)
        assert np.abs(chosen.values).min() >= largest(x, 1300)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_momentum_in_the_pass_that_selects_equals_the_separate_steps(name, nesterov, apart):
    """Velocity, sum with the residual, selection and clearing; the gradient stays as it is if it is `apart`."""
    rng, mine, theirs = np.random.default_rng(3), SELECTORS[name](), SELECTORS[name]()
    velocity, residual = (rng.standard_normal(30_000).astype(np.float32) for _ in range(2))
    for _ in range(4):
        gradient = (rng.standard_normal(30_000) ** 3 * rng.choice([1, 8])).astype(np.float32)
        given, new, out = gradient.copy(), np.empty_like(gradient), np.empty_like(gradient)
        acc = LazyAccumulator(out, given) if apart else LazyAccumulator(given)
        acc.momentum_later(Momentum(velocity, 0.7, new, nesterov))
        acc.add_later(residual, 0.5)
        acc.clear_selected = True
        taken = mine.select(acc, 400)
        acc.commit(taken)
        factor = np.float32(0.7)
        velocity = factor * (velocity + gradient) if nesterov else factor * velocity + gradient
        expected = (gradient + velocity if nesterov else velocity) + np.float32(0.5) * residual
        chosen = theirs.select(DenseVector(expected), 400)
        assert same_bits(taken, chosen)
        expected[chosen.indices] = 0
        np.testing.assert_array_equal(new, velocity)
        np.testing.assert_array_equal(acc.values, expected)
        assert not apart or given.tobytes() == gradient.tobytes()
        residual = expected


@pytest.mark.parametrize("pending", [False, True])
def test_momentum_waits_for_a_pass_and_is_never_lost(pending):
    gradient, velocity, new = np.arange(4.0), np.ones(4), np.empty(4)
    acc = LazyAccumulator(np.empty(4), gradient)
    acc.momentum_later(Momentum(velocity, 0.5, new, False))
    if pending:
        acc.add_later(np.full(4, 10.0), 2.0)
    assert acc.sample(2, 1).values.tolist() == [1.5 + 20 * pending, 3.5 + 20 * pending]
    assert acc.values.tolist() == (gradient + 0.5 + 20 * pending).tolist()
    assert new.tolist() == (gradient + 0.5).tolist() and gradient.tolist() == [0, 1, 2, 3]
    assert acc.values.tolist() == (gradient + 0.5 + 20 * pending).tolist()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(ALL), st.integers(0, 2**32), st.integers(0, 300), st.integers(0, 12_000))
def test_nothing_is_lost_by_taking(name, seed, k, n):
    rng = np.random.default_rng(seed)
    values = rng.choice([0, 0, 1, -1, 2, 1e-30, 3e5], n) if seed % 2 else rng.standard_normal(n)
    residual, selector = Residual(n, np.float64), SELECTORS[name]()
    for _ in range(3):
        before = residual.array + values
        taken = residual.take(values, selector, k)
        np.testing.assert_array_equal(residual.array + taken.to_dense(), before)
        assert not residual.array[taken.indices].any()


def test_what_did_not_contribute_goes_back():
    residual, gradient = Residual(1000), heavy(1000)
    taken = residual.take(gradient, TopK(), 100)
    residual.restore(taken, taken.slice_entries(10, 60))
    np.testing.assert_array_equal(residual.array + taken.slice_entries(10, 60).to_dense(), gradient)
    residual.restore(taken.slice_entries(10, 60))
    np.testing.assert_array_equal(residual.array, gradient)


def test_compensation_waits_for_the_first_use_and_is_never_lost():
    residual = Residual(10, np.float64)
    one = np.ones(10)
    residual.compensate(one)
    residual.compensate(one, 2.0)
    assert (residual.array == 3).all()
    acc = residual.compensate(one)
    assert (acc.to_dense() == 4).all() and (acc.values is residual.array)
    assert residual.compensate(one).sample(3, 1).values.tolist() == [5, 5, 5]
    assert (residual.array == 5).all()
    with pytest.raises(ValueError, match=r"gradient: expected shape \(10,\), got \(9,\)"):
        residual.compensate(np.ones(9))


def test_whole_numbers_are_not_scaled_by_fractions():
    residual, rows = Residual(2, np.int32), RowResidual(2, 1, np.int32)
    some = RowSparse([0], np.array([[4]], np.int32), 2)
    for form, gradient in ((residual, np.array([4, 2], np.int32)), (rows, some)):
        form.compensate(gradient, scale=2.0)
        with pytest.raises(ValueError, match=r"scale: expected a whole number for a residual of int32, got 0\.5"):
            form.compensate(gradient, scale=0.5)
    assert residual.array.tolist() == [8, 4] and rows.rows.values.tolist() == [[8]]


@pytest.mark.parametrize("use", [Residual.compensate, lambda residual, x: residual.take(x, TopK(), 2)])
def test_a_gradient_that_is_refused_leaves_a_residual_usable(use):
    residual = Residual(6)
    residual.compensate(np.ones(6, np.float32))
    for wrong in (1j * np.ones(6), SparseVector([0], np.ones(1, np.float32), 6), [1.0] * 6, np.ones(6, "U1")):
        with pytest.raises(TypeError, match="gradient: expected"):
            use(residual, wrong)
        assert residual.array.tolist() == [1] * 6
    with pytest.raises(TypeError, match="gradient: expected a dtype that can be added to int64, got float64"):
        use(Residual(6, np.int64), np.ones(6))


def test_a_tensor_is_refused_as_a_gradient():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"gradient: expected a numpy.ndarray, got torch.Tensor"):
        Residual(6).compensate(torch.ones(6))


def test_a_masked_gradient_is_refused():
    with pytest.raises(TypeError, match=r"gradient: expected a numpy.ndarray, got numpy.ma"):
        Residual(4).compensate(np.ma.array(np.ones(4, np.float32), mask=[1, 0, 0, 0]))


@pytest.mark.parametrize("kind", [np.int8, np.uint16, np.int64])
def test_integers_of_numpy_are_counts_of_any_vector(kind):
    """They neither overflow nor lack a method of Python's."""
    x, k = heavy(200_000), kind(min(60_000, np.iinfo(kind).max))
    few = SparseVector.from_dense(np.where(np.arange(x.size) % 2, x, 0))
    for select_k in (lambda k: select.topk(x, k), few.topk, DenseVector(x).topk):
        assert select_k(k) == select_k(int(k))
    for name in ALL:
        chosen = [SELECTORS[name]().select(DenseVector(x), one) for one in (k, int(k))]
        assert chosen[0] == chosen[1]
    length = kind(min(x.size, np.iinfo(kind).max))
    assert Residual(length).array.size == length and SparseVector.empty(length, np.float32).to_dense().size == length


def test_an_addition_that_fails_is_not_repeated(monkeypatch):
    residual = Residual(6)

    def fail(*_, **options):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(kernels_of(residual.array), "form", fail)
        with pytest.raises(MemoryError):
            residual.compensate(np.ones(6, np.float32))
    assert residual.compensate(np.full(6, 2.0)).values.tolist() == [2] * 6


@pytest.mark.parametrize("dtype", [">f4", ">i8", "int8", "bool", "float16", "bfloat16"])
@pytest.mark.parametrize("n", [6, 40_000])
def test_gradients_of_other_dtypes(dtype, n):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    residual, gradient = Residual(n), np.ones(n, np.dtype(dtype))
    residual.compensate(gradient, 0.5)
    assert residual.take(gradient, TopK(), 2).values.tolist() == [1.5, 1.5]
    assert residual.array[2:].tolist() == [1.5] * (n - 2)


def test_random_k_is_the_same_everywhere_and_sends_no_index():
    n, k, P = 5000, 250, 3

    def program(comm):
        mine = heavy(n, comm.rank)
        chosen = RandomK(seed=7).select(DenseVector(mine), k)
        before = sparsecoll.traffic(comm).total.bytes_received
        y = sparsecoll.allreduce(comm, chosen.values, "dense")
        return chosen.indices, chosen.with_values(y.to_dense()).to_dense(), mine, before

    results = sparsecoll.simulate(P, program).results
    expected = sum(mine.astype(np.float64) for _, _, mine, _ in results)
    for indices, total, _, _ in results:
        assert indices.tolist() == results[0][0].tolist()
        np.testing.assert_allclose(total[indices], expected[indices], atol=1e-4)
    received = sparsecoll.simulate(P, lambda c: (program(c), sparsecoll.traffic(c).total.bytes_received)).results[0][1]
    assert received < 2 * 4 * k * (P - 1) / P + 24 * (P - 1) + 64  # values alone: 2k(P-1)/P words


def test_random_k_is_uniform_without_repetition_and_leaves_numpy_alone():
    state = np.random.get_state()[1].copy()
    counts, selector = np.zeros(1000), RandomK(seed=1)
    for _ in range(2000):
        chosen = selector.select(DenseVector(np.ones(1000)), 50)
        counts[chosen.indices] += 1
    assert counts.sum() == 2000 * 50
    assert abs(counts - 100).max() < 6 * 10 and 6 < counts.std() < 14  # binomial: mean 100, deviation 9.7
    assert (np.random.get_state()[1] == state).all()
    far = RandomK().select(SparseVector([2**40 - 1], np.ones(1), 2**40), 1000)
    assert far.nnz <= 1


@pytest.mark.parametrize("make", [DenseVector, lambda values: SparseVector(np.arange(values.size), values, 9000)])
def test_moments_of_complex_values_are_those_of_their_magnitudes(make):
    values = (1j * np.random.default_rng(0).standard_normal(9000)).astype(np.complex64)
    own, expected = MagnitudeStats(make(values), 90), MagnitudeStats(DenseVector(np.abs(values)), 90)
    for name in ("mean", "deviation", "mean_magnitude", "largest"):
        assert getattr(own, name) == getattr(expected, name)


def test_survey_counts_on_both_sides_of_its_bound():
    x = heavy(50_000)
    stats = MagnitudeStats(DenseVector(x), 500)
    assert 0 < stats._bound <= largest(x, 500)
    for t in (stats._bound * 2, stats._bound, stats._bound / 2, largest(x, 30_000)):
        assert stats.count(t) == np.count_nonzero(np.abs(x) >= t) == stats.threshold(t).nnz
    np.testing.assert_allclose(stats.mean, x.mean(dtype=np.float64), atol=1e-9)
    np.testing.assert_allclose(stats.deviation, x.std(dtype=np.float64), rtol=1e-6)
    np.testing.assert_allclose([stats.mean_magnitude, stats.largest], [np.abs(x).mean(dtype=float), np.abs(x).max()])


EDGES = {
    "few nonzeros": lambda x: x * (np.arange(x.size) % 300 == 0),
    "zeros": lambda x: x * 0,
    "equal": lambda x: x * 0 + 1,
    "ties": lambda x: np.round(x),
    "one huge": lambda x: np.where(np.arange(x.size) == 7, np.float32(1e30), x),
    "int8": lambda x: x.clip(-100, 100).astype(np.int8),
}


@pytest.mark.parametrize("make", [GaussianK, SampledThreshold])
def test_zeros_are_no_candidates_and_few_nonzeros_take_one_pass(make, monkeypatch):
    """A bound of 0 made all zeros candidates, which were counted for every threshold."""
    x, passes = DenseVector(EDGES["few nonzeros"](heavy(60_000))), []
    assert MagnitudeStats(x, 600)._candidates.nnz == np.count_nonzero(x.values) < 600
    select_in = DenseVector._select
    monkeypatch.setattr(DenseVector, "_select", lambda *given, **named: passes.append(1) or select_in(*given, **named))
    assert same_bits(make().select(x, 600), x.to_sparse()) and len(passes) == 1


def test_algorithms_take_a_selector():
    def program(comm):
        x = heavy(20_000, comm.rank)
        y = sparsecoll.allreduce(
            comm, x, sparsecoll.Allgather(selector=GaussianK()), density=0.01, return_reduction=True
        )
        z = sparsecoll.allreduce(comm, x, sparsecoll.OkTopk(selector=SampledThreshold()), density=0.01)
        return y.value.to_dense(), y.contributed, z.nnz

    results = sparsecoll.simulate(3, program).results
    sizes = {contributed.nnz for _, contributed, _ in results}
    assert len(sizes) > 1  # Gaussian-k: other sizes on other ranks
    total = sum(contributed.to_dense().astype(np.float64) for _, contributed, _ in results)
    np.testing.assert_allclose(results[0][0], total, atol=1e-4)
    assert 0 < results[0][2] <= 250
    with pytest.raises(sparsecoll.CommunicationError, match="algo"):
        sparsecoll.simulate(
            2,
            lambda comm: sparsecoll.allreduce(
                comm, heavy(), sparsecoll.Allgather(selector=RandomK(seed=comm.rank)), k=5
            ),
        )


def test_bad_options():
    for options in ({"share": 0}, {"share": 1.5}, {"tolerance": -1}, {"tolerance": float("nan")}):
        with pytest.raises(ValueError, match=rf"{next(iter(options))}: expected in"):
            SampledThreshold(**options)
    for options in ({"period": 0}, {"period": -4}, {"tolerance": -1}, {"tolerance": float("nan")}):
        with pytest.raises(ValueError, match=f"{next(iter(options))}: expected (at least|in)"):
            select.ThresholdReuse(**options)
    for make in (lambda: select.ThresholdReuse(period=1.5), lambda: RandomK(seed=None), lambda: RandomK(seed="a")):
        with pytest.raises(TypeError, match=r"(period|seed): expected an integer, got"):
            make()
    chosen = [RandomK(seed=kind(7)).select(DenseVector(heavy()), 50) for kind in (int, np.int64)]
    assert same_bits(*chosen)


@pytest.mark.parametrize("name", ALL)
def test_what_rounds_to_zero_raises_nothing_in_programs_that_raise_floating_point_errors(name):
    """The least threshold, gradients of float64, and values on the wire."""
    x = DenseVector(EDGES["few nonzeros"](heavy()))
    with np.errstate(all="raise"):
        assert SELECTORS[name]().select(x, 1000).nnz <= 1000
        taken = Residual(9).take(np.array([1, 1e-300, 0, 0, 0, 0, 0, 0, 0]), SELECTORS[name](), k=9)
        assert np.count_nonzero(taken.values) == 1
        assert not np.any(DenseVector(np.full(5, 1e-30, np.float32)).astype(np.float16).values)
        assert not np.any(sparsecoll.formats.rounded(taken * 1e-30, "float16").values)


def test_samples_of_matrices_do_not_keep_to_a_few_columns():
    """Every 128th column of 4,096 is empty: a distance of 128 would see only those."""
    x = np.random.default_rng(0).standard_normal((256, 4096)).astype(np.float32)
    x[:, ::128] = 0
    vector, k = DenseVector(x.reshape(-1)), x.size // 100
    key = kernels_of(vector.values).lower_bound_key(vector.values, k)
    if key:  # the reference looks at everything
        assert k <= kernels_of(vector.values).count_at_least(vector.values, key) <= 2 * k
    sample = vector.sample(stride_for(x.size, 8192), 0)
    assert np.count_nonzero(sample.values) > 0.95 * sample.nnz


@pytest.mark.parametrize("length", [1, 1000, 10**5, 10**6, 2**24, 3**15, 2**33])
def test_distances_of_samples_are_prime_to_widths(length):
    for size in (1, 1000, 1 << 17):
        stride = stride_for(length, size)
        assert stride >= max(1, length // size) and stride <= 1.3 * max(1, length // size) + 2
        assert all(math.gcd(stride, width) == 1 for width in (2, 64, 4096)) and (
            stride < 17 or (stride % 3 and stride % 5)
        )


def test_an_accumulator_is_an_array_after_the_work_that_waits():
    acc = LazyAccumulator(np.array([1.0, -2.0, 0.0], np.float32))
    acc.add_later(np.array([0.5, 0.5, 0.5], np.float32), 2.0)
    assert len(acc) == 3 and np.asarray(acc).tolist() == [2.0, -1.0, 1.0]
    assert np.asarray(acc) is acc.values and np.array(acc) is not acc.values
    assert np.asarray(acc, np.float64).dtype == np.float64 and np.sum(acc) == 2.0
    assert acc[1] == -1.0 and acc[1:].tolist() == [-1.0, 1.0]
    acc.clear_selected = True
    acc.topk(1)
    assert np.asarray(acc).tolist() == [2.0, -1.0, 1.0]  # nothing is removed before `commit`
    with pytest.raises(ValueError, match="copy=None"):
        acc.__array__(np.float64, copy=False)
