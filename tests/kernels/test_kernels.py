"""Fast kernels equal the reference to the last bit, on ties, NaN, infinities, zeros of both signs and every dtype."""

import importlib.util
import os

import numpy as np
import pytest
from cases import pairwise
from hypothesis import given, settings, strategies as st

from sparsecoll.kernels import cpu, reference, sampling
from sparsecoll.kernels.keys import COMPILED_DTYPES, Momentum, Pass, key_of, magnitude_of
from sparsecoll.vector import VALUE_DTYPES, accumulator_dtype, dtype_of

FEW = settings(max_examples=int(os.environ.get("SPARSECOLL_EXAMPLES", "60")), deadline=None)


def installed(name):
    """bfloat16 is a dtype of ml_dtypes."""
    return name != "bfloat16" or importlib.util.find_spec("ml_dtypes") is not None


DTYPES = [np.dtype(name) for name in os.environ.get("SPARSECOLL_DTYPES", "").split()] or COMPILED_DTYPES
OTHERS = ["uint8"] if "SPARSECOLL_DTYPES" in os.environ else [name for name in VALUE_DTYPES if name not in DTYPES]
dtypes = st.sampled_from(DTYPES)
ordered = st.sampled_from([*DTYPES, *map(dtype_of, filter(installed, OTHERS))])
FLOATS = [dtype for dtype in DTYPES if dtype.kind == "f"]
floats = st.sampled_from(FLOATS)
seeds = st.integers(0, 2**32 - 1)
sizes = st.one_of(st.integers(0, 40), st.sampled_from([1000, 8191, 8192, 8193, 20_000]))
SPECIAL = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-7, 65504.0]


def values(dtype, size, seed):
    """Random values among which special ones and ties are frequent."""
    rng = np.random.default_rng(seed)
    drawn = rng.standard_normal(size) ** 3 * 10.0 ** rng.integers(-3, 3)
    kind = rng.integers(0, 3)
    if kind == 0:
        drawn = np.round(drawn)
    if kind == 1:
        drawn = np.where(rng.random(size) < 0.3, rng.choice(SPECIAL, size), drawn)
    if dtype.kind in "biu":
        drawn = np.nan_to_num(drawn, posinf=9, neginf=-9) * 7
    if dtype.kind == "c":
        drawn = drawn + 1j * np.nan_to_num(drawn[::-1], posinf=9, neginf=-9)
    with np.errstate(all="ignore"):
        return drawn.astype(dtype)


def indices(size, seed, dtype=np.uint32, top=None):
    rng = np.random.default_rng(seed)
    top = top or max(1, 3 * size)
    chosen = np.unique(rng.integers(0, top, size, dtype=np.uint64))
    return chosen.astype(dtype)


def equal(a, b):
    assert type(a) is type(b) or np.asarray(a).dtype == np.asarray(b).dtype
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def same_entries(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        equal(a, b)


def same_values(a, b):
    """Equal bits, but for those of NaN."""
    assert a.dtype == b.dtype
    if (b != b).any():  # NumPy does not take NaN of bfloat16 for equal
        a, b = (x.astype(np.float32) if x.dtype.kind == "V" else x for x in (a, b))
        np.testing.assert_array_equal(a, b)
    else:
        equal(a, b)


@FEW
@given(ordered, sizes, seeds, st.data())
def test_threshold_selection(dtype, size, seed, data):
    v = values(dtype, size, seed)
    keys = reference.magnitude_keys(v)
    key = int(data.draw(st.sampled_from([0, 1, *keys[:5].tolist(), int(keys.max(initial=0)) + 1, 1 << 64])))
    own = data.draw(st.sampled_from([None, np.uint32, np.uint64]))
    i = None if own is None else np.arange(3, size + 3).astype(own) * own(2)
    same_entries(cpu.select_at_least(v, key, 3, indices=i), reference.select_at_least(v, key, indices=i))
    v.flags.writeable = False
    same_entries(cpu.select_at_least(v, key, 3, indices=i), reference.select_at_least(v, key, indices=i))
    assert cpu.count_at_least(v, key) == reference.count_at_least(v, key)
    assert cpu.key_range(v) == reference.key_range(v)
    ties = data.draw(st.integers(0, size))
    if key < 1 << 64 and key <= np.iinfo(keys.dtype).max:
        same_entries(cpu.topk_by_key(v, key, ties, indices=i), reference.topk_by_key(v, key, ties, indices=i))


@FEW
@given(ordered, sizes, seeds, st.data())
def test_fused_accumulation_moments_and_clearing(dtype, size, seed, data):
    v, g = values(dtype, size, seed), values(dtype, size, seed + 1)
    if dtype.kind == "f" and data.draw(st.booleans()):
        with np.errstate(all="ignore"):
            g = g.astype(data.draw(floats))
    scale = data.draw(st.sampled_from([1.0, 0.1, -3.0])) if dtype.kind == "f" else 1
    work = Pass(add=data.draw(st.sampled_from([None, (g, scale)])), clear=data.draw(st.booleans()))
    k = data.draw(st.integers(0, size))
    for name, argument, moments in (
        ("select_at_least", 1, True),
        ("select_at_least", 1 << 20, False),
        ("topk", k, False),
    ):
        mine, theirs, sums = v.copy(), v.copy(), (np.zeros(4), np.zeros(4))
        extra = [{"moments": m} if moments else {} for m in sums]
        found = getattr(cpu, name)(mine, argument, work=work, **extra[0])
        with np.errstate(all="ignore"):
            expected = getattr(reference, name)(theirs, argument, work=work, **extra[1])
        for a, b in ((mine, theirs), sums, *zip(found, expected, strict=True)):
            same_values(a, b)


@FEW
@given(ordered, sizes, seeds)
def test_moments_of_every_type_are_compiled(dtype, size, seed):
    v = values(dtype, size, seed)
    expected, alone, together = reference.moments_of(v), cpu.moments_of(v), np.empty(4)
    cpu.select_at_least(v, 1, moments=together)
    for moments in (alone, together):
        same_values(moments, expected)
    assert cpu.moments_of is not reference.moments_of  # 20 times slower


@FEW
@given(ordered, sizes, seeds, st.data())
def test_selection_from_a_source(dtype, size, seed, data):
    """The source and the addend stay as they are, and the values that are not selected have the right bits."""
    v, g = (values(dtype, size, seed + s) for s in (0, 1))
    if dtype.kind == "f" and data.draw(st.booleans()):
        with np.errstate(all="ignore"):
            g = g.astype(data.draw(floats))
    before = v.tobytes(), g.tobytes()
    scale = data.draw(st.sampled_from([1.0, 0.1, -3.0])) if dtype.kind == "f" else 1
    work = Pass(v, add=data.draw(st.sampled_from([None, (g, scale)])), clear=data.draw(st.booleans()))
    for name, argument in (
        ("select_at_least", 1),
        ("select_at_least", 1 << 20),
        ("select_at_least", 1 << 64),
        ("topk", data.draw(st.integers(0, size))),
    ):
        mine, theirs = np.ones(size, dtype), np.ones(size, dtype)
        found = getattr(cpu, name)(mine, argument, work=work)
        with np.errstate(all="ignore"):
            expected = getattr(reference, name)(theirs, argument, work=work)
        for a, b in ((mine, theirs), *zip(found, expected, strict=True)):
            same_values(a, b)
    assert (v.tobytes(), g.tobytes()) == before


# Each is compiled, which takes long: dtypes of values and of an addend; clear, nesterov and in place.
PASSES = pairwise(map(str, FLOATS), (None, "its own", "float64"), *[(False, True)] * 3)


@pytest.mark.parametrize(("dtype", "other", "clear", "nesterov", "in_place"), PASSES)
@settings(FEW, max_examples=10)
@given(sizes, seeds, st.sampled_from([0.0, 0.7]), st.floats(0, 1))
def test_momentum_in_the_pass_that_selects(dtype, other, clear, nesterov, in_place, size, seed, factor, share):
    """Velocities are formed, and all else is done, as if momentum came first; in place, or from a source."""
    gradient, velocity, g = (values(np.dtype(dtype), size, seed + s) for s in range(3))
    add = (g.astype(dtype if other == "its own" else other), 0.5) if other else None
    k = int(share * size)
    for name, argument, moments in (
        ("form", None, False),
        ("select_at_least", 1, True),
        ("select_at_least", 1, False),
        ("select_at_least", 1 << 64, False),
        ("topk", k, False),
    ):
        results = []
        for kernels in (cpu, reference):
            given, new, sums = gradient.copy(), np.ones(size, dtype), np.zeros(4)
            mine = given if in_place else np.ones(size, dtype)
            work = Pass(None if in_place else given, Momentum(velocity, factor, new, nesterov), add, clear)
            arguments, options = () if argument is None else (argument,), {"moments": sums} if moments else {}
            with np.errstate(all="ignore"):
                found = getattr(kernels, name)(mine, *arguments, work=work, **options)
            results.append((*(found or ()), mine, new, sums))
            assert in_place or given.tobytes() == gradient.tobytes()
        for a, b in zip(*results, strict=True):
            np.testing.assert_array_equal(a, b)
        if name == "form":
            every, given = slice(1, None, 3), gradient.copy()
            work = Pass(None, Momentum(velocity, factor, np.ones(size, dtype), nesterov), add, clear)
            with np.errstate(all="ignore"):
                np.testing.assert_array_equal(sampling.sample_of(given, work, every, cpu.form), results[0][0][every])
            assert given.tobytes() == gradient.tobytes()


@FEW
@given(ordered, sizes, seeds, st.floats(0, 1))
def test_exact_top_k(dtype, size, seed, share):
    v = values(dtype, size, seed)
    k = int(share * size)
    same_entries(cpu.topk(v, k), reference.topk(v, k))
    if k:
        assert cpu.kth_key(v, k) == reference.kth_key(v, k)


def test_exact_top_k_survives_a_sample_that_misleads():
    """Large values exactly where the strided sample looks: its bound is far too high."""
    v = np.ones(1 << 18, np.float32)
    v[:: (1 << 18) // sampling.SMALL] = 100
    for k in (100, 1 << 15, (1 << 15) + 5000):
        same_entries(cpu.topk(v, k), reference.topk(v, k))
        mine = v.copy()
        taken, _ = cpu.topk(mine, k, work=Pass(add=(v, 2.0), clear=True))
        assert not mine[taken].any() and np.count_nonzero(mine) == v.size - k
        np.testing.assert_array_equal(np.delete(mine, taken), 3 * np.delete(v, taken))


@FEW
@given(st.integers(1, 2**40), st.integers(0, 500), st.integers(0, 2**64 - 1))
def test_random_indices(length, count, key):
    chosen = reference.random_indices(length, count, key)
    assert chosen.size == min(count, length) and cpu.first_unsorted(chosen, length) == -1


def test_output_grows_when_the_guess_was_short():
    v = np.arange(1, 300_001, dtype=np.float32)
    v[:200_000] *= -1e-9
    for key in (1, key_of(1.0, v.dtype)):
        mine = v.copy()
        found = cpu.select_at_least(mine, key, 0, work=Pass(add=(v, 1.0), clear=True))
        same_entries(found, reference.select_at_least(2 * v, key))
    assert np.count_nonzero(mine) == 200_000


def test_ties_go_to_lower_positions():
    v = np.array([2, -3, 3, 2, -2, 3], np.float32)
    for kernels in (cpu, reference):
        assert kernels.topk(v, 2)[0].tolist() == [1, 2]
        assert kernels.topk(v, 4)[0].tolist() == [0, 1, 2, 5]


@FEW
@given(dtypes, st.lists(st.tuples(sizes, seeds), max_size=7), st.sampled_from([np.uint32, np.uint64]), seeds)
def test_merge_sum(dtype, shapes, index_dtype, seed):
    """Random floats, so that only the same order of addition gives the same bits; windows of every fill."""
    top = int(np.random.default_rng(seed).choice([5, 1000, 70_000, 2**32 - 1] + [2**60] * (index_dtype == np.uint64)))
    parts = []
    for size, s in shapes:
        i = indices(size, s, index_dtype, top)
        v = np.nan_to_num(values(dtype, i.size, s), nan=1) if dtype.kind == "f" else values(dtype, i.size, s)
        parts.append((i, v))
    for a, b in zip(
        cpu.merge_sum(parts, accumulator_dtype(dtype)),
        reference.merge_sum(parts, accumulator_dtype(dtype)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
        if not np.isnan(np.asarray(b, np.float64)).any():
            assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_first_of_several_nan_stays(dtype, dense, monkeypatch):
    """In every way to merge, so that ranks that merge in different ways have the same bits."""
    monkeypatch.setattr(cpu.merge, "are_dense", lambda *_: dense)
    parts = []
    for seed in range(4):
        i = indices(300, seed, top=400)
        v = np.random.default_rng(seed).choice(np.array([np.nan, -np.nan, np.inf, -np.inf, 1, -0.0], dtype), i.size)
        parts.append((i, v))
    same_entries(cpu.merge_sum(parts, np.dtype(dtype)), reference.merge_sum(parts, np.dtype(dtype)))


@FEW
@given(dtypes, sizes, seeds)
def test_scatter(dtype, size, seed):
    dense = np.nan_to_num(values(dtype, 3 * size + 1, seed))
    i = indices(size, seed)
    v = np.nan_to_num(values(dtype, i.size, seed + 1))
    for subtract in (False, True):
        mine, theirs = dense.copy(), dense.copy()
        cpu.scatter_add(mine, i, v, subtract)
        reference.scatter_add(theirs, i, v, subtract)
        np.testing.assert_array_equal(mine, theirs)


@FEW
@given(sizes, seeds, seeds, st.sampled_from([np.uint32, np.uint64]))
def test_intersect_and_disorder(size, seed, other, dtype):
    a, b = indices(size, seed, dtype), indices(size // 2, other, dtype)
    for invert in (False, True):
        equal(cpu.where_in(a, b, invert), reference.where_in(a, b, invert))
    shuffled = np.random.default_rng(seed).permutation(a)
    for array in (a, b, shuffled, np.repeat(a, 2)):
        for length in (0, 1, int(a.max(initial=0)), int(a.max(initial=0)) + 1, 2**63 - 1):
            assert cpu.first_unsorted(array, length) == reference.first_unsorted(array, length)


@FEW
@given(dtypes, st.floats(0, 1e30))
def test_key_of_is_the_smallest_key_that_reaches_the_threshold(dtype, threshold):
    if dtype.kind != "f":
        threshold = threshold % 1e6
    key = key_of(threshold, dtype)
    assert magnitude_of(key, dtype) >= threshold
    if key:
        assert magnitude_of(key - 1, dtype) < threshold


def test_choice_of_kernels(monkeypatch):
    from sparsecoll import kernels

    kernels.host_kernels.cache_clear()
    monkeypatch.setenv("SPARSECOLL_KERNELS", "reference")
    assert kernels.kernels_of(np.empty(0)) is reference
    kernels.host_kernels.cache_clear()
    monkeypatch.setenv("SPARSECOLL_KERNELS", "gpu")
    with pytest.raises(ValueError, match="SPARSECOLL_KERNELS"):
        kernels.kernels_of(np.empty(0))
    kernels.host_kernels.cache_clear()
    monkeypatch.setenv("SPARSECOLL_KERNELS", cpu.lanes.SET)
    assert kernels.kernels_of(np.empty(0)) is cpu
    kernels.host_kernels.cache_clear()
    monkeypatch.delenv("SPARSECOLL_KERNELS")
    assert kernels.kernels_of(np.empty(0)) is cpu
    with pytest.raises(TypeError, match=r"expected a numpy\.ndarray"):
        kernels.kernels_of([1])
