"""Calls that some ranks make while the others make another one."""

import itertools
import re

import numpy as np

import sparsecoll
from sparsecoll import ALGORITHMS, CommunicationError, RowSparse, SparseVector, simulate
from sparsecoll.transport.waiting import Watchdog

N = 64
NAMED = re.compile(r"([a-z_ ]+): expected the same (value|calls) on all")


def vector(comm, length=N):
    return SparseVector(np.arange(comm.rank, N, 7), np.ones(len(range(comm.rank, N, 7)), np.float32), length)


def rows(comm):
    return RowSparse(np.array([comm.rank, comm.rank + 3]), np.ones((2, 3), np.float32), N)


def of_algorithm(name, length=N, **options):
    return lambda comm: sparsecoll.allreduce(comm, vector(comm, length), name, **options)


CALLS = {
    **{name: of_algorithm(name, k=4) for name in ALGORITHMS},
    "all entries": of_algorithm("sparcml"),
    "unchecked": of_algorithm("allgather", k=4, check=False),
    "iallreduce": lambda comm: sparsecoll.iallreduce(comm, vector(comm), "sparcml", k=6).wait(),
    "plan": lambda comm: sparsecoll.allreduce_init(comm, vector(comm), "densestream", k=4)(vector(comm)),
    "rows": lambda comm: sparsecoll.allreduce(comm, rows(comm)),
    "keys": lambda comm: sparsecoll.allreduce(comm, {comm.rank: 1.0}),
    "words": lambda comm: sparsecoll.allreduce(comm, {"abc"[comm.rank % 3]: 1.0}, k=2),
    "allgather": lambda comm: sparsecoll.allgather(comm, vector(comm)),
    "reduce_scatter": lambda comm: sparsecoll.reduce_scatter(comm, vector(comm)),
    "alltoall": lambda comm: sparsecoll.alltoall(comm, [vector(comm)] * comm.size),
    "alltoallv": lambda comm: sparsecoll.alltoallv(comm, {(comm.rank + 1) % comm.size: vector(comm)}),
    **{f"reduce to {root}": lambda comm, root=root: sparsecoll.reduce(comm, vector(comm), root) for root in (0, 1)},
    **{f"gather to {root}": lambda comm, root=root: sparsecoll.gather(comm, vector(comm), root) for root in (0, 1)},
    **{f"bcast of {root}": lambda comm, root=root: sparsecoll.bcast(comm, vector(comm), root) for root in (0, 1)},
    "scatter": lambda comm: sparsecoll.scatter(comm, [vector(comm)] * comm.size, 0),
}
OTHER_ARGUMENTS = {"k": {"k": 5}, "op": {"k": 4, "op": "mean"}, "length": {"k": 4, "length": N + 1}}
ALIKE = {(name, f"{name}, other {what}") for name in ALGORITHMS for what in OTHER_ARGUMENTS}
PAIRS = [*itertools.permutations(CALLS, 2), *sorted(ALIKE), *sorted((b, a) for a, b in ALIKE)]
CALLS |= {f"{a}, other {what}": of_algorithm(a, **kw) for a in ALGORITHMS for what, kw in OTHER_ARGUMENTS.items()}
KNOWN = ("both", "others", "own", "none")  # which of the two calls the ranks have made before
CASES = [
    (P, odd, own, others, KNOWN[(P + odd + number) % len(KNOWN)])
    for P in range(2, 10)
    for odd in range(P)
    for number, (own, others) in enumerate(PAIRS)
]


def attempt(comm, call):
    """The text of what is raised by the call, or by the next one if this one waits for no message."""
    try:
        call(comm)
        for _ in range(2):  # in the second one raises who has finished the first one when another rank fails in it
            sparsecoll.alltoall(comm, [vector(comm)] * comm.size)
    except CommunicationError as error:
        return str(error)


def ordinary(comm):
    """A call that all ranks make."""
    return sparsecoll.allreduce(comm, SparseVector([1], np.ones(1), N), "allgather").values.tolist()


def mismatched(comm, odd, own, others, known):
    """One rank makes a call of its own; the text of the error, and the result of a call afterwards."""
    for name, which in ((own, ("both", "own")), (others, ("both", "others"))):
        if known in which:
            CALLS[name](comm)
    return attempt(comm, CALLS[own if comm.rank == odd else others]), ordinary(comm)


def failures(P, cases):
    """The cases, of P ranks each, that do not raise the same error on all ranks and leave the communicator usable."""
    under_way = []

    def program(comm):
        results = []
        for number, case in enumerate(cases):
            if comm.rank == 0:
                under_way[:] = [number]
            results.append(mismatched(comm, *case[1:]))
        return results

    wrong = []
    try:
        results = zip(*simulate(P, program).results, strict=True)
    except Exception as error:
        number = under_way[0]
        found = [] if number == 0 else failures(P, cases[:number])
        return [
            *found,
            (cases[number], repr(error)),
            *(failures(P, cases[number + 1 :]) if cases[number + 1 :] else []),
        ]
    for case, result in zip(cases, results, strict=True):
        texts = {text for text, _ in result}
        usable = all(value == [P] for _, value in result)
        if len(texts) != 1 or not usable or not NAMED.match(str(result[0][0])):
            wrong.append((case, texts, usable))
    return wrong


def bounded(monkeypatch, stall=0.03):
    """Over MPI and sockets, let a rank look for other calls early, and give up rather than wait for ever."""
    init = Watchdog.__init__

    def sooner(self, rank, what, timeout, *arguments, **options):
        init(self, rank, what, timeout or 100, *arguments, **options)
        self._stall = stall

    monkeypatch.setattr(Watchdog, "__init__", sooner)
