"""Sums of SciPy matrices and Counters beside comm.allreduce, which pickles them, in turns.

    mpirun -n 2 python perf/objects.py --json perf/results/objects.json
    mpirun -n 4 python perf/objects.py --json perf/results/objects.json --update

Every rank has as many entries as the table says, at uniform positions; keys are of four times as many.
"""

from collections import Counter

import harness
import numpy as np
import scipy.sparse
from harness import load, markdown, source
from mpi4py import MPI

import sparsecoll
from sparsecoll.transport import as_transport

SIDE = 100_000  # rows and columns of the matrices


def matrix(rng, count):
    """Return a CSR matrix of float64."""
    values, places = rng.standard_normal(count), rng.integers(SIDE, size=(2, count))
    return scipy.sparse.csr_array((values, tuple(places)), shape=(SIDE, SIDE))


def counter(rng, count, key=int):
    """Return counts of keys."""
    return Counter({key(k): 1 for k in rng.choice(4 * count, count, replace=False)})


def words(rng, count):
    """Return counts of words."""
    return counter(rng, count, "word {}".format)


def rows(options, comm):
    """Yield a row for each kind and number of entries, the same on every rank."""
    transport = as_transport(comm)
    runs = (lambda x: comm.allreduce(x, MPI.SUM)), (lambda x: sparsecoll.allreduce(comm, x))
    for make in (matrix, counter, words):
        for count in options.entries:
            x = make(np.random.default_rng(transport.rank), count)
            theirs, ours = harness.in_turns(transport, [(run, lambda x=x: x) for run in runs], options.repeat)
            row = {"P": comm.size, "sum of": make.__name__, "entries": count, "sparsecoll": ours}
            yield row | {"comm.allreduce": theirs, "x comm.allreduce": theirs / ours}


def tables():
    """Return the table of docs/from_mpi4py.md: how many times faster than comm.allreduce."""
    names = {"matrix": "CSR matrices", "counter": "Counters of ints", "words": "Counters of strings"}
    shown = {}
    for row in load("objects")["rows"]:
        line = shown.setdefault((row["sum of"], row["entries"]), {"": names[row["sum of"]]})
        line |= {"entries": f"{row['entries']:,}", f"{row['P']} ranks": f"{row['x comm.allreduce']:.1f} x"}
    return {"objects": f"{markdown(shown.values())}\n\n{source('objects')}"}


if __name__ == "__main__":
    options = harness.options(__doc__, entries=[8000, 500_000], repeat=5)
    harness.record(rows(options, MPI.COMM_WORLD), options, MPI.COMM_WORLD.rank, key=("P",))
