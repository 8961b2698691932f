"""A MemoryError at every function of the library that one rank calls within a collective call.

    python tests/memory_errors.py --every 1

It must be raised on all ranks. Then the communicator must be usable, or out of use and say so: never a wrong sum, no
endless wait. Runs the algorithms of the registry, and those that send sparse messages with every format, on the
simulator, on sockets (TcpTransport) and on an MPI in one process (MpiTransport).
"""

import argparse
import collections
import contextlib
import sys
from pathlib import Path

import numpy as np

import sparsecoll
from sparsecoll import ALGORITHMS, SparseVector
from sparsecoll.formats import FORMATS
from sparsecoll.transport import call as calls

sys.path += [str(Path(__file__).parent), str(Path(__file__).parent / "transport")]

HOME = str(Path(sparsecoll.__file__).parent)
P, CULPRIT, N, TIMEOUT = 3, 1, 300, 20
ENTER, EXIT = calls.CollectiveCall.__enter__.__code__, calls.CollectiveCall.__exit__.__code__


def of_the_simulator(code):
    """Whether this schedules virtual ranks, which is no work of the library on one rank."""
    return code.co_qualname.startswith("World.")


class Injection:
    """A profiler that raises when this thread enters its `nth` function of the library within a collective call.

    Attributes:
        seen: functions that were entered.
        where: the one at which it raised; "" if it did not.
    """

    def __init__(self, nth):
        self.nth, self.seen, self.where, self.depth = nth, 0, "", 0

    def __call__(self, frame, event, argument):
        code = frame.f_code
        if code is ENTER and event == "return":
            self.depth += 1
        elif code is EXIT and event == "call":
            self.depth -= 1
        elif event == "call" and self.depth > 0 and code.co_filename.startswith(HOME) and not of_the_simulator(code):
            self.seen += 1
            if self.seen == self.nth:
                sys.setprofile(None)
                self.where = f"{code.co_filename[len(HOME) + 1 :]}:{frame.f_lineno} {code.co_name}"
                raise MemoryError("injected")


def given(rank, algo):
    """Integers, so that every order of additions gives the same sum."""
    rng = np.random.default_rng(rank)
    indices = np.sort(rng.choice(N, 20, replace=False))
    x = SparseVector(indices, rng.integers(1, 99, 20).astype(np.float32), N)
    return x.to_dense() if ALGORITHMS[algo]().takes_dense else x


def calls_of(algo, form):
    """Return a function that makes one call on a communicator, and returns its result in a comparable way."""

    def make(comm):
        y = sparsecoll.allreduce(comm, given(comm.rank, algo), algo, k=20, format=form, timeout=TIMEOUT)
        return y.to_dense().tobytes() if isinstance(y, SparseVector) else np.asarray(y).tobytes()

    return make


def program(make, nth, found):
    """Return what a rank does: calls until one fails, three at most, and then two more."""

    def run(comm):
        injection, outcomes = Injection(nth), []
        make(comm)
        for turn in range(3):
            try:
                if comm.rank == CULPRIT and turn == 0:
                    sys.setprofile(injection)
                outcomes.append(make(comm))
            except Exception as error:
                outcomes.append(f"{type(error).__name__}: {error}")
                break
            finally:
                if comm.rank == CULPRIT:
                    sys.setprofile(None)
        if comm.rank == CULPRIT:
            found.append(injection)
        for _ in range(2):
            try:
                outcomes.append(make(comm))
            except Exception as error:
                outcomes.append(f"{type(error).__name__}: {error}")
        return outcomes

    return run


def simulated(run):
    return sparsecoll.simulate(P, run).results


def on_sockets(run):
    import socket_ranks

    return socket_ranks.run(P, run, TIMEOUT)


def on_mpi(run):
    import hostile
    import hostile_mpi

    world = hostile.World(0, P)
    world.room, world.slow, world.short, world.eager = 100_000, 0.0, 0.0, 0.1  # as friendly as can be
    with hostile_mpi.under(world):
        make = hostile_mpi.transports(world)
        results = world.run(lambda rank: run(make(rank)))
    if world.failure:
        raise (ValueError if "ValueError" in world.failure else RuntimeError)(world.failure)
    return results


WORLDS = {"simulator": simulated, "sockets": on_sockets, "MPI": on_mpi}


def complaint(results, expected):
    """Return what must not be; "" if all is well."""
    raised = [outcomes[:-2] for outcomes in results]
    errors = [made[-1] if isinstance(made[-1], str) else "" for made in raised]
    if any(errors) and not all("injected" in error for error in errors):
        return f"raised on some ranks only, or another error: {errors}"
    for rank, outcomes in enumerate(results):
        for y in outcomes:
            if isinstance(y, bytes) and y != expected[rank]:
                return f"a wrong sum on rank {rank}"
    after = [[y if isinstance(y, str) else "right" for y in outcomes[-2:]] for outcomes in results]
    if all(y == ["right", "right"] for y in after) or all("out of use" in y[-1] for y in after):
        return ""
    return f"neither usable nor out of use: {after}"


def inject(world, algo, form, every, first=1):
    """Return counts of what happened, and a list of texts of what must not happen."""
    make, counts, texts = calls_of(algo, form), collections.Counter(), []
    found = []
    try:
        reference = WORLDS[world](program(make, 0, found))
    except (ValueError, TypeError):
        return counts, []
    if any(isinstance(outcomes, Exception) or isinstance(outcomes[0], str) for outcomes in reference):
        return counts, []  # a format that this algorithm does not send
    expected = [outcomes[0] for outcomes in reference]
    counts["functions"] = found[0].seen
    for nth in range(first, found[0].seen + 1, every):
        found.clear()
        try:
            results = WORLDS[world](program(make, nth, found))
            wrong = complaint(results, expected)
        except Exception as error:
            results, wrong = [], f"{type(error).__name__}: {error}"
        counts["injections"] += bool(found and found[0].where)
        counts["raised on all ranks"] += bool(results) and all(isinstance(made[-3], str) for made in results)
        counts["out of use afterwards"] += bool(results) and "out of use" in str(results[0][-1])
        if wrong:
            texts.append(f"{world}, {algo}, {form}, function {nth} {found[0].where if found else ''}: {wrong}")
    return counts, texts


def cases():
    """Yield the names of an algorithm and of a format: every algorithm, and every format."""
    yield from ((algo, "auto") for algo in ALGORITHMS)
    yield from ((algo, form) for algo in ("allgather", "sparcml", "oktopk") for form in FORMATS if form != "auto")


def main():
    """Print the counts of each world, and what must not be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="functions from one injection to the next")
    parser.add_argument("--worlds", nargs="+", default=list(WORLDS))
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS))
    options = parser.parse_args()
    failed = []
    for world in options.worlds:
        total = collections.Counter()
        for number, (algo, form) in enumerate(cases()):
            if algo in options.algorithms:
                counts, texts = inject(world, algo, form, options.every, 1 + number % options.every)
                total += counts
                failed += texts
                for text in texts:
                    print(text, flush=True)
        print(f"{world}: {dict(total)}", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
