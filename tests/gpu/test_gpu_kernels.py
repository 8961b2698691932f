"""GPU kernels equal the reference to the last bit. Without a GPU the CUDA sources run on the host, see fake_cupy.py."""

import numpy as np
import pytest
from gpu_cases import FEW, all_same, dtypes, index_dtypes, indices, same, seeds, sizes, values
from hypothesis import given, strategies as st

from sparsecoll.kernels import reference
from sparsecoll.kernels.keys import COMPILED_DTYPES, Momentum, Pass, key_of
from sparsecoll.kernels.sampling import stride_for
from sparsecoll.vector import accumulator_dtype


@pytest.fixture(params=["forwards", "backwards"])
def order(request, cp, monkeypatch):
    """Threads of a block in either order: a barrier that is missing shows (only where the GPU is pretended)."""
    if request.param == "backwards":
        if request.node.callspec.params.get("dtype", np.dtype("f4")) != np.float32:
            pytest.skip("float32 stands for all")
        if not hasattr(cp, "pretend"):
            pytest.skip("a GPU has its own order")
        monkeypatch.setenv("SPARSECOLL_THREAD_ORDER", "1")


@pytest.mark.parametrize("dtype", COMPILED_DTYPES, ids=str)
@FEW
@given(size=sizes, seed=seeds, data=st.data())
def test_threshold_selection_equals_the_reference(cp, gpu, order, dtype, size, seed, data):
    v = values(dtype, size, seed)
    keys = reference.magnitude_keys(v)
    key = int(data.draw(st.sampled_from([0, 1, *keys[:5].tolist(), int(keys.max(initial=0)) + 1, 1 << 64])))
    own = data.draw(st.sampled_from([None, np.uint32, np.uint64]))
    i = None if own is None else np.arange(3, size + 3).astype(own) * own(2)
    on = None if i is None else cp.asarray(i)
    all_same(gpu.select_at_least(cp.asarray(v), key, 3, indices=on), reference.select_at_least(v, key, indices=i))
    assert gpu.count_at_least(cp.asarray(v), key) == reference.count_at_least(v, key)
    assert gpu.key_range(cp.asarray(v)) == reference.key_range(v)
    same(gpu.magnitude_keys(cp.asarray(v)), keys)
    ties = data.draw(st.integers(0, size))
    if key <= np.iinfo(keys.dtype).max:
        all_same(gpu.topk_by_key(cp.asarray(v), key, ties, indices=on), reference.topk_by_key(v, key, ties, indices=i))


@pytest.mark.parametrize("dtype", COMPILED_DTYPES, ids=str)
@FEW
@given(size=sizes, seed=seeds, data=st.data())
def test_fused_accumulation_moments_and_clearing(cp, gpu, order, dtype, size, seed, data):
    v, g = values(dtype, size, seed), values(dtype, size, seed + 1)
    if dtype.kind == "f":
        with np.errstate(all="ignore"):
            g = g.astype(data.draw(st.sampled_from(["float16", "float32", "float64"])))
    scale = data.draw(st.sampled_from([1.0, 0.1, -3.0])) if dtype.kind == "f" else 1
    add, clear = data.draw(st.booleans()), data.draw(st.booleans())
    key, k = data.draw(st.sampled_from([1, 1 << 20, 1 << 64])), data.draw(st.integers(0, size))
    expected = data.draw(st.sampled_from([0, size]))
    velocity = values(dtype, size, seed + 2)
    momentum = data.draw(st.sampled_from([None, False, True])) if dtype.kind == "f" else None  # or Nesterov's
    for name, arguments, moments in (
        ("select_at_least", (key, expected), True),
        ("select_at_least", (key, expected), False),
        ("topk", (k,), False),
    ):
        mine, theirs, sums = cp.asarray(v), v.copy(), (np.zeros(4), np.zeros(4))
        extra = [{"moments": m} if moments else {} for m in sums]
        news = cp.asarray(velocity), velocity.copy()
        momenta = [None, None]
        if momentum is not None:
            olds = cp.asarray(velocity), velocity
            momenta = [Momentum(old, 0.7, new, momentum) for old, new in zip(olds, news, strict=True)]
        addends = [(array, scale) if add else None for array in (cp.asarray(g), g)]
        works = [Pass(None, *given, clear) for given in zip(momenta, addends, strict=True)]
        found = getattr(gpu, name)(mine, *arguments, work=works[0], **extra[0])
        with np.errstate(all="ignore"):
            wanted = getattr(reference, name)(theirs, *arguments, work=works[1], **extra[1])
        all_same(found, wanted)
        same(mine, theirs)
        same(*sums)
        same(*news)


@pytest.mark.parametrize("dtype", COMPILED_DTYPES, ids=str)
@FEW
@given(size=sizes, seed=seeds, share=st.floats(0, 1))
def test_exact_top_k(cp, gpu, dtype, size, seed, share):
    v = values(dtype, size, seed)
    k = int(share * size)
    all_same(gpu.topk(cp.asarray(v), k), reference.topk(v, k))
    if k:
        assert gpu.kth_key(cp.asarray(v), k) == reference.kth_key(v, k)


def test_exact_top_k_of_many_by_candidates_and_when_the_sample_misleads(cp, gpu):
    rng = np.random.default_rng(0)
    v = rng.standard_normal(60_000).astype(np.float32)
    for k in (1, 600, 20_000, 45_000, 59_999):
        all_same(gpu.topk(cp.asarray(v), k), reference.topk(v, k))
    stride, half = stride_for(v.size, max(v.size >> 7, 1 << 13)), v.size // 2
    v[:] = 1
    v[:half:stride] = v[half :: stride_for(stride + 1, 1)] = 100
    for k in (100, 9000):
        cleared, theirs = cp.asarray(v), v.copy()
        all_same(gpu.topk(cleared, k, work=Pass(clear=True)), reference.topk(theirs, k, work=Pass(clear=True)))
        same(cleared, theirs)


@pytest.mark.parametrize("few", [0, 4096])
def test_segments_follow_each_other(cp, gpu, monkeypatch, few):
    """A vector longer than one launch can count: ties and positions go on over its segments; both kinds of launch."""
    monkeypatch.setattr(gpu.selection, "SEGMENT", 4096)
    monkeypatch.setattr(gpu.selection, "FEW_TILES", few)
    v = np.round(np.random.default_rng(1).standard_normal(13_000) * 2).astype(np.float32)
    key = int(key_of(2.0, v.dtype))
    for ties in (0, 1, 700, 13_000):
        all_same(gpu.topk_by_key(cp.asarray(v), key, ties), reference.topk_by_key(v, key, ties))
    mine, theirs, sums = cp.asarray(v), v.copy(), (np.zeros(4), np.zeros(4))
    found = gpu.select_at_least(mine, key, 5, moments=sums[0], work=Pass(add=(cp.asarray(v), 1.0), clear=True))
    work = Pass(add=(v, 1.0), clear=True)
    all_same(found, reference.select_at_least(theirs, key, moments=sums[1], work=work))
    same(mine, theirs)
    same(*sums)


@pytest.mark.parametrize("few", [0, 4096])
def test_more_tiles_than_a_group_has(cp, gpu, monkeypatch, few):
    """Entries go behind those of all groups before, staged or not, and ties are counted over all of them."""
    monkeypatch.setattr(gpu.selection, "FEW_TILES", few)
    v = np.round(np.random.default_rng(2).standard_normal(300_001) * 3).astype(np.float32)
    v[50_000:200_000] = 1  # whole tiles of ties, some of whole groups
    key = int(key_of(1.0, v.dtype))
    for ties in (0, 10_000, 180_000, v.size):
        all_same(gpu.topk_by_key(cp.asarray(v), key, ties), reference.topk_by_key(v, key, ties))
    for expected in (5, v.size):
        mine, theirs = cp.asarray(v), v.copy()
        found = gpu.select_at_least(mine, key, expected, work=Pass(add=(cp.asarray(v), 0.5), clear=True))
        all_same(found, reference.select_at_least(theirs, key, work=Pass(add=(v, 0.5), clear=True)))
        same(mine, theirs)
    all_same(gpu.topk(cp.asarray(v), 30_000), reference.topk(v, 30_000))


@FEW
@given(dtype=dtypes, size=sizes, seed=seeds, scale=st.sampled_from([1.0, 0.3, -2.0]))
def test_accumulation_equals_the_reference(cp, gpu, dtype, size, seed, scale):
    v, g = values(dtype, size, seed), values(dtype, size, seed + 7)
    mine, scale = cp.asarray(v), scale if dtype.kind == "f" else 2
    gpu.form(mine, Pass(add=(cp.asarray(g), scale)))
    reference.form(v, Pass(add=(g, scale)))
    same(mine, v)


@pytest.mark.parametrize("spread", [3, 1000])
@FEW
@given(dtype=dtypes, size=sizes, seed=seeds, parts=st.integers(1, 5), own=index_dtypes)
def test_sum_of_sparse_vectors(cp, gpu, spread, dtype, size, seed, parts, own):
    """In a dense window where they are dense, by sorting where they are not."""
    dtype = np.dtype(dtype)
    rows = [indices(size // 3 + p, seed + p, own, max(1, spread * size)) for p in range(parts)]
    given_parts = [(row, values(dtype, row.size, seed + row.size)) for row in rows]
    on = [(cp.asarray(i), cp.asarray(v)) for i, v in given_parts]
    with np.errstate(all="ignore"):
        all_same(
            gpu.merge_sum(on, accumulator_dtype(dtype)), reference.merge_sum(given_parts, accumulator_dtype(dtype))
        )


@FEW
@given(dtype=dtypes, size=sizes, seed=seeds, own=index_dtypes)
def test_scattering_equals_the_reference(cp, gpu, dtype, size, seed, own):
    dense, i = values(np.dtype(dtype), 3 * size + 1, seed), indices(size, seed, own)
    v = values(np.dtype(dtype), i.size, seed + 1)
    for subtract in (False, True):
        mine, theirs = cp.asarray(dense), dense.copy()
        gpu.scatter_add(mine, cp.asarray(i), cp.asarray(v), subtract)
        with np.errstate(all="ignore"):
            reference.scatter_add(theirs, i, v, subtract)
        same(mine, theirs)
    for divisor in (None, 3) if dense.dtype.kind == "f" else (None,):
        mine, theirs = cp.asarray(dense), dense.copy()
        gpu.write_dense(mine, cp.asarray(i), cp.asarray(v), divisor)
        with np.errstate(all="ignore"):
            reference.write_dense(theirs, i, v, divisor)
        same(mine, theirs)
    if dense.dtype.char in "fd":
        mine, theirs, other = cp.asarray(dense), dense.copy(), indices(size, seed + 3, own)
        parts = [(i, v), (other, values(np.dtype(dtype), other.size, seed + 4))]
        gpu.write_sum(mine, [(cp.asarray(a), cp.asarray(b)) for a, b in parts], 3, 2)
        with np.errstate(all="ignore"):
            reference.write_sum(theirs, parts, 3, 2)
        same(mine, theirs)
    if dense.dtype == np.float16:  # NumPy adds pairs of halves in half, as we do
        v = v.astype(np.float16)
    many = np.random.default_rng(seed).integers(0, dense.size + 3, size).astype(own)
    v = values(np.dtype(dtype), size, seed + 2)
    mine, theirs = cp.asarray(dense), dense.copy()
    assert gpu.scatter_add_marked(mine, cp.asarray(many), cp.asarray(v)) == reference.scatter_add_marked(
        theirs, many, v
    )
    same(mine, theirs)


@FEW
@given(size=sizes, seed=seeds, own=index_dtypes)
def test_what_lists_of_indices_share(cp, gpu, size, seed, own):
    a, b = indices(size, seed, own), indices(size // 2, seed + 1, own, max(1, 3 * size))
    for invert in (False, True):
        same(gpu.where_in(cp.asarray(a), cp.asarray(b), invert), reference.where_in(a, b, invert))
    assert gpu.first_unsorted(cp.asarray(a), 3 * size + 1) == reference.first_unsorted(a, 3 * size + 1) == -1
    if a.size > 2:
        a[a.size // 2] = a[a.size // 2 - 1]
        assert gpu.first_unsorted(cp.asarray(a), 3 * size) == reference.first_unsorted(a, 3 * size)
        assert gpu.first_unsorted(cp.asarray(a), 1) == reference.first_unsorted(a, 1)


@FEW
@given(length=st.sampled_from([1, 2, 1000, 2**32, 2**40 + 3]), count=st.integers(0, 700), key=st.integers(0, 2**63))
def test_random_indices(cp, gpu, length, count, key):
    same(gpu.random_indices(length, count, key), reference.random_indices(length, count, key))


@pytest.mark.parametrize("dtype", COMPILED_DTYPES, ids=str)
def test_sums_copies_and_scatter_additions_of_rows(cp, gpu, order, dtype):
    for width in (1, 5):
        parts = [values(dtype, size * width, size).reshape(size, width) for size in (40, 0, 700)]
        rng = np.random.default_rng(width)
        lengths = rng.integers(1, 4, 740)
        starts = np.unique(np.minimum(np.cumsum([0, *lengths]), 740))
        numbers = rng.permutation(740)
        mine, theirs = cp.asarray(np.ones((starts.size - 1, width), dtype)), np.ones((starts.size - 1, width), dtype)
        gpu.sum_rows([cp.asarray(part) for part in parts], cp.asarray(numbers), cp.asarray(starts), mine)
        reference.sum_rows(parts, numbers, starts, theirs)
        same(mine, theirs)
        taken = cp.asarray(np.ones((50, width), dtype))
        gpu.take_rows(cp.asarray(parts[2]), cp.asarray(numbers[:50] % 700), taken)
        same(taken, parts[2][numbers[:50] % 700])
        rows, table = np.sort(numbers[:40]), values(dtype, 740 * width, 3).reshape(740, width)
        on = cp.asarray(table)
        gpu.scatter_add_rows(on, cp.asarray(rows), cp.asarray(parts[0]))
        reference.scatter_add_rows(table, rows, parts[0])
        same(on, table)
