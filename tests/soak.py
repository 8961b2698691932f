"""A long run: many small and some large allreduces, every algorithm in turn, several communicators, two threads.

    mpirun -n 4 python tests/soak.py                                    # 100,000 small, 1,000 large: ten minutes
    mpirun -n 4 python tests/soak.py --small 2000 --large 20 --json out.json

Every result is compared with the exact sum or the top k of it. At intervals a communicator is replaced by a new one,
and one rank fails, which all ranks must report. In the end, memory, threads and open sends must be what they were after
the warm-up. Run it on MPICH and on Open MPI.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import sparsecoll
from sparsecoll import ALGORITHMS, CommunicationError, SparseVector
from sparsecoll.algorithms import OkTopk, as_algorithm
from sparsecoll.bench.timing import about
from sparsecoll.transport import as_transport, default_comm

SMALL, LARGE = (2003, 40), (1_000_000, 10_000)  # n, k
FAIL_EVERY, RENEW_EVERY = 1000, 5000
PAGE = resource.getpagesize()


class Fault(Exception):
    """Raised on purpose."""


def memory() -> int:
    """Return the resident memory of this process, in bytes."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def vectors(n: int, k: int, size: int, turn: int) -> list[SparseVector]:
    """Return all ranks' inputs of one call: small whole numbers, so that sums are exact."""
    made = []
    for rank in range(size):
        rng = np.random.default_rng([turn, rank])
        indices = np.unique(rng.integers(0, n, k))
        made.append(SparseVector(indices, rng.integers(1, 100, indices.size).astype(np.float32), n))
    return made


class Case:
    """The inputs of a call and the expected result."""

    def __init__(self, n: int, k: int, size: int, turn: int) -> None:
        self.inputs, self.k = vectors(n, k, size, turn), k
        self.sum = np.zeros(n, np.float32)
        for x in self.inputs:
            self.sum[x.indices] += x.values
        self.magnitude = np.sort(np.abs(self.sum))[-k]

    def check(self, name: str, value: SparseVector) -> None:
        """Raise if the value is wrong."""
        semantics = ALGORITHMS[name]().semantics
        if semantics == "exact_sum":
            assert np.array_equal(value.to_dense(), self.sum), name
            return
        assert value.nnz <= 1.1 * self.k, (name, value.nnz)
        if semantics == "top_k_of_sum":
            assert np.array_equal(value.values, self.sum[value.indices]), name
            assert value.nnz and np.abs(value.values).min() >= 0.8 * self.magnitude, name


def one(comm: Any, case: Case, name: str, algorithm: Any) -> None:
    """Make one call and check its result."""
    x = case.inputs[comm.rank]
    case.check(name, sparsecoll.allreduce(comm, x, algorithm, k=case.k, timeout=120))


def fail(comm: Any, case: Case, turn: int) -> None:
    """Let one rank fail between its messages; all ranks must raise."""
    transport, culprit = as_transport(comm), turn % comm.size
    isend = transport.isend

    def failing(destination: int, buffer: Any) -> None:
        raise Fault("on purpose")

    if comm.rank == culprit:
        transport.isend = failing  # type: ignore[method-assign]
    try:
        sparsecoll.allreduce(comm, case.inputs[comm.rank], "oktopk", k=case.k, timeout=120)
    except CommunicationError as error:
        assert "Fault: on purpose" in str(error), error
    else:
        raise AssertionError("nobody heard of the failure")
    finally:
        transport.isend = isend  # type: ignore[method-assign]


def many(comm: Any, cases: list[Case], count: int, start: int) -> None:
    """Call all algorithms in turn; every third object keeps its state between calls."""
    names = list(ALGORITHMS)
    kept = {name: as_algorithm(name) for name in names}
    for turn in range(start, start + count):
        name, case = names[turn % len(names)], cases[turn % len(cases)]
        one(comm, case, name, kept[name] if turn % 3 == 0 and name != "auto" else name)
        if comm.size > 1 and turn % FAIL_EVERY == FAIL_EVERY - 1:
            fail(comm, case, turn)


def both(comms: list[Any], cases: list[Case], count: int, start: int) -> None:
    """Run `many` in two threads, each with a communicator."""
    problems: list[BaseException] = []

    def work(comm: Any) -> None:
        try:
            many(comm, cases, count, start)
        except BaseException as error:
            problems.append(error)
            raise

    threads = [threading.Thread(target=work, args=(comm,)) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


def main() -> None:
    """Run, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=int, default=100_000)
    parser.add_argument("--large", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    world = default_comm()
    small = [Case(*SMALL, world.size, turn) for turn in range(12)]
    large = [Case(*LARGE, world.size, turn) for turn in range(3)]
    threads_allowed = as_transport(world).threads
    comms = [world.Dup(), world.Dup()]

    def round_of(count: int, start: int) -> None:
        if threads_allowed:
            both(comms, small, count // 2, start)
        else:
            many(comms[0], small, count, start)
        requests = [sparsecoll.iallreduce(comms[0], small[0].inputs[world.rank], OkTopk(k=40)) for _ in range(5)]
        for request in requests:
            request.wait()

    round_of(min(2000, options.small), 0)  # warm-up: kernels, pools, thresholds
    many(world, large, min(2 * len(ALGORITHMS), options.large), 0)
    before, threads, began = memory(), threading.active_count(), time.perf_counter()
    done = 0
    while done < options.small:
        count = min(RENEW_EVERY, options.small - done)
        round_of(count, done)
        done += count
        comms[1].Free()
        comms[1] = world.Dup()
        if world.rank == 0:
            sys.stdout.write(f"{done} small calls, {memory() / 2**20:.0f} MiB\n")
            sys.stdout.flush()
    many(world, large, options.large, 0)
    for comm in comms:
        comm.Free()
    after, sends = memory(), len(as_transport(world)._sends)  # type: ignore[attr-defined]
    row = {"P": world.size, "small": options.small, "large": options.large, "seconds": time.perf_counter() - began}
    row |= {"MiB before": max(world.allgather(before)) / 2**20, "MiB after": max(world.allgather(after)) / 2**20}
    row |= {"threads before": threads, "threads after": threading.active_count(), "open sends": sends}
    assert sends == 0 and threading.active_count() <= threads
    if world.rank == 0:
        sys.stdout.write(json.dumps(row) + "\n")
        if options.json:
            options.json.write_text(json.dumps({"about": about(), "rows": [row]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
