"""The largest of each chunk: the kernels have the same bits, the right entries, and the least error."""

import numpy as np
import pytest

from sparsecoll.kernels import cpu, reference
from sparsecoll.kernels.keys import Chunks, Pass
from sparsecoll.kernels.reference.rice import RICE_PAD


def cut(lengths, chunk=4096, k=64, shared=32):
    """Chunks of successive parameters."""
    edges, blocks, start = [], [], 0
    for length in lengths:
        own = [*range(start, start + length, chunk)]
        blocks += range(len(edges), len(edges) + len(own), shared)
        edges, start = edges + own, start + length
    edges = np.array([*edges, start], np.int64)
    return Chunks(edges, np.array([*blocks, edges.size - 1]), np.maximum(1, k * np.diff(edges) // chunk))


def taken(kernels, x, chunks, work=None):
    with np.errstate(all="ignore"):
        rest = x.copy()
        return rest, kernels.chunk_topk(rest, work or Pass(), chunks)


def starts(chunks):
    return chunks.edges[chunks.blocks[:-1]]


SHAPES = {
    "no chunk": cut([]),
    "one short chunk": cut([5]),
    "two chunks and a short one": cut([10_000]),
    "parameters of many lengths": cut([100, 5000, 1, 4096, 4097, 63, 64], shared=1),
    "short chunks": cut([300] * 7, 64, 3, 2),
    "all values": cut([1000], 100, 100, 3),
    "many chunks": cut([50_000], shared=4),
}
DATA = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "all equal": lambda rng, n: np.where(rng.random(n) < 0.5, -1.0, 1.0),
    "zeros": lambda rng, n: np.zeros(n),
    "few": lambda rng, n: np.where(rng.random(n) < 0.01, rng.standard_normal(n), -0.0),
    "heavy tails": lambda rng, n: rng.standard_t(2, n) ** 5,
    "ties": lambda rng, n: np.round(rng.standard_normal(n)),
    "scales that change": lambda rng, n: rng.standard_normal(n) * np.exp2(np.arange(n) // 256 % 41 - 20),
    "subnormal": lambda rng, n: rng.standard_normal(n) * 1e-39,
    "subnormal in float64": lambda rng, n: rng.standard_normal(n) * 1e-310,
    "huge": lambda rng, n: rng.choice([3.4e38, -1e38, 1e30], n),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_equal_the_reference(shape, data, dtype):
    chunks, rng = SHAPES[shape], np.random.default_rng(1)
    n = int(chunks.edges[-1])
    x, addend = (DATA[data](rng, n).astype(dtype) for _ in range(2))
    add = (addend * dtype(0.125), 0.95)
    for given, work in ((x, Pass()), (np.full_like(x, 7), Pass(x, add=add)), (x, Pass(add=add))):
        rest, (wrong, *own) = taken(cpu, given, chunks, work)
        expected, (there, *theirs) = taken(reference, given, chunks, work)
        assert wrong == there
        if wrong >= 0:
            continue
        for a, b in zip((rest, *own), (expected, *theirs), strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for add_to in (False, True):
            sums = [x.copy(), x.copy()]
            for kernels, out in zip((cpu, reference), sums, strict=True):
                with np.errstate(over="ignore", invalid="ignore"):
                    kernels.chunk_sum([own, own, own], starts(chunks), 3, out, add_to)
            assert sums[0].tobytes() == sums[1].tobytes()


@pytest.mark.parametrize("kernels", [cpu, reference])
@pytest.mark.parametrize("data", ["normal", "ties", "few"])
def test_the_largest_of_each_chunk_leave_what_is_not_sent(kernels, data):
    chunks = SHAPES["parameters of many lengths"]
    x = DATA[data](np.random.default_rng(2), int(chunks.edges[-1]))
    rest, (_, *own) = taken(kernels, x, chunks)
    expected = []
    for start, stop, count in zip(chunks.edges, chunks.edges[1:], chunks.counts, strict=False):
        order = sorted(range(start, stop), key=lambda i: (-abs(x[i]), i))[:count]
        expected += sorted(i for i in order if x[i] != 0)
    assert own[0].tolist() == expected
    sent = np.empty_like(x)
    kernels.chunk_sum([own], starts(chunks), 1, sent, False)
    np.testing.assert_allclose(sent + rest, x, rtol=0, atol=1e-12)
    assert set(np.flatnonzero(sent)) == set(expected) and (np.sign(sent) * np.sign(x) >= 0).all()


@pytest.mark.parametrize("kernels", [cpu, reference])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_the_first_value_that_is_not_finite_is_named(kernels, value):
    x = np.random.default_rng(3).standard_normal(30_000).astype(np.float32)
    x[[9_000, 9_100, 29_999]] = value, value, np.inf
    assert taken(kernels, x, cut([30_000]))[1][0] == 9_000


@pytest.mark.parametrize(("draw", "published"), [("standard_normal", 0.0123), ("standard_t", 0.234)])
def test_the_squared_error_is_at_most_two_fifths_of_that_of_published_code(draw, published):
    """Four bins of 6 standard deviations around the mean, rounded, with their means, as SparseLoCo's code has them."""
    n, rng = 1 << 20, np.random.default_rng(4)
    x = (rng.standard_normal(n) if draw == "standard_normal" else rng.standard_t(4, n)).astype(np.float32)
    rest, (_, indices, *_) = taken(cpu, x, cut([n]))
    chosen = x[indices].astype(np.float64)
    bins = np.clip(np.rint((chosen - chosen.mean()) / (1.5 * chosen.std()) + 2), 0, 3).astype(int)
    means = np.bincount(bins, chosen, 4) / np.maximum(np.bincount(bins, minlength=4), 1)
    theirs = ((chosen - means[bins]) ** 2).sum() / (chosen**2).sum()
    ours = (rest[indices].astype(np.float64) ** 2).sum() / (chosen**2).sum()
    assert theirs == pytest.approx(published, rel=0.1) and ours <= 0.4 * theirs
    # no boundary between the two magnitudes would be better by a hundredth
    magnitudes = np.sort(np.abs(chosen[:2048]))
    sums, count = np.cumsum(magnitudes)[:-1], np.arange(1, 2048)
    best = (magnitudes**2).sum() - (sums**2 / count + (magnitudes.sum() - sums) ** 2 / (2048 - count)).max()
    assert (rest[indices[:2048]].astype(np.float64) ** 2).sum() <= 1.01 * best


def test_an_index_takes_at_most_7_6_bits():
    x = np.random.default_rng(5).standard_normal(1 << 20)
    indices = taken(cpu, x, cut([1 << 20]))[1][1]
    table = cpu.rice_table(indices, 1024)
    size = table.nbytes + int(cpu.rice_offsets(table, indices.size, 1024)[-1]) + RICE_PAD
    assert indices.size == 64 * 256 and 8 * size <= 7.6 * indices.size
