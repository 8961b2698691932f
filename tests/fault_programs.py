"""Programs of test_faults.py, for mpirun and torchrun: something goes wrong with the last rank, and the others tell.

One job runs the programs named, in turn, each on a communicator of its own. Every line printed is one JSON object:
program, rank, what was raised, seconds from the call to the exception.
"""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import numpy as np

import sparsecoll
from sparsecoll import SparseVector
from sparsecoll.transport import call as call_module, waiting
from sparsecoll.transport.channel import Channel

if "TORCHELASTIC_RUN_ID" in os.environ:
    from torchrun import world

    WORLD = world()
    PIDS = WORLD.allgather(os.getpid())
else:
    from mpi4py import MPI

    WORLD, PIDS = MPI.COMM_WORLD, []
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, which may come before survivors have reported
RANK, LAST = WORLD.rank, WORLD.size - 1
N, K = 100_000, 1000


def vector():
    rng = np.random.default_rng(RANK)
    return SparseVector(np.sort(rng.choice(N, K, replace=False)), np.ones(K, np.float32), N)


def call(comm, **options):
    return sparsecoll.allreduce(comm, vector(), "oktopk", k=K, **options)


def report(**row):
    print(json.dumps({"program": running, "rank": RANK, **row}), flush=True)


@contextlib.contextmanager
def outcome_reported():
    start = time.monotonic()
    try:
        yield
    except sparsecoll.CommunicationError as error:
        report(error=str(error), seconds=time.monotonic() - start)
    else:
        report(error=None, seconds=time.monotonic() - start)


def meet():
    """Wait for all ranks without keeping a core busy."""
    if PIDS:
        return WORLD.Barrier()
    request = WORLD.Ibarrier()
    while not request.Test():
        time.sleep(0.01)


def die(comm, what, timeout=1, leave=True):
    """The last rank is killed, stopped or cut off in the middle of a call; the others wait for `timeout` seconds."""
    call(comm)
    if RANK == LAST:
        transport = sparsecoll.transport.as_transport(comm)
        send, sent = transport._isend, []

        def last_words(destination, *given):
            sent.append(destination)
            if len(sent) == 3:
                what()
            send(destination, *given)

        transport._isend = last_words
    with outcome_reported():
        call(comm, timeout=timeout)
    if PIDS:  # torchrun would wait for a process that is stopped
        os.kill(PIDS[LAST], signal.SIGKILL)
    if leave:
        time.sleep(2)  # MPICH never returns from sending to a process that has gone: the others may still report
        os._exit(0)  # MPI_Finalize would wait for the dead


def late(comm, seconds, timeout):
    """The last rank comes late."""
    call(comm)
    if RANK == LAST:
        time.sleep(seconds)
    for _ in range(2):
        with outcome_reported():
            call(comm, timeout=timeout)


def watchdog(comm):
    """Without a timeout: who waits for whom is logged."""
    call(comm)
    with patch.object(waiting, "WATCHDOG_SECONDS", 0.3):
        if RANK == LAST:
            time.sleep(3)
        call(comm)


def alone(comm):
    """The last rank fails when the others have finished the call, and they make no other one."""
    call(comm)

    def no_room(*_, **__):
        raise MemoryError("no room")

    fails = patch.object(Channel, "merge", no_room)
    with patch.object(call_module, "REPORT_SECONDS", 3), fails if RANK == LAST else contextlib.nullcontext():
        with outcome_reported():
            sparsecoll.allreduce(comm, vector(), "allgather")
        meet()


def cold(comm):
    """The last rank comes too late to the first call on a communicator."""
    x = vector()
    if RANK == LAST:
        time.sleep(6)
    for _ in range(2):
        with outcome_reported():
            sparsecoll.allreduce(comm, x, timeout=1)


def threads(comm):
    """Communicators of one's own in four threads at once, after a first call on each."""
    own = [comm.Dup() for _ in range(4)]
    for each in own:
        sparsecoll.traffic(each)
    with ThreadPoolExecutor(4) as pool:
        sums = list(pool.map(lambda c: float(sparsecoll.allreduce(c, vector(), "allgather").values.sum()), own))
    report(sums=sums)


def shrunk(comm):
    """Where MPI can go on without the dead, so does the library."""
    try:
        die(comm, by(signal.SIGKILL), timeout=30, leave=False)
        time.sleep(2)  # shrinking revokes the communicator, on which the other may not have named the dead yet
        comm = sparsecoll.shrink(comm)
    except sparsecoll.CommunicationError as error:
        report(error=str(error))
        os._exit(0)
    report(size=comm.size, sum=float(call(comm).values.sum()), expected=float(sum_of_all(comm)))
    comm = sparsecoll.shrink(comm)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(2)
    with outcome_reported():  # of the first call on it
        call(comm, timeout=30)
    report(left=sparsecoll.shrink(comm).size)
    os._exit(0)


def finalized(comm):
    """Calls after MPI has been finalized: MPI deletes attributes of its own communicator then, not those of `comm`."""
    plans = [sparsecoll.allreduce_init(each, vector(), "allgather") for each in (WORLD, comm)]
    MPI.Finalize()
    calls = [lambda: call(comm), lambda: call(None), lambda: sparsecoll.iallreduce(comm, vector()).wait()]
    calls += [lambda: sparsecoll.traffic(comm), *(lambda plan=plan: plan(vector()) for plan in plans)]
    for each in calls:
        with outcome_reported():
            each()
    sys.exit()


def sum_of_all(comm):
    """What `call` must give: the K largest sums of ones."""
    total = np.zeros(N, np.float32)
    for indices in comm.allgather(vector().indices):
        total[indices] += 1
    return np.sort(total)[-K:].sum()


def by(number):
    return lambda: os.kill(os.getpid(), number)


def cut():
    """Take this host off the network (the test bed's: perf/testbed.py)."""
    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)


PROGRAMS = {
    "threads": threads,
    "late": lambda comm: late(comm, 1.5, 20),
    "watchdog": watchdog,
    "too late": lambda comm: late(comm, 3, 1),
    "cold": cold,
    "alone": alone,
    # the last one of its job:
    "killed": lambda comm: die(comm, by(signal.SIGKILL), timeout=30),
    "stopped": lambda comm: die(comm, by(signal.SIGSTOP)),
    "cut": lambda comm: die(comm, cut),
    "shrunk": shrunk,
    "finalized": finalized,
}

if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    for running in sys.argv[1:]:
        PROGRAMS[running](WORLD if running == "shrunk" else WORLD.Dup())
        meet()
