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

from functools import partial

import harness
import numpy as np
from harness import drawn, in_turns, times_in_turns

from sparsecoll import Auto, allreduce, formats
from sparsecoll.algorithms.auto.costmodel import CHOICES, EXACT
from sparsecoll.transport import as_transport, default_comm
from sparsecoll.transport.all_ranks import node_members

FEWEST, MOST = 6, 999  # timed calls of each


def points(options, comm):
    """Yield a row for each length and density, the same on every rank."""
    transport = as_transport(comm)
    node_members(transport)  # which make its network known
    form = formats.AutoFormat(beta=transport.network.beta)
    for n, density in [(n, density) for n in options.n for density in options.density]:
        entries = drawn(n, max(1, round(n * density)), transport.rank)
        calls = [(partial(allreduce, comm, algo=CHOICES[name](), format=form), entries) for name in EXACT]
        calls += [(partial(allreduce, comm, algo=Auto()), entries)]
        out = np.empty(n, np.float32)
        calls += [(lambda x, out=out: comm.Allreduce(x, out), lambda entries=entries: entries().to_dense())]
        each = options.seconds / len(calls) / 2  # a timed call comes after one that is not
        repeats = [min(max(round(each / took), FEWEST), MOST) for took in in_turns(transport, calls, 1, 0)]
        yield {"n": n, "density": density, "P": transport.size} | _row(times_in_turns(transport, calls, repeats, 1))


def fastest(times):
    """Return the median seconds of the fastest of several functions, from other calls than those that tell which it is;
    `times` has the seconds of each function's calls.
    """
    halves = [[float(np.median(some[half::2])) for some in times] for half in (0, 1)]
    return float(np.mean([halves[1 - half][int(np.argmin(halves[half]))] for half in (0, 1)]))


def _row(times):
    """Return the columns of one point from the times of its calls: those of the choices, auto and MPI."""
    *choices, auto, mpi = [float(np.median(some)) for some in times]
    best, seconds = int(np.argmin(choices)), fastest(times[:-2])
    row = {"fastest": EXACT[best], "ms": seconds * 1e3, "auto ms": auto * 1e3}
    row |= {"auto / fastest": auto / seconds, "MPI_Allreduce ms": mpi * 1e3, "auto / MPI_Allreduce": auto / mpi}
    return row | {f"{name} ms": took * 1e3 for name, took in zip(EXACT, choices, strict=True)}


def judged(rows):
    """Return how near `auto` is to the fastest choice: the geometric mean of the ratios, and the largest."""
    ratios = [row["auto / fastest"] for row in rows]
    return float(np.exp(np.mean(np.log(ratios)))), max(ratios)


def main():
    """Measure and print; rank 0 saves the rows; --update keeps those of other numbers of ranks."""
    densities, comm = [1e-4, 1e-3, 0.01, 0.05, 0.1, 0.3], default_comm()
    options = harness.options(__doc__, n=[10**5, 10**6, 10**7], density=densities, seconds=6.0)  # for each point
    harness.record(points(options, comm), options, comm.rank, key=("P",))


if __name__ == "__main__":
    main()
