"""DenseStream's Table II and more: time from a dense gradient on each rank to the sum on every rank, beside peers.

    python perf/testbed.py run -- python perf/allreduce.py --json perf/results/allreduce.json
    mpirun -n 8 python perf/allreduce.py --n 24e6 --density 0.01        # any cluster

The inputs are heavy-tailed values of length --n and, if they exist, the real gradients of perf/gradients.py --ranks P.
One run times on each of them MPI's dense sum, PyTorch's gloo dense and sparse, the published algorithms on their own
formats, this library's choices with float32 and float16 values on the wire, and its dense sums in few bits a value.
Times include the selection, except those of gloo's sparse sum.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from report import Row

import sparsecoll
from sparsecoll import DenseVector, LowBit
from sparsecoll.cli import bench
from sparsecoll.cli.arguments import MPI_ALLREDUCE
from sparsecoll.cli.bench import Call
from sparsecoll.transport import default_comm

DATA = Path(__file__).parent / "data"
PUBLISHED = {  # name in the papers: (algorithm, format)
    "TopkA": ("allgather", "coo"),
    "TopkDSA (SparCML)": ("sparcml:variant=dynamic", "coo"),
    "DSA, COO": ("densestream", "coo"),
    "DSA, DenseStream": ("densestream", "auto"),
    "Ok-Topk": ("oktopk", "coo"),
}
OURS = {  # name: (algorithm, value dtype)
    "exact sum": ("auto:selector=reuse", None),
    "exact sum, float16": ("auto:selector=reuse", "float16"),
    "top k of sum": ("auto:want=top_k_of_sum,selector=reuse", None),
    "top k of sum, float16": ("auto:want=top_k_of_sum,selector=reuse", "float16"),
}
LOW_BIT = {f"dense, {bits} bits": LowBit(bits=bits) for bits in (8, 4, 2)}
LOW_BIT |= {
    f"dense, {name}, nearest": LowBit(bits=bits, rounding="nearest") for bits, name in ((2, "2 bits"), (1, "1 bit"))
}
LOW_BIT |= {"dense, E3M0": LowBit(bits=4, levels="float")}


class Gloo:
    """Dense and sparse sums by torch.distributed with gloo over the same ranks.

    Attributes:
        group: the process group of the ranks.
    """

    def __init__(self, comm: Any, interface: str | None) -> None:
        import gloo
        import torch

        torch.set_num_threads(1)
        torch.sparse.check_sparse_tensor_invariants.disable()  # else it warns that they are not checked
        gloo.start(comm, interface)
        self._torch = torch
        self.group = torch.distributed.group.WORLD

    def dense(self, vector: np.ndarray) -> tuple[float, float, float, int]:
        """Sum a copy in place, since MPI_Allreduce does not overwrite its input either."""
        tensor = self._torch.from_numpy(vector.copy())
        self._torch.distributed.all_reduce(tensor)
        return math.nan, math.nan, math.nan, tensor.numel()

    def sparse(self, entries: Any) -> tuple[float, float, float, int]:
        """Sum a sparse_coo tensor of the entries."""
        indices = self._torch.from_numpy(entries.indices.astype(np.int64))[None]
        values = self._torch.from_numpy(entries.values.copy())
        tensor = self._torch.sparse_coo_tensor(indices, values, (entries.length,), is_coalesced=True)
        self._torch.distributed.all_reduce(tensor)
        return math.nan, math.nan, math.nan, int(tensor._nnz())


def inputs(options: argparse.Namespace, comm: Any) -> Iterator[tuple[str, bench.Gradients]]:
    """Yield the name of each input and this rank's vectors."""
    for n in options.n:
        yield "heavy-tailed", bench.heavy_tailed(n, comm.rank)
    for name in options.gradients:
        path = DATA / f"ranks{comm.size}" / f"{name}_{comm.rank}.npy"
        if comm.allreduce(int(path.exists())) == comm.size:
            yield name.replace("_", ", "), bench.from_file(path, comm.rank)


def low_bit(comm: Any, algorithm: LowBit) -> bench.Run:
    """Return a function that sums a dense vector in few bits a value, for `bench.measure`."""
    counters = sparsecoll.traffic(comm)

    def run(vector: np.ndarray) -> tuple[float, float, float, int]:
        before = counters.copy()
        value = sparsecoll.allreduce(comm, vector, algorithm)
        moved = counters.since(before).total
        return moved.bytes_sent, moved.bytes_received, moved.messages_sent, value.size

    return run


def rows(options: argparse.Namespace, comm: Any) -> Iterator[Row]:
    """Measure and yield the rows, the same on every rank."""
    gloo = Gloo(comm, options.interface) if options.gloo else None
    for data, vectors in inputs(options, comm):

        def timed(name: str, call: Call, vectors: Callable[[], Any] = vectors, data: str = data, **run: Any) -> Row:
            return bench.measure(comm, call, vectors, options.repeat, options.warm, name=name, data=data, **run)

        yield timed(MPI_ALLREDUCE, Call(MPI_ALLREDUCE, 1.0))
        if gloo:
            yield timed("gloo, dense", Call("gloo", 1.0), run=gloo.dense)
        for name, algorithm in LOW_BIT.items():
            yield timed(name, Call("lowbit", 1.0), run=low_bit(comm, algorithm))
        for density in options.density:
            if gloo and vectors.n < options.gloo_most:
                x = vectors()
                chosen = DenseVector(x).topk(round(density * x.size))
                yield timed("gloo, sparse", Call("gloo", density), lambda chosen=chosen: chosen, run=gloo.sparse)
            for name, (algo, form) in PUBLISHED.items():
                yield timed(name, Call(algo, density, form))
            for name, (algo, value_dtype) in OURS.items():
                yield timed(name, Call(algo, density, "auto", value_dtype))


def main() -> None:
    """Measure and print; rank 0 saves the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", nargs="*", type=lambda t: int(float(t)), default=[24_000_000, 134_000_000])
    parser.add_argument("--gradients", nargs="*", default=["resnet50_late", "vgg16_late"])
    parser.add_argument("--density", nargs="*", type=float, default=[0.01, 0.05, 0.1], help="none: dense only")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--gloo", action="store_true", help="measure torch.distributed with gloo as well")
    parser.add_argument("--gloo-most", type=float, default=5e7, help="no sparse gloo for longer vectors (it is slow)")
    parser.add_argument("--interface", help="network interface for gloo")
    parser.add_argument("--json", type=Path, help="save the rows")
    options = parser.parse_args()
    comm = default_comm()
    found: list[Row] = []
    dense = 0.0
    for row in rows(options, comm):
        dense = row["seconds"] if row["name"] == MPI_ALLREDUCE else dense
        row["x dense"] = dense / row["seconds"]
        found.append(row)
        if comm.rank == 0:
            counted = row["bytes_received"]
            volume = "" if counted is None else f" {counted / 1e6:>8.2f} MB in"
            sys.stdout.write(
                f"{row['data']:<14}{row['n']:>12,}{row['density']:>7.3g} {row['name']:<24}{row['seconds']:>8.3f} s"
                f" {row['x dense']:>7.2f} x{volume}\n"
            )
            sys.stdout.flush()
            if options.json:
                options.json.write_text(json.dumps({"about": bench.about(), "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
