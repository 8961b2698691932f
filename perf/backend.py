"""Sums through the backend of torch.distributed and through gloo, in turns: dense ones, in 8 bits, and of rows.

    python perf/testbed.py run --hosts 2 -- python perf/backend.py --interface eth0 --json perf/results/backend.json

Rows are the gradients of an embedding for a batch of ids by Zipf's law, as in perf/rows.py. What their bytes allow is
the time of the fewer bytes of two, at `--gbit`: (P-1)/P of a rank's rows and of those of all ranks' union, or the other
ranks' rows.
"""

from functools import partial

import harness
import numpy as np
import torch
from harness import in_turns, load, markdown, source
from rows import batches
from torch import distributed as dist

import sparsecoll.torch  # noqa: F401, the backend
from sparsecoll.torch.backend import Options
from sparsecoll.transport import as_transport, default_comm
from sparsecoll.transport.all_ranks import allgather

DENSE = (1000, 100_000, 1_000_000, 5_000_000, 100_000_000)  # float32 values
TABLES = ((1_000_000, 64), (300_000, 512))


def dense(n, rank):
    """Return a function that makes the next gradient of n values, in the same memory, as DDP's buckets are."""
    x = torch.from_numpy(harness.heavy(n, rank))
    memory = torch.empty_like(x)
    return lambda: memory.copy_(x)


def sparse(n, d, rank):
    """Return a function that makes the next gradient of an embedding, and the row numbers of them all."""
    made, step = [], batches(n, d, 1.05, rank)
    for _ in range(3):
        ids, values = step()
        pairs = torch.from_numpy(ids)[None], torch.from_numpy(values)
        made.append(torch.sparse_coo_tensor(*pairs, (n, d), check_invariants=False).coalesce())
    turn = iter(range(10**9))
    return (lambda: made[next(turn) % 3].clone()), [t.indices()[0].numpy() for t in made]


def least_ms(transport, rows, d, gbit):
    """Return the milliseconds that the bytes of a sum of rows need."""
    P, own = transport.size, np.mean([one.size for one in rows])
    unions = []
    for one in rows:
        padded = np.full(int(allgather(transport, np.array([one.size])).max()), one[0])
        padded[: one.size] = one
        unions.append(np.unique(allgather(transport, padded)).size)
    return 4 * d * min((P - 1) / P * (own + np.mean(unions)), (P - 1) * own) * 8e-6 / gbit


def points(options, comm):
    """Yield a row for each tensor, the same on every rank."""
    harness.start_gloo(comm, options.interface)
    transport = as_transport(comm)
    groups = {"gloo": None, "sparsecoll": dist.new_group(backend="sparsecoll")}
    groups["8 bits"] = dist.new_group(backend="sparsecoll", pg_options=Options(dense="int8"))
    sums = {name: partial(dist.all_reduce, group=group) for name, group in groups.items()}
    for n in DENSE:
        new = dense(n, transport.rank)
        repeat = max(3, min(4 * options.repeat, 200_000_000 // n))
        times = in_turns(transport, [(run, new) for run in sums.values()], repeat, 1)
        yield {"P": transport.size, "tensor": f"{n:,} floats"} | dict(zip(sums, times, strict=True))
    del sums["8 bits"]
    for n, d in TABLES:
        new, rows = sparse(n, d, transport.rank)
        times = in_turns(transport, [(run, new) for run in sums.values()], options.repeat)
        row = {"P": transport.size, "tensor": f"rows of {n:,} x {d}"} | dict(zip(sums, times, strict=True))
        yield row | {"least": least_ms(transport, rows, d, options.gbit) / 1e3}


def tables():
    """Return the table of docs/backend.md: how many times faster than gloo, and time against what the bytes allow."""
    shown = {}
    for row in load("backend")["rows"]:
        line = shown.setdefault(row["tensor"], {"sum of": row["tensor"]})
        for name in ("sparsecoll", "8 bits"):
            line[f"{name}, {row['P']} hosts"] = f"{row['gloo'] / row[name]:.2f}" if name in row else None
        line[f"time / wire, {row['P']} hosts"] = f"{row['sparsecoll'] / row['least']:.2f}" if "least" in row else None
    return {"backend": f"{markdown(shown.values())}\n\n{source('backend')}"}


def main():
    """Measure and print; rank 0 saves the rows; --update keeps those of other numbers of ranks."""
    options, comm = harness.options(__doc__, repeat=15, interface="", gbit=1.0), default_comm()
    harness.record(points(options, comm), options, comm.rank, key=("P",))


if __name__ == "__main__":
    main()
