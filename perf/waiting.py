"""What a wait over MPI costs: the latency of a message that comes after a while, and processor time meanwhile.

    mpirun -n 4 python perf/waiting.py --json waiting.json
    python perf/testbed.py run -- python perf/waiting.py --where "4 hosts, 1 Gb/s" --update --json waiting.json

Rank 0 sleeps, then sends a message to each other rank; these have waited since they answered the last one. All are on
one machine, so that one clock times both ends, from before the first send to the return of the receive. Processor time
is that of the waiting process, as a share of the time that it waited.
"""

import time

import harness
import numpy as np

from sparsecoll.transport import as_transport, default_comm
from sparsecoll.transport.all_ranks import allgather
from sparsecoll.transport.call import CollectiveCall

DELAYS = (0.0, 0.1e-3, 1e-3, 5e-3, 50e-3)  # seconds


def waited(transport, delay, size, repeat):
    """Return the latencies that this rank has seen, then the processor time of its waits and their seconds."""
    latencies, spent = [np.nan] * repeat, np.zeros(2)
    message, others = np.zeros(size, np.uint8), range(1, transport.size)
    for turn in range(repeat):
        if transport.rank == 0:
            time.sleep(delay)
            message[:8].view(np.float64)[0] = time.monotonic()
            for rank in others:
                transport.isend(rank, message)
            for rank in others:
                transport.recv(rank)
        else:
            before = np.array([time.process_time(), time.monotonic()])
            sent = transport.recv(0)[:8].view(np.float64)[0]
            after = np.array([time.process_time(), time.monotonic()])
            latencies[turn], spent = after[1] - float(sent), spent + after - before
            transport.isend(0, message[:1])
        transport.waitall()
    return np.array([*latencies, *spent])


def points(options, transport):
    """Yield a row for each length of messages and each delay, the same on every rank."""
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    place = {"where": options.where, "MPI": f"{vendor} {'.'.join(map(str, version))}", "ranks": transport.size}
    with CollectiveCall(transport, "waiting") as call:
        call.agree()
        for size in options.bytes:
            for delay in DELAYS:
                repeat = int(min(max(options.seconds / max(delay, 1e-3), 20), 400 if size < 1e5 else 20))
                waited(transport, delay, size, 3)
                *latencies, processor, seconds = allgather(transport, waited(transport, delay, size, repeat))[1:].T
                row = place | {"delay_ms": 1e3 * delay, "bytes": size, "latency_ms": 1e3 * float(np.median(latencies))}
                yield row | {"core": float(processor.sum() / seconds.sum())}


def main():
    """Measure and print; rank 0 saves the rows; --update keeps those of other places and MPIs."""
    options = harness.options(__doc__, where="one node", seconds=2.0, bytes=[8, 4 * 10**6])
    transport = as_transport(default_comm())
    harness.record(points(options, transport), options, transport.rank, key=("where", "MPI", "ranks"))


if __name__ == "__main__":
    main()
