"""Programs of test_faults.py, for mpirun and torchrun: something goes wrong with the last rank, and the others tell.

Every line printed is one JSON object: rank, what was raised, seconds from the call to the exception.
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

import numpy as np

import sparsecoll
from sparsecoll import SparseVector
from sparsecoll.transport import call as call_module
from sparsecoll.transport import waiting

if "TORCHELASTIC_RUN_ID" in os.environ:
    from torchrun import world

    comm = world()
    PIDS = comm.allgather(os.getpid())
else:
    from mpi4py import MPI

    comm, PIDS = MPI.COMM_WORLD, []
LAST = comm.size - 1
N, K = 100_000, 1000


def vector():
    rng = np.random.default_rng(comm.rank)
    return SparseVector(np.sort(rng.choice(N, K, replace=False)), np.ones(K, np.float32), N)


def call(**options):
    return sparsecoll.allreduce(comm, vector(), "oktopk", k=K, **options)


def report(**row):
    print(json.dumps({"rank": comm.rank, **row}), flush=True)


@contextlib.contextmanager
def outcome_reported():
    start = time.monotonic()
    try:
        yield
    except sparsecoll.CommunicationError as error:
        report(error=str(error), seconds=time.monotonic() - start)
    else:
        report(error=None, seconds=time.monotonic() - start)


def die(what, leave=True):
    """The last rank is killed, stopped or cut off in the middle of a call; the others have a timeout of a second."""
    call()
    if comm.rank == LAST:
        transport = sparsecoll.transport.as_transport(comm)
        send, sent = transport._isend, []

        def last_words(destination, buffer):
            sent.append(destination)
            if len(sent) == 3:
                what()
            send(destination, buffer)

        transport._isend = last_words
    with outcome_reported():
        call(timeout=1)
    if PIDS:  # torchrun would wait for a process that is stopped
        os.kill(PIDS[LAST], signal.SIGKILL)
    if leave:
        os._exit(0)  # MPI_Finalize would wait for the dead


def late(seconds, timeout):
    """The last rank comes late."""
    call()
    if comm.rank == LAST:
        time.sleep(seconds)
    with outcome_reported():
        call(timeout=timeout)
    with outcome_reported():
        call(timeout=timeout)
    sys.stdout.flush()
    if timeout < seconds:
        time.sleep(seconds)
        os._exit(0)


def watchdog():
    """Without a timeout: who waits for whom is logged."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    waiting.WATCHDOG_SECONDS = 0.3
    call()
    if comm.rank == LAST:
        time.sleep(2)
    call()


def alone():
    """The last rank fails when the others have finished the call, and they make no other one."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    call_module.REPORT_SECONDS = 3
    call()
    if comm.rank == LAST:

        def no_room(parts, x):
            raise MemoryError("no room")

        sys.modules[sparsecoll.Allgather.__module__].summed = no_room
    with outcome_reported():
        sparsecoll.allreduce(comm, vector(), "allgather")
    comm.Barrier()
    os._exit(0)


def cold():
    """The last rank comes too late to the first call on a communicator."""
    own, x = comm.Dup(), vector()
    if comm.rank == LAST:
        time.sleep(4)
    for _ in range(2):
        with outcome_reported():
            sparsecoll.allreduce(own, x, timeout=1)
    time.sleep(0 if comm.rank == LAST else 8)  # who ends takes the others along
    os._exit(0)


def threads():
    """Communicators of one's own in four threads at once, after a first call on each."""
    own = [comm.Dup() for _ in range(4)]
    for each in own:
        sparsecoll.traffic(each)
    with ThreadPoolExecutor(4) as pool:
        sums = list(pool.map(lambda c: float(sparsecoll.allreduce(c, vector(), "allgather").values.sum()), own))
    report(sums=sums)
    sys.stdout.flush()


def shrunk():
    """Where MPI can go on without the dead, so does the library."""
    global comm
    try:
        die(by(signal.SIGKILL), leave=False)
        comm = sparsecoll.shrink(comm)
    except sparsecoll.CommunicationError as error:
        report(error=str(error))
        os._exit(0)
    report(size=comm.size, sum=float(call().values.sum()), expected=float(sum_of_all()))
    os._exit(0)


def sum_of_all():
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
    "killed": lambda: die(by(signal.SIGKILL)),
    "stopped": lambda: die(by(signal.SIGSTOP)),
    "cut": lambda: die(cut),
    "late": lambda: late(1.5, 20),
    "too late": lambda: late(4, 1),
    "watchdog": watchdog,
    "alone": alone,
    "cold": cold,
    "threads": threads,
    "shrunk": shrunk,
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
