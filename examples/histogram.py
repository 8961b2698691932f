"""Sum sparse NumPy data: a histogram over a huge key space, and node degrees of a graph distributed over the ranks.

python examples/histogram.py
mpirun -n 4 python examples/histogram.py
"""

from __future__ import annotations

import numpy as np

import sparsecoll
from sparsecoll.transport import LocalTransport, default_comm

KEYS = 2**40  # too many for a dense histogram


def program(comm) -> str:
    """Run on one rank and return a line of text."""
    rng = np.random.default_rng(comm.rank)

    # 1. How often does each 40-bit key occur? Every rank counts its own events; rank 0 receives the sum.
    events = (rng.zipf(1.3, 200_000) % KEYS).astype(np.uint64) * np.uint64(0x9E3779B1) % np.uint64(KEYS)
    keys, counts = np.unique(events, return_counts=True)
    histogram = sparsecoll.reduce(comm, sparsecoll.SparseVector(keys, counts, KEYS), root=0)

    # 2. Degrees in a graph of a million nodes: every rank has some edges and receives the degrees of its own nodes.
    nodes = 1_000_000
    edges = (nodes * rng.random((50_000, 2)) ** 3).astype(np.int64)
    ends, degrees = np.unique(edges, return_counts=True)
    own = sparsecoll.reduce_scatter(comm, sparsecoll.SparseVector(ends, degrees, nodes))
    busiest = sparsecoll.allreduce(comm, own, "oktopk", k=3)  # the three nodes with the most edges, on every rank

    counted = "" if histogram is None else f"{histogram.nnz:,} keys, {int(histogram.values.sum()):,} events; "
    top = ", ".join(f"node {i}: {d}" for i, d in zip(busiest.indices, busiest.values, strict=True))
    return f"rank {comm.rank}: {counted}{own.nnz:,} nodes here; {top}"


def main() -> None:
    comm = default_comm()
    if isinstance(comm, LocalTransport) or comm.size == 1:
        print("\n".join(sparsecoll.simulate(4, program).results))
    else:
        print(program(comm), flush=True)


if __name__ == "__main__":
    main()
