"""Exact top k of values that are few, equal, ordered or periodic: the same bits, in about the time of others."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from sparsecoll.kernels import cpu, memory, reference, sampling, threads
from sparsecoll.kernels.keys import Pass

N = 50_000


def sampled(n):
    """Whether an item is in the sample that bounds the k-th magnitude."""
    stride, at, half = stride_of(n), np.arange(n), n // 2
    return np.where(at < half, at % stride, (at - half) % sampling.stride_for(stride + 1, 1)) == 0


def stride_of(n):
    return sampling.stride_for(n, min(max(n >> 7, sampling.SMALL), cpu.selection.SAMPLE))


def few(rng, n, k):
    """Fewer nonzeros than k."""
    x = np.zeros(n)
    x[rng.choice(n, k // 2, replace=False)] = rng.standard_normal(k // 2)
    return x


SHAPES = {
    "usual": lambda rng, n, k: rng.standard_normal(n),
    "few nonzeros": few,
    "zeros of both signs": lambda rng, n, k: rng.choice([0.0, -0.0], n),
    "all equal": lambda rng, n, k: np.ones(n),
    "two levels": lambda rng, n, k: rng.choice([-1.0, 0, 0, 1], n),
    "levels": lambda rng, n, k: np.round(rng.standard_normal(n) * 2),
    "ascending": lambda rng, n, k: np.arange(n, dtype=float),
    "descending": lambda rng, n, k: np.arange(n, dtype=float)[::-1].copy(),
    "one is huge": lambda rng, n, k: np.where(np.arange(n) == n // 3, 1e30, rng.standard_normal(n)),
    "period of the stride": lambda rng, n, k: rng.standard_normal(n)[np.arange(n) % stride_of(n)],
    "subnormal": lambda rng, n, k: rng.standard_normal(n) * 1e-40,
    "all NaN": lambda rng, n, k: np.full(n, np.nan),
    "blocks": lambda rng, n, k: np.repeat(rng.standard_normal(n // 500 + 1), 500)[:n],
    "half zero": lambda rng, n, k: np.where(np.arange(n) < n // 2, rng.standard_normal(n), 0),
    "the sample is too large": lambda rng, n, k: np.where(sampled(n), 100, rng.standard_normal(n)),
    "the sample is too small": lambda rng, n, k: np.where(sampled(n), 1e-9, rng.standard_normal(n)),
}


def as_dtype(x, dtype):
    dtype = np.dtype(dtype)
    with np.errstate(all="ignore"):
        x = np.nan_to_num(x * (10 if np.abs(x).max(initial=0) < 20 else 1)) if dtype.kind in "biu" else x
        return x.astype(dtype)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(list(SHAPES)),
    st.sampled_from(["float32", "float64", "int8", "uint8", "int64", "uint64"]),
    st.sampled_from([1, 30, 500, 5000, 20_000, 30_000]),
    st.sampled_from([1, 3]),
    st.booleans(),
)
def test_the_top_k_of_values_at_the_edges_are_those_of_the_reference(shape, dtype, k, parts, clear):
    """Also where what is found is cut to k again and again, on several threads, with what is left behind."""
    x = as_dtype(SHAPES[shape](np.random.default_rng(k), N, k), dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu.selection, "SPARE", 0)
        patch.setattr(threads, "SHARED", 0)
        patch.setattr(threads, "allowed", lambda: parts)
        mine, theirs, work = x.copy(), x.copy(), Pass(clear=clear)
        found = cpu.topk(mine, k, work=work)
    for a, b in zip((*found, mine), (*reference.topk(theirs, k, work=work), theirs), strict=True):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if "sample" not in shape])
@pytest.mark.parametrize("seed", range(4))
def test_one_pass_finds_the_top_k_however_values_repeat(shape, seed, monkeypatch):
    """Values that repeat with the stride of the sample, among others, do not mislead it."""
    n, k, passes = 1 << 18, 1 << 12, []
    select = cpu.selection.select
    monkeypatch.setattr(cpu.selection, "select", lambda *given: passes.append(1) or select(*given))
    cpu.topk(as_dtype(SHAPES[shape](np.random.default_rng(seed), n, k), "float32"), k)
    assert len(passes) == 1


@pytest.mark.parametrize("dtype", ["float32", "int8", "uint8", "float64"])
@pytest.mark.parametrize("shape", SHAPES)
def test_memory_does_not_grow_with_ties(shape, dtype):
    n, k = 1 << 21, 3000
    x = as_dtype(SHAPES[shape](np.random.default_rng(0), n, k), dtype)
    cpu.topk(x, k)  # compiles
    memory.release()
    tracemalloc.start()
    cpu.topk(x, k)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * (2 * k + cpu.selection.SPARE + 4 * cpu.selection.CHUNK) * (4 + x.itemsize) + (1 << 19) < n * 4
