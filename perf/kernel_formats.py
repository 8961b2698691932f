"""Sections of kernels.py: what coding costs, and how long messages are; tables of DenseStream and DRAGONN."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from math import lgamma, log
from typing import Any

import numpy as np
import torch
from kernel_inputs import DENSITIES, arrays, heavy, medians
from report import Row

from sparsecoll import DenseVector, SparseVector, formats, select
from sparsecoll.kernels import kernels_of
from sparsecoll.kernels.reference.rice import RICE_PAD

SPEEDS = ("quantize, GB/s", "and keep the error, GB/s", "decode, GB/s", "decode and add, GB/s")


def entropy(n: int, k: int) -> float:
    """log2 of the number of ways to choose k of n positions, per position."""
    return (lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)) / log(2) / k


def packed(options: argparse.Namespace) -> Iterator[Row]:
    """The format packed: bits per index, and the speed of its index kernels."""

    def vectors() -> Iterator[tuple[str, SparseVector]]:
        for density in DENSITIES:
            n = options.sizes[0]
            indices = np.sort(np.random.default_rng(0).choice(n, round(density * n), replace=False))
            yield "uniform positions", SparseVector(indices, np.ones(indices.size, np.float32), n)
        for name, x in arrays(options, synthetic=False):
            for density in DENSITIES:
                yield name, select.topk(x, round(density * x.size))

    for name, x in vectors():
        kernels = kernels_of(x.values)
        block = kernels.rice_block(x.indices)
        table = kernels.rice_table(x.indices, block)
        coded = int(kernels.rice_offsets(table, x.nnz, block)[-1])
        out = np.empty(coded + RICE_PAD, np.uint8)

        def encode(x: SparseVector = x, kernels: Any = kernels, out: np.ndarray = out) -> None:
            block = kernels.rice_block(x.indices)
            kernels.rice_encode(x.indices, kernels.rice_table(x.indices, block), block, out)

        arguments = (table, out, block, int(x.indices[0]), x.nnz, x.length, x.indices.dtype)
        to, back = medians([encode, partial(kernels.rice_decode, *arguments)], options.repeat)
        whole = formats.FORMATS["packed"]
        wire = [partial(whole.encode, x), partial(whole.decode, whole.encode(x), x.length)]
        to_all, back_all = medians(wire, options.repeat)
        bits = (whole.size(x) - x.values.nbytes) * 8 / x.nnz
        yield {
            "positions": name,
            "density": x.density,
            "bits per index": bits,
            "entropy of uniform": entropy(x.length, x.nnz),
            "ratio": bits / entropy(x.length, x.nnz),
            "encode, M indices/s": x.nnz / to / 1e6,
            "decode, M indices/s": x.nnz / back / 1e6,
            "whole message: encode, M entries/s": x.nnz / to_all / 1e6,
            "decode, M entries/s": x.nnz / back_all / 1e6,
        }


def quantized(options: argparse.Namespace) -> Iterator[Row]:
    """Quantized values: GB/s of float32 that are read or written, in buckets of 512 values; 1 M values at a time."""
    x = heavy(1 << 20)
    kinds = [(8, "linear"), (4, "linear"), (2, "linear"), (8, "float"), (4, "float"), (2, "mean"), (1, "mean")]
    for bits, levels in kinds:
        codes = formats.Codes(bits, levels, 512)
        message = np.empty(codes.size(0, x.size), np.uint8)
        error, out = x.copy(), x.copy()
        seed = None if levels == "mean" else 1
        calls = [
            partial(codes.encode, x, 0, seed, message),
            partial(codes.encode, error, 0, seed, message, True),
            partial(codes.decode, message, 0, out),
            partial(codes.decode, message, 0, out, True),
        ]
        speeds = [x.nbytes / 1e9 / seconds for seconds in medians(calls, options.repeat, partial(np.copyto, error, x))]
        yield {"bits": bits, "levels": levels} | dict(zip(SPEEDS, speeds, strict=True))


def table1(options: argparse.Namespace) -> Iterator[Row]:
    """DenseStream's Table I: size relative to key-value (COO) on real gradients; float32, 1.0 = 8 bytes per entry."""
    for name, x in arrays(options, synthetic=False):
        for density in DENSITIES:
            chosen = select.topk(x, round(density * x.size))
            coo = formats.FORMATS["coo"].size(chosen)
            sizes = {f: formats.FORMATS[f].size(chosen) / coo for f in ("densestream", "packed", "bitmap", "auto")}
            half = {"packed, float16": formats.FORMATS["packed"].size(chosen, "float16") / coo}
            yield {"gradient": name, "density": density} | sizes | half


def figure5(options: argparse.Namespace) -> Iterator[Row]:
    """DRAGONN's Figure 5a: from the dense array to a message at density 0.001."""
    for size in (2**20, 2**22, 2**24, 2**26, 2**27):
        x, k = heavy(size), max(1, size // 1000)
        tensor = torch.from_numpy(x)
        hashed, sampled = select.Hashed(m=k), select.SampledThreshold()
        slots = formats.Slots(m=k)

        def dgc(x: np.ndarray = x, k: int = k) -> object:
            """Algorithm 3 of DRAGONN's appendix in NumPy: threshold of a 1 % sample, mask, its nonzeros, gather."""
            sample = np.abs(x[::100])
            among = max(1, k // 100)
            indices = np.flatnonzero(np.abs(x) >= np.partition(sample, sample.size - among)[sample.size - among])
            return indices, x[indices]

        calls: dict[str, Callable[[], object]] = {
            "torch.topk": lambda t=tensor, x=x, k=k: x[torch.topk(t.abs(), k, sorted=False)[1].numpy()],
            "DGC in NumPy": dgc,
            "hashed + slots": lambda x=x, k=k, h=hashed, s=slots: s.encode(h.select(DenseVector(x), k)),
            "DGC threshold + packed": lambda x=x, k=k, s=sampled: formats.encode(s.select(DenseVector(x), k), "packed"),
            "exact top-k + packed": lambda x=x, k=k: formats.encode(select.topk(x, k), "packed"),
        }
        times = medians(list(calls.values()), options.repeat if size < 2**26 else max(3, options.repeat // 3))
        yield {"MB": size * 4 / 2**20} | {f"{n}, ms": s * 1e3 for n, s in zip(calls, times, strict=True)}


def figure5b(options: argparse.Namespace) -> Iterator[Row]:
    """DRAGONN's Figure 5b: from P messages (64 MB tensor, density 0.001) to their dense sum, and to a sparse sum."""
    size = 2**24
    for P in (2, 4, 8, 16, 32, 64):
        parts = [
            select.topk(np.random.default_rng(r).standard_normal(size, np.float32), size // 1000) for r in range(P)
        ]
        slots = [formats.Slots(2 * x.nnz, seed).encode(x) for seed, x in enumerate(parts)]
        packs = [formats.encode(x, "packed") for x in parts]

        def dense(packs: list[formats.Buffer] = packs) -> object:
            return sum(formats.decode(buffer, size).to_dense() for buffer in packs)

        def into(buffers: list[formats.Buffer]) -> object:
            total = DenseVector(np.zeros(size, np.float32))
            formats.add_into(total, buffers)
            return total

        def sparse(packs: list[formats.Buffer] = packs) -> object:
            return SparseVector.merge([formats.decode(buffer, size) for buffer in packs], np.dtype(np.float32))

        calls = [dense, partial(into, slots), partial(into, packs), sparse]
        names = ("dense decoding", "slots, sparse decoding", "packed, sparse decoding", "packed to a sparse sum")
        times = medians(calls, max(3, options.repeat // 3))
        yield {"P": P} | {f"{n}, ms": s * 1e3 for n, s in zip(names, times, strict=True)}
