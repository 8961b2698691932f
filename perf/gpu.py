"""What selecting, coding and summing cost on a GPU, as multiples of one read of the vector.

    make gpu                                       # tests on the GPU, then this
    python perf/gpu.py --json perf/results/gpu.json

One read is half the time of a copy of the vector on the device, measured in the same run. Times are medians between
events on the stream, so what the host does between launches, and its reads of sizes, count.
"""

import importlib.util
from functools import partial

import harness
import numpy as np
from harness import heavy, load, markdown

from sparsecoll import DenseVector, Residual, SparseVector, formats, select


def milliseconds(call, repeat, before=None):
    """Return the median time on the current stream, without the first call and without `before`."""
    import cupy

    def timed():
        if before is not None:
            before()
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        call()
        stop.record()
        stop.synchronize()
        return cupy.cuda.get_elapsed_time(start, stop)

    return float(np.median([timed() for _ in range(repeat + 1)][1:]))


def gradient(options):
    """Return a heavy-tailed gradient on the device, and the milliseconds of one read of it."""
    import cupy

    x = cupy.asarray(heavy(options.n))
    return x, milliseconds(partial(x.copy().__setitem__, slice(None), x), options.repeat) / 2


def rivals(x, k, repeat):
    """Return the milliseconds of torch.topk and CuPy's argpartition, if they are installed."""
    import cupy

    found = {}
    if importlib.util.find_spec("torch"):
        import torch

        if torch.cuda.is_available():
            tensor, stream = torch.from_dlpack(x), torch.cuda.Stream()
            with torch.cuda.stream(stream), cupy.cuda.ExternalStream(stream.cuda_stream):  # for the events, too
                found["torch.topk"] = milliseconds(lambda: torch.topk(tensor.abs(), k, sorted=False), repeat)
    if hasattr(cupy, "argpartition"):
        found["cupy.argpartition"] = milliseconds(lambda: cupy.argpartition(cupy.abs(x), x.size - k), repeat)
    return found


def selection(options):
    """From the dense vector to the sparse one: a known threshold, the exact top k, and both with error feedback."""
    x, once = gradient(options)
    for density in options.densities:
        k = max(1, round(density * x.size))
        vector, residual = DenseVector(x), Residual(x.size, like=x)
        t, reset = vector.topk(k).kth_magnitude(k), partial(residual.array.__setitem__, slice(None), x)
        calls = {
            "threshold": (partial(vector.threshold, t, k), None),
            "top-k": (partial(vector.topk, k), None),
            "feedback + threshold": (partial(residual.take, x, select.ThresholdReuse(10**9), k), reset),
            "feedback + top-k": (partial(residual.take, x, select.TopK(), k), reset),
        }
        row = {"density": density, "read ms": once}
        for name, (call, before) in calls.items():
            row[f"{name}, reads"] = milliseconds(call, options.repeat, before) / once
        others = rivals(x, k, max(1, options.repeat // 4))
        yield row | {f"{name}, reads": took / once for name, took in others.items()}


def encoding(options):
    """From the dense vector and a known threshold to the message, and back to a sparse vector."""
    x, once = gradient(options)
    for density in options.densities:
        k = max(1, round(density * x.size))
        vector = DenseVector(x)
        t = vector.topk(k).kth_magnitude(k)
        for form in ("coo", "slots", "packed", "densestream", "bitmap"):

            def encode(vector=vector, t=t, k=k, form=form):
                return formats.encode(vector.threshold(t, k), form)

            message = encode()
            row = {"density": density, "format": form, "MB": message.size / 1e6}
            row["select and encode, reads"] = milliseconds(encode, options.repeat) / once
            yield row | {"decode, reads": milliseconds(partial(formats.decode, message, x.size), options.repeat) / once}


def decoding(options):
    """P messages of hashed slots (1 % each) into one dense vector, and P sparse vectors into their sum: ns an entry.

    DRAGONN's Figure 5b: decoding should cost the same per entry whatever P is.
    """
    import cupy

    n = options.n // 4
    parts = [DenseVector(cupy.asarray(heavy(n, seed))).topk(max(1, n // 100)) for seed in range(32)]
    messages = [formats.encode(part, "slots") for part in parts]
    dense = DenseVector.zeros(n, np.float32, parts[0])
    for P in (2, 4, 8, 16, 32):
        into = milliseconds(partial(formats.add_into, dense, messages[:P]), options.repeat)
        merge = milliseconds(partial(SparseVector.merge, parts[:P], np.dtype(np.float32)), options.repeat)
        entries = sum(part.nnz for part in parts[:P])
        yield {"P": P, "slots into dense, ns": into * 1e6 / entries, "sum of sparse, ns": merge * 1e6 / entries}


SECTIONS = (selection, encoding, decoding)


def tables():
    """Return the tables of docs/gpu.md by name."""
    found = load("gpu")
    found["encoding"] = [row for row in found["encoding"] if row["density"] == 0.01]
    return {f"gpu.{name}": markdown(found[name]) for name in ("selection", "encoding")}


def main(arguments=None):
    """Parse the command line and measure."""
    import cupy

    options = harness.options(__doc__, arguments, n=134_000_000, densities=[0.001, 0.01, 0.1], repeat=20, only=[])
    runtime = cupy.cuda.runtime
    device = runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    versions = {"driver": runtime.driverGetVersion(), "cuda": runtime.runtimeGetVersion(), "cupy": cupy.__version__}
    harness.run_sections(SECTIONS, options, device=device, **versions)


if __name__ == "__main__":
    main()
