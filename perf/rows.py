"""Sums of embedding gradients: time and bytes of the busiest rank, beside gloo, dense sums and by hand.

    python perf/testbed.py run -- python perf/rows.py --json perf/results/rows.json

Every rank has a batch of ids, drawn by Zipf's law. All contestants get the distinct ids of the batch and a gradient for
each.
"""

import itertools
from functools import lru_cache, partial

import harness
import numpy as np
from harness import cell, load, markdown, source

import sparsecoll
from sparsecoll import RowGather, RowOwners, RowSparse
from sparsecoll.transport import as_transport, default_comm
from sparsecoll.transport.all_ranks import allgather

TABLES = {"5M x 64": (5_000_000, 64), "300k x 512": (300_000, 512)}
BATCH = 4096
ALGORITHMS = {"auto": "auto", "allgather": RowGather()}
ALGORITHMS |= {f"owners, {owner}": RowOwners(owner) for owner in ("hash", "range")}


@lru_cache(maxsize=2)
def distribution(n, exponent):
    """Return the cumulative probabilities of ids by Zipf's law."""
    cumulative = np.cumsum(np.arange(1, n + 1, dtype=np.float64) ** -exponent)
    return cumulative / cumulative[-1]


def batches(n, d, exponent, rank, count=3):
    """Return a function of a rank's next batch (ids, a gradient for each), of `count`."""
    made = []
    for number in range(count):
        rng = np.random.default_rng([9, rank, number])
        ids = np.searchsorted(distribution(n, exponent), rng.random(BATCH))
        made.append((ids, rng.standard_normal((BATCH, d), dtype=np.float32)))
    return itertools.cycle(made).__next__


def by_hand(comm, n, d):
    """Return a function that sums rows as users write it: Alltoallv to owners of equal row ranges, and back."""
    edges = np.array([n * j // comm.size for j in range(comm.size + 1)])

    def gathered(mine, counts, width):
        whole = np.empty(int(counts.sum()) * width, mine.dtype)
        comm.Allgatherv(mine.reshape(-1), [whole, counts * width])
        return whole

    def run(x):
        rows = x.rows
        sent = np.diff(np.searchsorted(rows, edges)).astype(np.int64)
        received = np.empty_like(sent)
        comm.Alltoall(sent, received)
        ids, values = np.empty(received.sum(), np.int64), np.empty((received.sum(), d), np.float32)
        comm.Alltoallv([rows, sent], [ids, received])
        comm.Alltoallv([x.values, sent * d], [values, received * d])
        order = np.argsort(ids, kind="stable")
        starts = np.flatnonzero(np.diff(ids[order], prepend=-1))
        sums = np.add.reduceat(values[order], starts, axis=0) if ids.size else values
        counts = np.array(comm.allgather(starts.size))
        return gathered(ids[order[starts]], counts, 1), gathered(sums, counts, d)

    return run


def contestants(comm, batch, n, d):
    """Return what is timed in turns, each with a function that returns its next input."""

    def rows():
        return RowSparse.from_pairs(*batch(), n)

    def ours(algo="auto", value_dtype=None):
        return lambda x: sparsecoll.allreduce(comm, x, ALGORITHMS[algo], value_dtype=value_dtype)

    runs = {name: (ours(name), rows) for name in ALGORITHMS}
    for name in ("auto", "allgather", "owners, hash"):
        runs[f"{name}, bfloat16"] = (ours(name, "bfloat16"), rows)
    runs["auto, bfloat16, a quarter of the rows"] = (lambda x: ours("auto", "bfloat16")(x.topk(x.nnz // 4)), rows)
    runs["Alltoallv by hand, equal ranges"] = (by_hand(comm, n, d), rows)
    return runs | {"gloo, sparse": (lambda x: harness.gloo_sparse(x.rows, x.values, x.shape), rows)}


def dense(comm, x):
    """Make the gradient dense and sum it by MPI_Allreduce."""
    from mpi4py import MPI

    comm.Allreduce(MPI.IN_PLACE, x.to_dense())


def moved(comm, interface, run, given):
    """Return the bytes that the links of the busiest rank, and of all in the mean, carry in a call."""
    before = harness.link_bytes(interface)
    run(given)
    comm.Barrier()
    busiest = allgather(as_transport(comm), harness.link_bytes(interface) - before).max(axis=1)
    return {"bytes": int(busiest.max()), "mean": float(busiest.mean())}


def measured(options, comm):
    """Measure and yield the rows, the same on every rank."""
    harness.start_gloo(comm, options.interface)
    for table, exponent in [(table, exponent) for table in options.tables for exponent in options.exponents]:
        n, d = TABLES[table]
        batch = batches(n, d, exponent, comm.rank)
        row = {"table": table, "n": n, "d": d, "P": comm.size, "exponent": exponent}
        runs = contestants(comm, batch, n, d)
        seconds = harness.in_turns(as_transport(comm), list(runs.values()), options.repeat, 1)
        for (name, (run, make)), time in zip(runs.items(), seconds, strict=True):
            yield row | {"name": name, "seconds": time} | moved(comm, options.interface, run, make())
        if exponent == options.exponents[0] and not options.quick:  # once: it takes seconds
            seconds = harness.in_turns(as_transport(comm), [(partial(dense, comm), runs["auto"][1])], 1, 0)
            yield row | {"name": "dense, MPI_Allreduce", "seconds": seconds[0]}


def tables():
    """Return the table of docs/rows.md: milliseconds, and times faster than gloo's sparse sum, and their bytes."""
    rows, lines = load("rows")["rows"], {}
    gloo = {(row["table"], row["exponent"]): row["seconds"] for row in rows if row["name"] == "gloo, sparse"}
    for row in (row for row in rows if row["exponent"] == 1.05):
        faster, line = gloo[row["table"], row["exponent"]] / row["seconds"], lines.setdefault(row["name"], {})
        ratio = f"{faster:.2f}" if faster > 0.1 else f"1/{1 / faster:.0f}"
        line[f"d = {row['d']}"] = f"{cell(row['seconds'] * 1e3)} ms, {ratio}"
        if "bytes" in row:
            line[f"MB, d = {row['d']}"] = row["bytes"] / 1e6
    return {"rows.times": f"{markdown([{'': name} | line for name, line in lines.items()])}\n\n{source('rows')}"}


def main():
    """Measure and print; rank 0 saves the rows."""
    defaults = {"tables": list(TABLES), "exponents": [1.05, 1.2], "repeat": 7, "interface": "eth0", "quick": False}
    options, comm = harness.options(__doc__, **defaults), default_comm()
    harness.record(measured(options, comm), options, comm.rank)


if __name__ == "__main__":
    main()
