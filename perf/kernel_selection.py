"""Sections of kernels.py: what selection costs, alone and fused with error feedback."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import kernel_inputs
import numpy as np
import torch
from kernel_inputs import DENSITIES, LARGE, arrays, medians
from report import Row

from sparsecoll import DenseVector, Residual, select


def threshold(options: argparse.Namespace) -> Iterator[Row]:
    """Selection of the entries above a known threshold (select.threshold), compared with np.sum of the array."""
    for name, x in arrays(options):
        for density in DENSITIES:
            k = round(density * x.size)
            t = DenseVector(x).topk(k)._kth_magnitude(k)
            ours = partial(DenseVector(x).threshold, t, k)
            base, mine = medians([partial(np.sum, x), ours], options.repeat)
            yield {"data": name, "density": density, "ms": mine * 1e3, "np.sum ms": base * 1e3, "x np.sum": mine / base}


def topk(options: argparse.Namespace) -> Iterator[Row]:
    """Exact top-k (select.topk), compared with np.sum, np.argpartition(-|x|) and torch.topk(|x|)."""
    for name, x in arrays(options):
        tensor = torch.from_numpy(x)
        for density in DENSITIES:
            k = round(density * x.size)
            base, mine = medians([partial(np.sum, x), partial(select.topk, x, k)], options.repeat)
            row = {"data": name, "density": density, "ms": mine * 1e3, "x np.sum": mine / base}
            if density == 0.01:
                peers: list[Callable[[], object]] = [
                    lambda x=x, k=k: np.argpartition(np.abs(x), x.size - k)[x.size - k :],
                    lambda t=tensor, k=k: torch.topk(t.abs(), k, sorted=False),
                ]
                partition, torches = medians(peers, max(1, options.repeat // 4) if x.size < LARGE else 1)
                row |= {"np.argpartition, times slower": partition / mine, "torch.topk, times slower": torches / mine}
            yield row


def edges(options: argparse.Namespace) -> Iterator[Row]:
    """Exact top-k (select.topk) of 1 % of unusual values, compared with that of normal ones of as many bytes."""
    usual = 0.0
    for name, x in kernel_inputs.edges(options.sizes[0], options.sizes[0] // 100):
        [mine] = medians([partial(select.topk, x, x.size // 100)], options.repeat)
        usual = usual or mine
        yield {"data": name, "n": x.size, "ms": mine * 1e3, "x normal": mine / usual}


def fused(options: argparse.Namespace) -> Iterator[Row]:
    """Residual.take (add the gradient, select, clear the selected entries), compared with np.add(a, b, out=a)."""
    makers = {
        "threshold (reused)": partial(select.ThresholdReuse, 10**9),
        "exact top-k": select.TopK,
        "DGC": select.SampledThreshold,
        "Gaussian-k": select.GaussianK,
        "MSTopk": select.MSTopK,
        "random-k": select.RandomK,
    }
    for name, x in arrays(options):
        timed = dict(list(makers.items())[:2]) if options.brief or x.size >= LARGE else makers
        gradient = np.asarray(
            np.random.default_rng(1).standard_normal(x.size, dtype=np.float32) * np.abs(x).mean() / 10
        )
        residual = Residual(x.size)
        for density in DENSITIES:
            k = round(density * x.size)
            calls: list[Callable[[], object]] = [partial(np.add, residual.array, gradient, out=residual.array)]
            calls += [partial(residual.take, gradient, maker(), k) for maker in timed.values()]

            def reset(array: np.ndarray = residual.array, x: np.ndarray = x) -> None:
                array[:] = x

            base, *mine = medians(calls, options.repeat if x.size < LARGE else max(3, options.repeat // 2), reset)
            yield {"data": name, "density": density, "np.add ms": base * 1e3} | {
                f"{selector}, x np.add": seconds / base for selector, seconds in zip(timed, mine, strict=True)
            }
