"""Sections of kernels.py: what sums of sparse vectors and steps by them cost, and what a second thread gains."""

from __future__ import annotations

import argparse
import os
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from kernel_inputs import DENSITIES, heavy, medians
from report import Row

from sparsecoll import DenseVector, Residual, SparseVector, select
from sparsecoll.kernels import host_kernels, memory
from sparsecoll.kernels import threads as pool


def sorted_vectors(P: int, each: int, density: float, wide: bool) -> list[SparseVector]:
    """Return P vectors of so many entries at uniform indices, float32 with uint32 indices or (`wide`) 64 bits each."""
    rng = np.random.default_rng(0)
    gaps = [rng.geometric(density, each) for _ in range(P)]
    indices = [np.cumsum(g).astype(np.uint64 if wide else np.uint32) for g in gaps]
    n = max(int(i[-1]) for i in indices) + 1
    length = max(n, 2**32 + 1) if wide else n
    kind: Any = np.float64 if wide else np.float32
    return [SparseVector(i, rng.standard_normal(each).astype(kind), length) for i in indices]


def merge(options: argparse.Namespace) -> Iterator[Row]:
    """SparseVector.merge of P sorted vectors at uniform indices; uint32 and float32, or uint64 and float64.

    The density is that of each vector. Peak memory is in units of the bytes of the entries that go in.
    """
    total = 2_000_000
    cases = [(P, density, total // P, wide) for wide in (False, True) for P in (2, 4, 8, 64) for density in DENSITIES]
    cases += [(P, 1e-7, each, True) for each in (1_000, 100_000) for P in (2, 8)]
    for P, density, each, wide in cases:
        if density == 0.05:
            continue
        parts = sorted_vectors(P, each, density, wide)
        kind = parts[0].dtype
        (seconds,) = medians([partial(SparseVector.merge, parts, kind)], options.repeat)
        memory.release()
        tracemalloc.start()
        result = SparseVector.merge(parts, kind)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        yield {
            "vectors": f"{P} of {each} entries, {8 * kind.itemsize} bits",
            "density": density,
            "entries out": result.nnz,
            "peak memory": peak / (2 * kind.itemsize * P * each),
            "M entries/s": P * each / seconds / 1e6,
        }


RULE = {"lr": 0.1, "share": 0.25, "decay": 0.0, "momentum": 0.9, "damp": 1.0, "nesterov": False}


def _step_sparsely(params: Any, velocity: Any, parts: list[SparseVector]) -> None:
    total = SparseVector.merge(parts, parts[0].dtype)
    host_kernels().sgd_step(params, velocity, total.indices, total.values, 0, **RULE)


def _step_densely(optimizer: torch.optim.SGD, mean: Any, parts: list[SparseVector]) -> None:
    DenseVector(mean).copy_sum([parts], len(parts))
    optimizer.step()


def steps(options: argparse.Namespace) -> Iterator[Row]:
    """A step of SGD with momentum by the entries of 4 ranks: they are merged, and the kernel takes the step.

    The peers write their dense mean in one pass; then torch.optim.SGD takes the step, with its default or fused loop.
    """
    for size in options.sizes:
        for density in (0.001, 0.01, 0.1):
            parts = sorted_vectors(4, round(density * size), density, False)
            n = max(part.length for part in parts)
            parts = [SparseVector(part.indices, part.values, n) for part in parts]
            mean, *arrays = (torch.randn(n) for _ in range(3))
            calls: list[Callable[[], object]] = [partial(_step_sparsely, *(a.numpy() for a in arrays), parts)]
            for fused in (False, True):
                p = torch.nn.Parameter(torch.randn(n))
                p.grad = mean
                optimizer = torch.optim.SGD([p], RULE["lr"], momentum=RULE["momentum"], fused=fused)
                calls.append(partial(_step_densely, optimizer, mean.numpy(), parts))
            ours, default, fused_loop = medians(calls, options.repeat)
            yield {
                "n": n,
                "density": density,
                "sparse step, ms": ours * 1e3,
                "torch.optim.SGD, times slower": default / ours,
                "torch.optim.SGD(fused=True), times slower": fused_loop / ours,
            }


def threads(options: argparse.Namespace) -> Iterator[Row]:
    """One thread and two (SPARSECOLL_THREADS); the bits are the same."""

    def on(count: int, call: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            os.environ[pool.VARIABLE] = str(count)
            pool.allowed.cache_clear()
            call()

        return run

    for n in options.sizes:
        x = heavy(n)
        residual = Residual(n)
        calls: dict[str, Callable[[], object]] = {}
        for density in (0.01, 0.1):
            k = round(density * n)
            t = DenseVector(x).topk(k)._kth_magnitude(k)
            calls[f"threshold, density {density}"] = partial(DenseVector(x).threshold, t, k)
            calls[f"exact top-k, density {density}"] = partial(select.topk, x, k)
            calls[f"Residual.take, exact top-k, density {density}"] = partial(residual.take, x, select.TopK(), k)
            parts = [select.topk(np.roll(x, shift), k) for shift in range(4)]
            calls[f"merge of 4 vectors, density {density}"] = partial(SparseVector.merge, parts, x.dtype)
        for name, call in calls.items():
            one, two = medians([on(1, call), on(2, call)], options.repeat)
            yield {
                "work": name,
                "n": n,
                "1 thread, ms": one * 1e3,
                "2 threads, ms": two * 1e3,
                "times faster": one / two,
            }
