"""What selecting, coding and summing cost on a GPU, as multiples of one read of the vector.

    make gpu                                       # tests on the GPU, then this
    python perf/gpu.py --markdown docs/gpu_figures.md --json perf/results/gpu.json

One read is half the time of a copy of the vector on the device, measured in the same run. Times are medians between
events on the stream, so what the host does between launches, and its reads of sizes, count.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import report
from report import Row

from sparsecoll import DenseVector, Residual, SparseVector, formats, select
from sparsecoll.cli import bench

DENSITIES = (0.001, 0.01, 0.1)
RANKS = (2, 4, 8, 16, 32)


def milliseconds(call: Callable[[], object], repeat: int, before: Callable[[], object] | None = None) -> float:
    """Return the median time on the current stream, without the first call and without `before`."""
    import cupy

    times = []
    for number in range(repeat + 1):
        if before is not None:
            before()
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        call()
        stop.record()
        stop.synchronize()
        if number:
            times.append(cupy.cuda.get_elapsed_time(start, stop))
    return float(np.median(times))


def gradient(n: int, seed: int = 0) -> Any:
    """Return a heavy-tailed gradient on the device: cubes of normal values."""
    import cupy

    x = np.random.default_rng(seed).standard_normal(n, dtype=np.float32)
    return cupy.asarray(x * x * x)


def read(x: Any, repeat: int) -> float:
    """Return the milliseconds of one read of the vector."""
    target = x.copy()

    def copy() -> None:
        target[:] = x

    return milliseconds(copy, repeat) / 2


def rivals(x: Any, k: int, repeat: int) -> Row:
    """Return torch.topk and CuPy's argpartition, if they are installed."""
    import cupy

    found: Row = {}
    if importlib.util.find_spec("torch"):
        import torch

        if torch.cuda.is_available():
            tensor, stream = torch.from_dlpack(x), torch.cuda.Stream()
            with torch.cuda.stream(stream), cupy.cuda.ExternalStream(stream.cuda_stream):  # for the events, too
                found["torch.topk ms"] = milliseconds(lambda: torch.topk(tensor.abs(), k, sorted=False), repeat)
    if hasattr(cupy, "argpartition"):
        found["cupy.argpartition ms"] = milliseconds(lambda: cupy.argpartition(cupy.abs(x), x.size - k), repeat)
    return found


def selection(options: argparse.Namespace) -> Iterator[Row]:
    """From the dense vector to the sparse one: a known threshold, the exact top k, and both with error feedback."""
    x = gradient(options.n)
    once = read(x, options.repeat)
    for density in options.densities:
        k = max(1, round(density * x.size))
        vector, residual = DenseVector(x), Residual(x.size, like=x)
        t = vector.topk(k)._kth_magnitude(k)

        def reset(residual: Residual = residual) -> None:
            residual.array[:] = x

        threshold = milliseconds(partial(vector.threshold, t, k), options.repeat)
        topk = milliseconds(partial(vector.topk, k), options.repeat)
        reuse = select.ThresholdReuse(10**9)
        fused = milliseconds(partial(residual.take, x, reuse, k), options.repeat, reset)
        fused_topk = milliseconds(partial(residual.take, x, select.TopK(), k), options.repeat, reset)
        row: Row = {"density": density, "read ms": once, "threshold, reads": threshold / once}
        row |= {"top-k, reads": topk / once, "feedback + threshold, reads": fused / once}
        row |= {"feedback + top-k, reads": fused_topk / once} | rivals(x, k, max(1, options.repeat // 4))
        if "torch.topk ms" in row:
            row["torch.topk / ours"] = row["torch.topk ms"] / topk
        yield row


def select_and_encode(vector: DenseVector, threshold: float, k: int, form: str) -> Any:
    """The message of what reaches a threshold."""
    return formats.encode(vector.threshold(threshold, k), form)


def encoding(options: argparse.Namespace) -> Iterator[Row]:
    """From the dense vector and a known threshold to the message, and back to a sparse vector."""
    x = gradient(options.n)
    once = read(x, options.repeat)
    for density in options.densities:
        k = max(1, round(density * x.size))
        vector = DenseVector(x)
        t = vector.topk(k)._kth_magnitude(k)
        for form in ("coo", "slots", "packed", "densestream", "bitmap"):
            encode = partial(select_and_encode, vector, t, k, form)
            message = encode()
            there = milliseconds(encode, options.repeat)
            back = milliseconds(partial(formats.decode, message, x.size), options.repeat)
            yield {
                "density": density,
                "format": form,
                "MB": message.size / 1e6,
                "select and encode, reads": there / once,
                "decode, reads": back / once,
            }


def decoding(options: argparse.Namespace) -> Iterator[Row]:
    """P messages of hashed slots (1 % each) into one dense vector, and P sparse vectors into their sum: ns an entry.

    DRAGONN's Figure 5b: decoding should cost the same per entry whatever P is.
    """
    n = options.n // 4
    parts = [DenseVector(gradient(n, seed)).topk(max(1, n // 100)) for seed in range(max(RANKS))]
    messages = [formats.encode(part, "slots") for part in parts]
    dense = DenseVector.zeros(n, np.float32, parts[0])
    for P in RANKS:
        into = milliseconds(partial(formats.add_into, dense, messages[:P]), options.repeat)
        merge = milliseconds(partial(SparseVector.merge, parts[:P], np.dtype(np.float32)), options.repeat)
        entries = sum(part.nnz for part in parts[:P])
        yield {"P": P, "slots into dense, ns": into * 1e6 / entries, "sum of sparse, ns": merge * 1e6 / entries}


SECTIONS = (selection, encoding, decoding)


def about() -> Row:
    """Return the device, the driver and versions."""
    import cupy

    runtime = cupy.cuda.runtime
    found: Row = dict(bench.about()) | {"cupy": cupy.__version__}
    properties = runtime.getDeviceProperties(cupy.cuda.Device().id)
    found |= {"device": properties["name"].decode(), "driver": runtime.driverGetVersion()}
    return found | {"cuda": runtime.runtimeGetVersion()}


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    report.add_options(parser, SECTIONS)
    parser.add_argument("--n", type=int, default=134_000_000)
    parser.add_argument("--densities", type=float, nargs="+", default=DENSITIES)
    parser.add_argument("--repeat", type=int, default=20)
    options = parser.parse_args(arguments)
    known = about()
    heading = ["# On a GPU: figures", f"{known['device']}, driver {known['driver']}, CUDA {known['cuda']},"
               f" CuPy {known['cupy']}, commit {known['commit']}; n = {options.n:,} float32."]  # fmt: skip
    report.run(SECTIONS, options, heading, {"about": known})


if __name__ == "__main__":
    main()
