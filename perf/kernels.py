"""What selecting, coding, decoding and summing cost on one core, against peers in the same run.

    python perf/kernels.py --json perf/results/kernels.json

Times are medians of interleaved repetitions, on one thread; ratios are to the peer in the column's head, on the same
array in the same process. Every instruction set runs in processes of its own (SPARSECOLL_KERNELS); NumPy and torch,
too, are kept from AVX-512 while `avx2` or `portable` is measured. All takes five minutes once kernels are compiled.
"""

import json
import os
import subprocess
import sys
import tracemalloc
from functools import partial
from math import lgamma, log

import harness
import numpy as np
import torch
from harness import columns, drawn, heavy, load, markdown, medians

from sparsecoll import DenseVector, Residual, SparseVector, formats, select
from sparsecoll.kernels import host_kernels, kernels_of, memory, threads as pool
from sparsecoll.kernels.reference.rice import RICE_PAD
from sparsecoll.kernels.sampling import stride_for

DENSITIES = (0.001, 0.01, 0.05, 0.1)
WITHOUT_AVX512 = {  # for NumPy before 2.4 and since, and torch
    "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR X86_V4",
    "ATEN_CPU_CAPABILITY": "avx2",
}
OTHERS = {"DGC": select.SampledThreshold, "Gaussian-k": select.GaussianK}
# A section yields two parts of each row: what is shown of the fastest instruction set only, and of all.


def cases(options):
    """Yield (columns, array, k) for all heavy-tailed gradients and densities."""
    for n in options.sizes:
        x = heavy(n)
        for density in DENSITIES:
            yield {"data": f"heavy-tailed, n = {n / 1e6:g} M", "density": density}, x, round(density * n)


def threshold(options):
    """Selection of the entries above a known threshold (select.threshold), compared with np.sum of the array."""
    for row, x, k in cases(options):
        t = DenseVector(x).topk(k).kth_magnitude(k)
        base, mine = medians([partial(np.sum, x), partial(DenseVector(x).threshold, t, k)], options.repeat)
        yield row | {"ms": mine * 1e3, "np.sum ms": base * 1e3}, {"x np.sum": mine / base}


def topk(options):
    """Exact top-k (select.topk), compared with np.sum, np.argpartition(-|x|) and torch.topk(|x|)."""
    for row, x, k in cases(options):
        base, mine = medians([partial(np.sum, x), partial(select.topk, x, k)], options.repeat)
        peers = {
            "np.argpartition": lambda x=x, k=k: np.argpartition(np.abs(x), x.size - k)[x.size - k :],
            "torch.topk": lambda x=x, k=k: torch.topk(torch.from_numpy(x).abs(), k, sorted=False),
        }
        slow = medians(peers.values(), max(1, options.repeat // 4)) if row["density"] == 0.01 else ()
        slower = {f"{name}, times slower": took / mine for name, took in zip(peers, slow, strict=False)}
        yield row | {"ms": mine * 1e3}, {"x np.sum": mine / base} | slower


def edges(options):
    """Selection of 1 % of 2.4 M values of other kinds, in multiples of the time of the usual ones, float32 and normally
    distributed, in the same run. Values of more than four bytes take longer to read.
    """
    n, rng = options.sizes[1], np.random.default_rng(0)
    k, x, at, period = n // 100, rng.standard_normal(n, dtype=np.float32), np.arange(n), stride_for(n, n >> 7)
    kinds = {"float32": x, "float64": x.astype("f8"), "float16": x.astype("f2"), "bool": x > 1}
    kinds |= {name: np.abs(20 * x).astype(name) for name in ("int8", "uint8", "int16", "uint32", "int64", "uint64")}
    kinds |= {name: x + x[::-1] * np.dtype(name).type(1j) for name in ("complex64", "complex128")}
    kinds |= {"nonzeros fewer than k": x * (at % 200 == 0), "zeros": x * 0, "equal": x * 0 + 1, "ties": np.round(2 * x)}
    kinds |= {"subnormal": x * np.float32(1e-40), "one huge": np.where(at == n // 3, np.float32(1e30), x)}
    kinds |= {"all at one end": x * (at < n // 50), "blocks of equal ones": np.repeat(x[::1000], 1000)[:n]}
    kinds |= {"ascending": np.sort(x), "descending": np.sort(x)[::-1].copy(), "period of the sample": x[at % period]}
    times = {}
    for name, make in ({"top-k": select.TopK} | OTHERS).items():
        calls = [partial(make().select, DenseVector(values), k) for values in kinds.values()]
        times[name] = medians(calls, options.repeat)
    for number, (kind, values) in enumerate(kinds.items()):
        ratios = {name: took[number] / took[0] if number else took[0] * 1e3 for name, took in times.items()}
        top = {"top-k": ratios.pop("top-k")}
        yield {"values": kind if number else f"{kind}, ms", "bytes": values.itemsize} | ratios, top


def fused(options):
    """Residual.take (add the gradient, select, clear the selected entries), compared with np.add(a, b, out=a)."""
    selectors = {"threshold (reused)": partial(select.ThresholdReuse, 10**9), "exact top-k": select.TopK}
    selectors |= OTHERS | {"random-k": select.RandomK}
    for row, x, k in cases(options):
        gradient = np.random.default_rng(1).standard_normal(x.size, dtype=np.float32) * np.abs(x).mean() / 10
        residual = Residual(x.size)
        calls = [partial(np.add, residual.array, gradient, out=residual.array)]
        calls += [partial(residual.take, gradient, make(), k) for make in selectors.values()]
        base, *mine = medians(calls, options.repeat, partial(np.copyto, residual.array, x))
        columns = {f"{name}, x np.add": took / base for name, took in zip(selectors, mine, strict=True)}
        of_all = {name: columns.pop(name) for name in list(columns)[:2]}
        yield row | {"np.add ms": base * 1e3} | columns, of_all


def packed(options):
    """The format packed: bits per index and per selected float32, the speed of its index kernels."""
    n, forms = options.sizes[0], (formats.packed.PackedIndices(), formats.FORMATS["packed"])
    for density in DENSITIES:
        x = drawn(n, round(density * n), 0, 1)()
        kernels, k = kernels_of(x.values), x.nnz
        x = x.with_values(select.topk(heavy(n), k).values)
        table = kernels.rice_table(x.indices, block := kernels.rice_block(x.indices))
        out = np.empty(int(kernels.rice_offsets(table, k, block)[-1]) + RICE_PAD, np.uint8)

        def encode(x=x, kernels=kernels, out=out):
            block = kernels.rice_block(x.indices)
            kernels.rice_encode(x.indices, kernels.rice_table(x.indices, block), block, out)

        decode = partial(kernels.rice_decode, table, out, block, int(x.indices[0]), k, n, x.indices.dtype)
        to, back = (k / took / 1e6 for took in medians([encode, decode], options.repeat))
        bits, total = (8 * form.size(x) / k for form in forms)
        least = (lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)) / log(2) / k
        row = {"density": density, "bits per index": bits, "entropy of uniform": least, "bits per value": total - bits}
        yield row, {"encode, M indices/s": to, "decode, M indices/s": back}


def quantized(options):
    """Quantized values: GB/s of float32 that are read or written, in buckets of 512 values; 1 M values at a time."""
    x = heavy(1 << 20)
    kinds = ("linear", 8), ("linear", 4), ("linear", 2), ("float", 8), ("float", 4), ("mean", 2), ("mean", 1)
    for levels, bits in kinds:
        codes, seed = formats.Codes(bits, levels, 512), None if levels == "mean" else 1
        message, out = np.empty(codes.size(0, x.size), np.uint8), x.copy()
        calls = {"quantize, GB/s": partial(codes.encode, x, 0, seed, message)}
        calls["decode, GB/s"] = partial(codes.decode, message, 0, out)
        times = medians(calls.values(), options.repeat)
        speeds = {call: x.nbytes / 1e9 / took for call, took in zip(calls, times, strict=True)}
        yield {"bits": bits, "levels": levels}, speeds


def sorted_vectors(P, each, density, wide=False):
    """Return P vectors of so many entries at uniform indices, float32 with uint32 indices or (`wide`) 64 bits each."""
    rng, kind = np.random.default_rng(0), np.float64 if wide else np.float32
    indices = [np.cumsum(rng.geometric(density, each)).astype(np.uint64 if wide else np.uint32) for _ in range(P)]
    n = max(max(int(index[-1]) for index in indices) + 1, 2**32 + 1 if wide else 0)
    return [SparseVector(index, rng.standard_normal(each).astype(kind), n) for index in indices]


def merge(options):
    """SparseVector.merge of P sorted vectors at uniform indices; uint32 and float32, or uint64 and float64.

    The density is that of each vector. Peak memory is in units of the bytes of the entries that go in.
    """
    cases = [(P, d, 2_000_000 // P, w) for w in (False, True) for P in (2, 4, 8, 64) for d in (0.001, 0.01, 0.1)]
    cases += [(P, 1e-7, each, True) for each in (1_000, 100_000) for P in (2, 8)]
    for P, density, each, wide in cases:
        parts = sorted_vectors(P, each, density, wide)
        size = parts[0].dtype.itemsize
        (seconds,) = medians([partial(SparseVector.merge, parts, parts[0].dtype)], options.repeat)
        memory.release()
        tracemalloc.start()
        row = {"vectors": f"{P} of {each} entries, {8 * size} bits", "density": density}
        row["entries out"] = SparseVector.merge(parts, parts[0].dtype).nnz
        row["peak memory"] = tracemalloc.get_traced_memory()[1] / (2 * size * P * each)
        tracemalloc.stop()
        yield row, {"M entries/s": P * each / seconds / 1e6}


SECTIONS = (threshold, topk, edges, fused, packed, quantized, merge)


def across_sets(section):
    """Return the section as run by a process for each instruction set, the fastest one first."""

    def run(options):
        rows = {}
        for kernels in options.kernels:
            command = [sys.executable, __file__, "--measure", section.__name__]
            command += ["--repeat", str(options.repeat), "--sizes", *map(str, options.sizes)]
            limits = {} if kernels == "avx512" else WITHOUT_AVX512
            environment = os.environ | {"SPARSECOLL_KERNELS": kernels, pool.VARIABLE: "1"} | limits
            rows[kernels] = json.loads(subprocess.check_output(command, env=environment))
        for number, (row, heads) in enumerate(rows[options.kernels[0]]):
            for head in heads:
                row |= {f"{head}, {kernels}": of_all[number][1][head] for kernels, of_all in rows.items()}
            yield row

    run.__name__, run.__doc__ = section.__name__, section.__doc__
    return run


MERGED = [(f"{few} of {entries} entries, 32 bits", 0.001) for few, entries in ((2, 10**6), (8, 250000), (64, 31250))]
QUANTIZED = ((8, "linear"), (4, "linear"), (4, "float"), (1, "mean"))
MERGED += [("64 of 31250 entries, 64 bits", 0.001), ("8 of 1000 entries, 64 bits", 1e-07)]


def tables():
    """Return the tables of docs/kernels.md by name: not all rows; n stands for the data, which are heavy-tailed."""
    found = {name: rows for name, rows in load("kernels").items() if name not in ("about", "edges")}
    found["merge"] = [row for row in found["merge"] if (row["vectors"], row["density"]) in MERGED]
    found["quantized"] = [row for row in found["quantized"] if (row["bits"], row["levels"]) in QUANTIZED]
    found["packed"] = [row for row in found["packed"] if row["density"] in (0.001, 0.01, 0.1)]
    found["fused"] = columns(found["fused"], lambda head: "random" not in head)
    for name in ("threshold", "topk", "fused"):
        rows = [row | {"data": row["data"].split("= ")[1]} for row in found[name] if row["density"] in (0.01, 0.1)]
        rows = [row for row in rows if row["data"] == "24 M" or (row["data"] == "0.24 M" and row["density"] == 0.01)]
        found[name] = [{"n": row.pop("data")} | row for row in rows]
    found["topk"] = columns(found["topk"], lambda head: "times slower" not in head)
    return {f"kernels.{name}": markdown(rows) for name, rows in found.items()}


def main():
    """Measure, print, save."""
    sizes, sets = [24_000_000, 2_400_000, 240_000], list(host_kernels().lanes.SUPPORTED)
    options = harness.options(__doc__, sizes=sizes, repeat=7, kernels=sets, only=[], measure="")
    torch.set_num_threads(1)
    if options.measure:  # a section, in this process
        print(json.dumps(list(globals()[options.measure](options))))
    else:
        harness.run_sections([across_sets(section) for section in SECTIONS], options)


if __name__ == "__main__":
    main()
