"""Measured times of `auto` and of every algorithm that it can choose.

    mpirun -n 2 python perf/breakeven.py                       # this machine's memory as network
    python perf/testbed.py run -- python perf/breakeven.py     # 4 hosts with 1 Gb/s

Every rank has a SparseVector with k of n coordinates, drawn uniformly, and receives the exact sum; nothing is selected.
The choices are called by their names, in the format that `auto` uses. MPI_Allreduce sums the same vectors as dense
arrays. Calls are made in turns, for a given time at each point, and times are medians.

The smallest of several medians is too small by chance, and `auto` would seem slower than the algorithm that it takes.
Therefore the time of the fastest choice comes from other calls than those that tell which choice that is: one half of
the calls finds the choice that the other half times, and the other way round; "ms" is the mean of the two.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from entries import Entries, Run, in_turns, times_in_turns
from numpy.typing import NDArray
from report import Row

from sparsecoll import Algorithm, Auto, allreduce, formats
from sparsecoll.algorithms.auto.costmodel import CHOICES, EXACT
from sparsecoll.cli import bench
from sparsecoll.transport import as_transport, default_comm
from sparsecoll.transport.collectives import node_members

FEWEST, MOST = 6, 999  # timed calls of each


class AsDense:
    """The same entries as dense arrays, made for every call outside the timing."""

    def __init__(self, entries: Entries) -> None:
        self._entries = entries

    def __call__(self) -> np.ndarray:
        """Return the next vector."""
        return self._entries().to_dense()


def _allreduce(comm: Any, algorithm: Algorithm, form: str | formats.Format = "auto") -> Run:
    return lambda x: allreduce(comm, x, algorithm, format=form)


def _mpi_allreduce(comm: Any, n: int) -> Run:
    out = np.empty(n, np.float32)
    return lambda x: comm.Allreduce(x, out)


def points(comm: Any, lengths: list[int], densities: list[float], seconds: float) -> Iterator[Row]:
    """Yield a row for each length and density, the same on every rank."""
    transport = as_transport(comm)
    node_members(transport)  # which make its network known
    form = formats.Auto(beta=transport.network.beta)
    for n in lengths:
        for density in densities:
            entries = Entries(n, max(1, round(n * density)), transport.rank)
            calls = [(_allreduce(comm, CHOICES[name](), form), entries) for name in EXACT]
            calls += [(_allreduce(comm, Auto()), entries), (_mpi_allreduce(comm, n), AsDense(entries))]
            each = seconds / len(calls) / 2  # a timed call comes after one that is not
            once = in_turns(transport, calls, repeat=1, warm=0)
            repeats = [min(max(round(each / took), FEWEST), MOST) for took in once]
            times = times_in_turns(transport, calls, repeats, warm=1)
            yield {"n": n, "density": density, "P": transport.size} | _row(times)


def fastest(times: list[NDArray[np.float64]]) -> float:
    """Return the median seconds of the fastest of several functions, from other calls than those that tell which it is.

    Args:
        times: the seconds of each function's calls.
    """
    halves = [[float(np.median(some[half::2])) for some in times] for half in (0, 1)]
    return float(np.mean([halves[1 - half][int(np.argmin(halves[half]))] for half in (0, 1)]))


def _row(times: list[NDArray[np.float64]]) -> Row:
    """Return the columns of one point from the times of its calls: those of the choices, auto and MPI."""
    *choices, auto, mpi = [float(np.median(some)) for some in times]
    best, seconds = int(np.argmin(choices)), fastest(times[:-2])
    low, high = np.percentile(times[best], [25, 75]).tolist()
    return {
        "calls": len(times[best]),
        "fastest": EXACT[best],
        "ms": seconds * 1e3,
        "quartiles": f"{low * 1e3:.3g} to {high * 1e3:.3g}",
        "auto ms": auto * 1e3,
        "auto / fastest": auto / seconds,
        "MPI_Allreduce ms": mpi * 1e3,
        "auto / MPI_Allreduce": auto / mpi,
        **{f"{name} ms": took * 1e3 for name, took in zip(EXACT, choices, strict=True)},
    }


def judged(rows: list[Row]) -> str:
    """Return how near `auto` is to the fastest choice, as a sentence."""
    ratios = [row["auto / fastest"] for row in rows]
    mean = float(np.exp(np.mean(np.log(ratios))))
    return f"`auto` takes {mean:.3f} times as long as the fastest choice (geometric mean), {max(ratios):.2f} at most."


def main() -> None:
    """Measure and print; rank 0 saves the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", nargs="+", type=lambda t: int(float(t)), default=[10**5, 10**6, 10**7])
    parser.add_argument("--density", nargs="+", type=float, default=[1e-4, 1e-3, 0.01, 0.05, 0.1, 0.3])
    parser.add_argument("--seconds", type=float, default=6.0, help="for each point (default: 6)")
    parser.add_argument("--json", type=Path, help="save the rows; those of other numbers of ranks are kept")
    options = parser.parse_args()
    comm = default_comm()
    rows = []
    for row in points(comm, options.n, options.density, options.seconds):
        rows.append(row)
        if comm.rank == 0:
            detail = " ".join(f"{name} {row[f'{name} ms']:.3f}" for name in EXACT)
            sys.stdout.write(
                f"{row['n']:>10} {row['density']:<7} {row['fastest']:>17} {row['ms']:9.3f} ms ({row['quartiles']}),"
                f" auto {row['auto ms']:9.3f} {row['auto / fastest']:.2f} x, MPI {row['MPI_Allreduce ms']:9.3f}"
                f" | {detail}\n"
            )
            sys.stdout.flush()
    if comm.rank == 0:
        sys.stdout.write(judged(rows) + "\n")
        if options.json:
            known = json.loads(options.json.read_text())["rows"] if options.json.exists() else []
            rows = sorted([*(row for row in known if row["P"] != comm.size), *rows], key=lambda row: row["P"])
            options.json.write_text(json.dumps({"about": bench.about(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
