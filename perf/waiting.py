"""What a wait over MPI costs: the latency of a message that comes after a while, and processor time meanwhile.

    mpirun -n 4 python perf/waiting.py --json waiting.json
    python perf/testbed.py run -- python perf/waiting.py --where "4 hosts, 1 Gb/s" --update --json waiting.json

Rank 0 sleeps, then sends a message to each other rank; all of these have waited since they answered the last one.
All processes are on one machine, so that one clock times both ends. The latency is the time from before the first of
the sends to the return of the receive, the transfer included: compare it with that of a message that is sent at once.
Processor time is that of the waiting process, as a share of the time that it waited.
"""

import time

import harness
import numpy as np

from sparsecoll.transport import as_transport, default_comm
from sparsecoll.transport.all_ranks import allgather
from sparsecoll.transport.call import CollectiveCall

DELAYS = (0.0, 0.1e-3, 1e-3, 5e-3, 50e-3)  # seconds


def waits(transport, delay, size, repeat):
    """Return the latencies that this rank has seen, the processor time of its waits, and their seconds."""
    latencies, processor, waited = [], 0.0, 0.0
    message, answer = np.zeros(size, np.uint8), np.zeros(1, np.uint8)
    others = range(1, transport.size)
    for _ in range(repeat):
        if transport.rank == 0:
            if delay:
                time.sleep(delay)
            message[:8].view(np.float64)[0] = time.monotonic()
            for rank in others:
                transport.isend(rank, message)
            for rank in others:
                transport.recv(rank)
        else:
            start, used = time.monotonic(), time.process_time()
            sent = transport.recv(0)[:8].view(np.float64)[0]
            end, processor = time.monotonic(), processor + time.process_time() - used
            waited += end - start
            latencies.append(end - float(sent))
            transport.isend(0, answer)
        transport.waitall()
    return latencies, processor, waited


def measured(transport, delay, size, repeat):
    """Return a row, the same on every rank; collective."""
    waits(transport, delay, size, 3)
    latencies, processor, waited = waits(transport, delay, size, repeat)
    table = allgather(transport, np.array([*(latencies or [np.nan] * repeat), processor, waited], np.float64))[1:]
    found = table[:, :repeat]
    row = {"delay_ms": 1e3 * delay, "bytes": size, "latency_ms": 1e3 * float(np.median(found))}
    row |= {"latency_p90_ms": 1e3 * float(np.percentile(found, 90)), "latency_mean_ms": 1e3 * float(found.mean())}
    return row | {"core": float(table[:, repeat].sum() / table[:, repeat + 1].sum())}


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
                yield place | measured(transport, delay, size, repeat)


def main():
    """Measure and print; rank 0 saves the rows; --update keeps those of other places and MPIs."""
    options = harness.options(__doc__, where="one node", seconds=2.0, bytes=[8, 4 * 10**6])
    transport = as_transport(default_comm())
    harness.record(points(options, transport), options, transport.rank, key=("where", "MPI", "ranks"))


if __name__ == "__main__":
    main()
