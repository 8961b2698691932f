"""DenseStream's Table II and more: time from a dense gradient on each rank to the sum on every rank, beside peers.

    python perf/testbed.py run -- python perf/allreduce.py --gloo --interface eth0 --json perf/results/allreduce.json
    mpirun -n 8 python perf/allreduce.py --n 24e6 --density 0.01        # any cluster

Times include the selection, except those of gloo's sparse sum, which is given its entries.
"""

import math

import harness
from harness import load, markdown, source

from sparsecoll import DenseVector, LowBit
from sparsecoll.bench.timing import MPI_ALLREDUCE, Call, heavy_tailed, measure
from sparsecoll.telemetry.trace import KINDS
from sparsecoll.transport import default_comm

UNCOUNTED = (math.nan, math.nan, math.nan)  # bytes and messages of other libraries
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
DENSITIES = (0.01, 0.05, 0.1)


def gloo_dense(vector):
    """Sum a copy in place by gloo, since MPI_Allreduce does not overwrite its input either."""
    import torch

    tensor = torch.from_numpy(vector.copy())
    torch.distributed.all_reduce(tensor)
    return (*UNCOUNTED, tensor.numel())


def gloo_sparse(entries):
    """Sum a sparse_coo tensor of the entries by gloo."""
    return (*UNCOUNTED, harness.gloo_sparse(entries.indices, entries.values, (entries.length,)))


def contestants(options, comm, vectors):
    """Yield name, call, function and inputs of each row."""
    yield MPI_ALLREDUCE, Call(MPI_ALLREDUCE, 1.0), None, vectors
    if options.gloo:
        yield "gloo, dense", Call("gloo", 1.0), gloo_dense, vectors
    for name, algorithm in LOW_BIT.items():
        yield name, Call(algorithm, 1.0), None, vectors
    for density in options.density:
        if options.gloo and vectors.n < options.gloo_most:
            x = vectors()
            chosen = DenseVector(x).topk(round(density * x.size))
            yield "gloo, sparse", Call("gloo", density), gloo_sparse, lambda chosen=chosen: chosen
        for name, (algo, form) in PUBLISHED.items():
            yield name, Call(algo, density, form), None, vectors
        for name, (algo, value_dtype) in OURS.items():
            yield name, Call(algo, density, "auto", value_dtype), None, vectors


def rows(options, comm):
    """Measure and yield the rows, the same on every rank."""
    for n in options.n:
        dense = 0.0
        for name, call, run, make in contestants(options, comm, heavy_tailed(n, comm.rank)):
            row = measure(comm, call, make, options.repeat, options.warm, run, name=name)
            dense = dense or row["seconds"]
            yield row | {"x dense": dense / row["seconds"]}


def line(text, name, some, megabytes=False):
    """Return a line of a table: times, and bytes received, at each density."""
    shown = {"": text}
    for density in DENSITIES:
        found = [row for row in some if row["name"] == name and row["density"] in (density, 1.0)]
        shown[f"{density:.0%}"] = f"{found[0]['seconds']:.3f} s, {found[0]['x dense']:.1f} x" if found else ""
        if megabytes and density == DENSITIES[0]:
            counted = found and found[0]["bytes_received"]
            shown[f"MB in, {density:.0%}"] = f"{counted / 1e6:.1f}" if counted else ""
    return shown


def table2():
    """Return DenseStream's Table II, of the first length, with bytes."""
    some = [row for row in load("allreduce")["rows"] if row["n"] == 24_000_000 and row["name"] not in UNSHOWN]
    lines = [line(name, name, some, True) for name in dict.fromkeys(row["name"] for row in some)]
    return f"{markdown(lines)}\n\n{source('allreduce')}"


def wire():
    """Return the table of our sums' times, and their ratios to what the received bytes take on links of 1 Gb/s."""
    lines = {}
    for row in load("allreduce")["rows"]:
        if row["n"] != 24_000_000 or row["name"] not in SHOWN.values() or row["density"] == 1:
            continue
        bound = row["bytes_received"] / 125e6
        line = lines.setdefault(row["name"], {"": row["name"]})
        line[f"{row['density']:.0%}"] = f"{row['seconds'] * 1e3:.0f} ms, {row['seconds'] / bound:.2f}"
    return markdown(lines.values())


UNSHOWN = ("gloo, dense", "dense, 2 bits", "exact sum, float16")  # in the figure only
SHOWN = {  # in the README: name of a row
    "`MPI_Allreduce`, dense (MPICH)": MPI_ALLREDUCE,
    "**sparsecoll, exact sum** of all top k": "exact sum",
    "**sparsecoll, top k of the sum**": "top k of sum",
}


def tables():
    """Return the table of docs/benchmarks.md that is made of these rows, and that of the README, by name."""
    short = [row for row in load("allreduce")["rows"] if row["n"] == 24_000_000]
    readme = [line(text, name, short) for text, name in SHOWN.items()]
    return {
        "allreduce.table2": table2(),
        "allreduce.wire": wire(),
        "allreduce.readme": f"{markdown(readme)}\n\n{source('allreduce')}",
    }


def main():
    """Measure and print; rank 0 saves the rows."""
    lengths, most = [24_000_000, 134_000_000], 5e7  # no sparse gloo for longer vectors: it is slow
    inputs = {"n": lengths, "density": list(DENSITIES), "gloo_most": most}
    options = harness.options(__doc__, **inputs, repeat=7, warm=2, gloo=False, interface="")
    comm = default_comm()
    if options.gloo:
        harness.start_gloo(comm, options.interface)
    hidden = (*KINDS, "other", "algo", "P", "least", "most", "memory")
    harness.record(rows(options, comm), options, comm.rank, hide=hidden)


if __name__ == "__main__":
    main()
