"""The same calls over MPI and over the sockets that connect ranks under torchrun, in turns, beside MPI and gloo.

    python perf/testbed.py run -- python perf/sockets.py --interface eth0 --json perf/results/sockets.json

Long vectors are dense, with heavy-tailed values, of which every rank selects the largest entries; gloo's sparse sum is
given its entries. Short calls have vectors of 100,000 coordinates: `k` entries of each rank, or all coordinates for
MPI's and gloo's dense sums. Times are medians of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from allreduce import OURS, Gloo
from breakeven import AsDense
from entries import Entries, in_turns
from report import Row

from sparsecoll import DenseVector
from sparsecoll.cli import bench
from sparsecoll.cli.arguments import MPI_ALLREDUCE
from sparsecoll.cli.bench import Call
from sparsecoll.transport import as_transport, default_comm

SHORT = 100_000
Runs = dict[str, tuple[bench.Run, Callable[[], Any]]]


def pairs(comm: Any, gloo: Gloo, name: str, call: Call, vectors: Callable[[], Any]) -> Runs:
    """Return the same call over MPI and over sockets."""
    return {
        f"{name}, MPI": (bench.runner(comm, call), vectors),
        f"{name}, sockets": (bench.runner(gloo.group, call), vectors),
    }


def long(comm: Any, gloo: Gloo, n: int, density: float) -> Iterator[Runs]:
    """Yield calls with dense vectors that are timed together."""
    vectors = bench.heavy_tailed(n, comm.rank)
    chosen = DenseVector(vectors()).topk(round(density * n))
    yield {"gloo, sparse": (gloo.sparse, lambda: chosen)}
    for name in ("exact sum", "top k of sum"):
        algo, value_dtype = OURS[name]
        yield pairs(comm, gloo, name, Call(algo, density, "auto", value_dtype), vectors)


def short(comm: Any, gloo: Gloo, k: int) -> Iterator[Runs]:
    """Yield calls with sparse vectors that are timed together."""
    entries = Entries(SHORT, k, comm.rank)
    dense = AsDense(entries)
    runs: Runs = {MPI_ALLREDUCE: (bench.runner(comm, Call(MPI_ALLREDUCE, None)), dense)}
    runs |= {"gloo, dense": (gloo.dense, dense), "gloo, sparse": (gloo.sparse, entries)}
    yield runs | pairs(comm, gloo, "exact sum", Call("auto", None), entries)


def rows(options: argparse.Namespace, comm: Any) -> Iterator[Row]:
    """Measure and yield the rows, the same on every rank."""
    gloo, transport = Gloo(comm, options.interface), as_transport(comm)

    def timed(n: int, k: int | None, runs: Runs, repeat: int, warm: int) -> Iterator[Row]:
        for name, seconds in zip(runs, in_turns(transport, list(runs.values()), repeat, warm), strict=True):
            yield {"n": n, "k": k, "P": comm.size, "name": name, "seconds": seconds}

    vectors = bench.heavy_tailed(options.n, comm.rank)
    dense: Runs = {MPI_ALLREDUCE: (bench.runner(comm, Call(MPI_ALLREDUCE, 1.0)), vectors)}
    yield from timed(options.n, None, dense | {"gloo, dense": (gloo.dense, vectors)}, 3, 0)
    for density in options.density:
        for runs in long(comm, gloo, options.n, density):
            alone = "gloo, sparse" in runs  # which takes seconds
            yield from timed(options.n, round(density * options.n), runs, 1 if alone else options.repeat, 0)
    for k in options.k:
        for runs in short(comm, gloo, k):
            yield from timed(SHORT, k, runs, 20 * options.repeat, 10)


def main() -> None:
    """Measure and print; rank 0 saves the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=lambda t: int(float(t)), default=24_000_000)
    parser.add_argument("--density", nargs="+", type=float, default=[0.01, 0.05, 0.1])
    parser.add_argument("--k", nargs="+", type=int, default=[1, 1000], help="entries of short calls")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--interface", help="network interface for gloo and sockets")
    parser.add_argument("--json", type=Path, help="save the rows")
    options = parser.parse_args()
    comm = default_comm()
    found: list[Row] = []
    for row in rows(options, comm):
        found.append(row)
        if comm.rank == 0:
            entries = "all" if row["k"] is None else f"{row['k']:,}"
            sys.stdout.write(f"{row['n']:>12,}{entries:>12} {row['name']:<24}{row['seconds'] * 1e3:>10.3f} ms\n")
            sys.stdout.flush()
            if options.json:
                options.json.write_text(json.dumps({"about": bench.about(), "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
