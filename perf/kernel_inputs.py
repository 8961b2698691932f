"""What kernels are timed on: gradients, synthetic and real ones, and calls timed in turns."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

DATA = Path(__file__).parent / "data"
DENSITIES = (0.001, 0.01, 0.05, 0.1)
LARGE = 30_000_000  # values; from here on fewer repetitions, and the fastest instruction set only


def medians(calls: list[Callable[[], object]], repeat: int, before: Callable[[], object] | None = None) -> list[float]:
    """Return the median seconds of each call; every round makes each once, and `before` runs untimed before it."""
    seconds: list[list[float]] = [[] for _ in calls]
    for number in range(repeat + 1):
        for call, times in zip(calls, seconds, strict=True):
            if before is not None:
                before()
            start = time.perf_counter()
            call()
            if number:  # the first round warms up
                times.append(time.perf_counter() - start)
    return [float(np.median(times)) for times in seconds]


def heavy(n: int) -> np.ndarray:
    """Return a heavy-tailed gradient: cubes of normal values."""
    x = np.random.default_rng(0).standard_normal(n, dtype=np.float32)
    return np.asarray(x * x * x)


def edges(n: int, k: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, array) of values that are few, equal, ordered or of other dtypes; the first are usual ones."""
    rng, place = np.random.default_rng(0), np.arange(n)
    x = rng.standard_normal(n, dtype=np.float32)
    yield "normal", x
    yield "k/2 nonzeros", np.where(rng.permutation(n) < k // 2, x, np.float32(0))
    yield "all equal", np.ones(n, np.float32)
    yield "rounded to integers", np.round(x)
    yield "ascending", np.sort(x)
    yield "period 1000", np.resize(x[:1000], n)
    yield "one is 1e30", np.where(place == n // 3, np.float32(1e30), x)
    for name in ("float64", "float16", "int8", "uint8", "int16", "uint16", "int32", "uint32", "uint64", "complex64"):
        dtype = np.dtype(name)  # as many bytes, and the same share of them selected
        yield name, np.resize(np.abs(x) * 20 if dtype.kind == "u" else x * 20, 4 * n // dtype.itemsize).astype(dtype)


def arrays(options: argparse.Namespace, synthetic: bool = True) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, array) of synthetic and real gradients."""
    for n in options.sizes if synthetic else []:
        if not options.brief or n < LARGE:
            yield f"heavy-tailed, n = {n / 1e6:g} M", heavy(n)
    for path in sorted(DATA.glob("*.npy")):
        x = np.load(path, mmap_mode="r")
        if options.brief and x.size >= LARGE:
            continue
        x = np.array(x)
        yield f"{path.stem.replace('_', ', ')}, n = {x.size / 1e6:.1f} M", x
