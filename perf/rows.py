"""Sums of embedding gradients: time, bytes and memory of the busiest rank, beside gloo, DDP, dense sums and by hand.

    python perf/testbed.py run -- python perf/rows.py --json perf/results/rows.json
    mpirun -n 4 python perf/rows.py --memory "gloo, sparse" --append --json perf/results/rows_memory.json
    python perf/rows.py --simulate 4 16 64 256 --tables "5M x 64" --json perf/results/rows_volume.json

Every rank has a batch of ids, drawn by Zipf's law; row 0 of the table is the most frequent one. All contestants get the
distinct ids of the batch and a gradient for each, except that DDP runs the back-propagation of an embedding, and that
rows named "from the batch" also sum the repeated ids. Seconds are medians of the slowest rank; bytes are what the link
of the busiest rank carries in one direction, headers included.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from allreduce import Gloo
from entries import in_turns
from formulas import gather_rows, owner_rows
from report import Row

import sparsecoll
from sparsecoll import RowSparse
from sparsecoll.algorithms.rows import RowGather, RowOwners
from sparsecoll.cli import bench
from sparsecoll.transport import as_transport, default_comm

TABLES = {"5M x 64": (5_000_000, 64), "300k x 512": (300_000, 512)}
BATCH = 4096
OURS = {
    "auto": "auto",
    "allgather": RowGather(),
    "owners, hash": RowOwners("hash"),
    "owners, quantile": RowOwners("quantile"),
    "owners, range": RowOwners("range"),
}
NOTHING = (0.0, 0.0, 0.0, 0)


@functools.lru_cache(maxsize=2)
def distribution(n: int, exponent: float) -> np.ndarray:
    """Return the cumulative probabilities of ids by Zipf's law."""
    weights = np.arange(1, n + 1, dtype=np.float64) ** -exponent
    cumulative: np.ndarray = np.cumsum(weights)
    cumulative /= cumulative[-1]
    return cumulative


class Batches:
    """Batches of one rank, a different one for every call, as (ids, a gradient for each)."""

    def __init__(self, n: int, d: int, exponent: float, rank: int, count: int = 3) -> None:
        self.n, self._calls = n, 0
        self._batches = []
        for number in range(count):
            rng = np.random.default_rng([9, rank, number])
            ids = np.searchsorted(distribution(n, exponent), rng.random(BATCH))
            self._batches.append((ids, rng.standard_normal((BATCH, d), dtype=np.float32)))

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the next batch."""
        self._calls += 1
        return self._batches[self._calls % len(self._batches)]

    def rows(self) -> RowSparse:
        """Return the gradients of the next batch, one for each distinct id."""
        return RowSparse.from_pairs(*self.batch(), self.n)


def ours(comm: Any, algo: Any, value_dtype: str | None, share: float = 1.0) -> bench.Run:
    """Return a function that sums rows by this library, or a share of them, those of largest norm."""

    def run(x: RowSparse) -> tuple[float, float, float, int]:
        k = round(share * x.nnz) if share < 1 else None  # may differ between the ranks, so it is not an argument
        sent = x if k is None else x.topk(k)
        return (*NOTHING[:3], sparsecoll.allreduce(comm, sent, algo, value_dtype=value_dtype).nnz)

    return run


def from_batch(comm: Any, n: int) -> bench.Run:
    """Return a function that sums repeated ids, then rows."""

    def run(batch: tuple[np.ndarray, np.ndarray]) -> tuple[float, float, float, int]:
        return (*NOTHING[:3], sparsecoll.allreduce(comm, RowSparse.from_pairs(*batch, n)).nnz)

    return run


def gloo_sparse(x: RowSparse) -> tuple[float, float, float, int]:
    """Sum a hybrid sparse_coo tensor by gloo."""
    import torch

    index, values = torch.from_numpy(x.rows)[None], torch.from_numpy(x.values.copy())
    tensor = torch.sparse_coo_tensor(index, values, x.shape, is_coalesced=True)
    torch.distributed.all_reduce(tensor)
    return (*NOTHING[:3], int(tensor._nnz()))


def by_hand(comm: Any, n: int, d: int) -> bench.Run:
    """Return a function that sums rows as users write it: Alltoallv to owners of equal row ranges, and back."""
    edges = np.array([n * j // comm.size for j in range(comm.size + 1)])

    def gathered(mine: np.ndarray, counts: np.ndarray, width: int) -> np.ndarray:
        whole = np.empty(int(counts.sum()) * width, mine.dtype)
        comm.Allgatherv(mine.reshape(-1), [whole, counts * width])
        return whole

    def run(x: RowSparse) -> tuple[float, float, float, int]:
        sent = np.diff(np.searchsorted(x.rows, edges)).astype(np.int64)
        received = np.empty_like(sent)
        comm.Alltoall(sent, received)
        ids, values = np.empty(received.sum(), np.int64), np.empty((received.sum(), d), np.float32)
        comm.Alltoallv([x.rows, sent], [ids, received])
        comm.Alltoallv([x.values, sent * d], [values, received * d])
        order = np.argsort(ids, kind="stable")
        starts = np.flatnonzero(np.diff(ids[order], prepend=-1))
        mine = ids[order[starts]]
        sums = np.add.reduceat(values[order], starts, axis=0) if ids.size else values
        counts = np.array(comm.allgather(mine.size))
        return (*NOTHING[:3], gathered(mine, counts, 1).size + 0 * gathered(sums, counts, d).size)

    return run


def dense(comm: Any, n: int, d: int) -> bench.Run:
    """Return a function that makes the gradient dense and sums it by MPI_Allreduce."""

    def run(x: RowSparse) -> tuple[float, float, float, int]:
        mpi, table = sys.modules["mpi4py.MPI"], x.to_dense()
        comm.Allreduce(mpi.IN_PLACE, table)
        return (*NOTHING[:3], int(table[0, 0] != 0))

    return run


def ddp(n: int, d: int) -> bench.Run:
    """Return a function that runs a forward and a backward pass of an embedding with sparse gradients under DDP."""
    import torch

    table = torch.nn.Embedding(n, d, sparse=True, _weight=torch.zeros(n, d))
    model = torch.nn.parallel.DistributedDataParallel(table, init_sync=False)

    def run(batch: tuple[np.ndarray, np.ndarray]) -> tuple[float, float, float, int]:
        ids, gradients = map(torch.from_numpy, batch)
        table.weight.grad = None
        model(ids).backward(gradients)
        grad: Any = table.weight.grad
        return (*NOTHING[:3], int(grad._nnz()))

    return run


class Meter:
    """Counts what a call moves over this rank's link."""

    def __init__(self, transport: Any, interface: str) -> None:
        self._transport, self._folder = transport, Path("/sys/class/net", interface, "statistics")

    def _link(self) -> np.ndarray:
        return np.array([int((self._folder / f"{way}_bytes").read_text()) for way in ("tx", "rx")])

    def __call__(self, run: bench.Run, given: Any) -> dict[str, float]:
        """Return the bytes of the busiest rank, and the mean of all."""
        before = self._link()
        run(given)
        sparsecoll.transport.collectives.allgather(self._transport, np.array([0]))
        moved = self._link() - before
        busiest = sparsecoll.transport.collectives.allgather(self._transport, moved).max(axis=1)
        return {"bytes": int(busiest.max()), "mean": float(busiest.mean())}


def memory(options: argparse.Namespace, comm: Any) -> Iterator[Row]:
    """Yield by how much the largest resident size of a process grows in the first long call of one contestant."""
    Gloo(comm, None)
    name, exponent = options.memory, options.exponents[0]
    for table in options.tables:
        n, d = TABLES[table]
        for length in (100, n):  # a short call loads the code
            batches = Batches(length, d, exponent, comm.rank, 1)
            make: Callable[[], Any]
            if name == "gloo, DDP with sparse=True":
                run, make = ddp(length, d), batches.batch
            elif name == "dense, MPI_Allreduce":
                run, make = dense(comm, length, d), batches.rows
            else:
                run, make = contestants(comm, batches, length, d)[name]
            given = make()
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
            resident = status("VmRSS")
            run(given)
            grown = max(comm.allgather(status("VmHWM") - resident))
        yield {"table": table, "P": comm.size, "exponent": exponent, "name": name, "memory": grown}


def status(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith(field))) * 1024


def contestants(comm: Any, batches: Batches, n: int, d: int) -> dict[str, tuple[bench.Run, Callable[[], Any]]]:
    """Return what is timed in turns, each with a function that returns its next input."""
    runs: dict[str, tuple[bench.Run, Callable[[], Any]]] = {}
    for name, algo in OURS.items():
        runs[name] = (ours(comm, algo, None), batches.rows)
    for name in ("auto", "allgather", "owners, hash"):
        runs[f"{name}, bfloat16"] = (ours(comm, OURS[name], "bfloat16"), batches.rows)
    runs["auto, bfloat16, a quarter of the rows"] = (ours(comm, "auto", "bfloat16", 0.25), batches.rows)
    runs["auto, from the batch"] = (from_batch(comm, n), batches.batch)
    runs["Alltoallv by hand, equal ranges"] = (by_hand(comm, n, d), batches.rows)
    runs["gloo, sparse"] = (gloo_sparse, batches.rows)
    return runs


def rows(options: argparse.Namespace, comm: Any) -> Iterator[Row]:
    """Measure and yield the rows, the same on every rank."""
    Gloo(comm, options.interface)
    transport = as_transport(comm)
    meter = Meter(transport, options.interface)
    for table in options.tables:
        n, d = TABLES[table]
        for exponent in options.exponents:
            batches = Batches(n, d, exponent, comm.rank)
            given = {"table": table, "n": n, "d": d, "P": comm.size, "exponent": exponent}
            runs = contestants(comm, batches, n, d)
            slow: dict[str, tuple[bench.Run, Callable[[], Any]]] = {}
            if exponent == options.exponents[0] and not options.quick:
                slow["gloo, DDP with sparse=True"] = (ddp(n, d), batches.batch)
                slow["dense, MPI_Allreduce"] = (dense(comm, n, d), batches.rows)
            for some, repeat, warm in ((runs, options.repeat, 1), (slow, 1, 0)):
                seconds = in_turns(transport, list(some.values()), repeat, warm) if some else []
                for (name, (run, make)), time in zip(some.items(), seconds, strict=True):
                    counted = meter(run, make()) if some is runs else {}
                    yield {**given, "name": name, "seconds": time, **counted}
            slow.clear()


def volumes(options: argparse.Namespace) -> Iterator[Row]:
    """Count the bytes of each rank on the simulator, beside the formulas."""
    for table in options.tables:
        n, d = TABLES[table]
        for exponent in options.exponents:
            for P in options.simulate:
                inputs = [Batches(n, 1, exponent, rank, 1).rows() for rank in range(P)]
                held = sum(x.nnz for x in inputs) / P
                union = int(np.unique(np.concatenate([x.rows for x in inputs])).size)
                given = {"table": table, "P": P, "exponent": exponent, "rows": held, "union": union}
                yield from counted(P, inputs, d, given, options.names)


def counted(P: int, inputs: list[RowSparse], d: int, given: Row, names: list[str]) -> Iterator[Row]:
    """Yield a row for each algorithm, of rows that have d values or as many as the simulator's memory allows."""
    held, union = given["rows"], given["union"]
    wide = min(d, 1024 // P)  # memory of the simulator: all ranks are in one process
    xs = [x.with_values(np.repeat(x.values, wide, axis=1)) for x in inputs]
    for name in names:

        def program(comm: Any, algo: Any = OURS[name]) -> tuple[int, int]:
            before = sparsecoll.traffic(comm).copy()
            sparsecoll.allreduce(comm, xs[comm.rank], algo)
            moved = sparsecoll.traffic(comm).since(before).total
            return moved.bytes_received, moved.bytes_sent

        found = np.array(sparsecoll.simulate(P, program).results)
        scattered = scatter_bytes(P, xs, name)
        formula = gather_rows(held, P) if name == "allgather" else owner_rows(held, union, P)
        yield {
            **given,
            "name": name,
            "d": wide,
            "bytes": int(found[:, 0].max()),
            "mean": float(found[:, 0].mean()),
            "sent": int(found[:, 1].max()),
            "sent, mean": float(found[:, 1].mean()),
            "formula": formula * wide * 4,
            **scattered,
        }


def scatter_bytes(P: int, xs: list[RowSparse], name: str) -> Row:
    """Return the bytes that the busiest rank receives in a reduce-scatter, and the mean."""
    owner = name.partition(", ")[2]
    if not owner:
        return {}

    def program(comm: Any) -> int:
        before = sparsecoll.traffic(comm).copy()
        sparsecoll.reduce_scatter(comm, xs[comm.rank], owner=owner)
        return int(sparsecoll.traffic(comm).since(before).total.bytes_received)

    found = np.array(sparsecoll.simulate(P, program).results)
    return {"scatter": int(found.max()), "scatter, mean": float(found.mean())}


def main() -> None:
    """Measure and print; rank 0 saves the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--exponents", nargs="+", type=float, default=[1.05, 1.2])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="without dense sums and DDP")
    parser.add_argument("--simulate", nargs="+", type=int, metavar="P", help="count volumes on the simulator")
    parser.add_argument(
        "--memory", metavar="NAME", help="measure the memory of one contestant, in a process of its own"
    )
    parser.add_argument("--names", nargs="+", choices=OURS, default=list(OURS)[1:], help="algorithms to simulate")
    parser.add_argument("--interface", default="eth0", help="network interface for gloo, whose bytes are counted")
    parser.add_argument("--json", type=Path, help="save the rows")
    parser.add_argument("--append", action="store_true", help="keep other rows of the JSON file")
    options = parser.parse_args()
    comm = None if options.simulate else default_comm()
    kept = json.loads(options.json.read_text())["rows"] if options.append else []
    found: list[Row] = []
    measure = volumes(options) if options.simulate else memory(options, comm) if options.memory else rows(options, comm)
    for row in measure:
        found.append(row)
        if comm is None or comm.rank == 0:
            seconds = f"{row['seconds'] * 1e3:>10.2f} ms" if "seconds" in row else ""
            if "memory" in row:
                seconds = f"{row['memory'] / 1e6:>10.1f} MB of memory"
            moved = (
                f"{row['bytes'] / 1e6:>9.3f} MB, {row['bytes'] / row['mean']:.3f} of the mean" if "mean" in row else ""
            )
            sys.stdout.write(f"{row['table']:<12}{row['exponent']:<6}{row['P']:<5}{row['name']:<34}{seconds}{moved}\n")
            sys.stdout.flush()
            if options.json:
                new = {identity(row) for row in found}
                together = [row for row in kept if identity(row) not in new] + found
                options.json.write_text(json.dumps({"about": bench.about(), "rows": together}, indent=1) + "\n")


def identity(row: Row) -> tuple[str, int, float, str]:
    """Return the values that identify a row."""
    return row["table"], row["P"], row["exponent"], row["name"]


if __name__ == "__main__":
    main()
