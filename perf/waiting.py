"""What a wait over MPI costs: the latency of a message that comes after a while, and processor time meanwhile.

    mpirun -n 4 python perf/waiting.py --where "one node" --json perf/results/waiting.json
    python perf/testbed.py run -- python perf/waiting.py --where "test bed, 1 Gb/s" --json perf/results/waiting.json

Rank 0 sleeps, then sends a message to each other rank; all of these have waited since they answered the last one.
All processes are on one machine, so that one clock times both ends. The latency is the time from before the first of
the sends to the return of the receive, the transfer included: compare it with that of a message that is sent at once.
Processor time is that of the waiting process, as a share of the time that it waited. Rows are added to those in the
file, in place of earlier ones of the same place, MPI, rule and number of ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from sparsecoll.cli import bench
from sparsecoll.transport import Transport, as_transport, default_comm
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.collectives import allgather

DELAYS = (0.0, 0.1e-3, 1e-3, 5e-3, 50e-3)  # seconds
Row = dict[str, Any]


def waits(transport: Transport, delay: float, size: int, repeat: int) -> tuple[list[float], float, float]:
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


def measured(transport: Transport, delay: float, size: int, repeat: int) -> Row:
    """Return a row, the same on every rank; collective."""
    waits(transport, delay, size, 3)
    latencies, processor, waited = waits(transport, delay, size, repeat)
    table = allgather(transport, np.array([*(latencies or [np.nan] * repeat), processor, waited], np.float64))[1:]
    found = table[:, :repeat]
    return {
        "delay_ms": 1e3 * delay,
        "bytes": size,
        "latency_ms": 1e3 * float(np.median(found)),
        "latency_p90_ms": 1e3 * float(np.percentile(found, 90)),
        "latency_mean_ms": 1e3 * float(found.mean()),
        "core": float(table[:, repeat].sum() / table[:, repeat + 1].sum()),
    }


def main() -> None:
    """Measure and print; rank 0 saves the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where", default="one node", help="where the ranks are, for the rows (default: one node)")
    parser.add_argument("--rule", default="", help="name of the rule, for the rows (default: the commit)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of waiting for each row (default: 2)")
    parser.add_argument("--bytes", type=lambda t: int(float(t)), nargs="+", default=[8, 4_000_000])
    parser.add_argument("--json", type=Path, help="add the rows to this file")
    options = parser.parse_args()
    transport, about = as_transport(default_comm()), bench.about()
    vendor, version = MPI.get_vendor()
    place = {
        "where": options.where,
        "MPI": " ".join([vendor, ".".join(map(str, version))]),
        "rule": options.rule or about["commit"],
        "ranks": transport.size,
    }
    rows = []
    with CollectiveCall(transport, "waiting") as call:
        call.agree()
        for size in options.bytes:
            for delay in DELAYS:
                repeat = int(min(max(options.seconds / max(delay, 1e-3), 20), 400 if size < 1e5 else 20))
                row = place | measured(transport, delay, size, repeat)
                rows.append(row)
                if transport.rank == 0:
                    head = f"{row['where']}, {row['MPI']}, {row['rule']}, {row['ranks']} ranks"
                    found = f"median{row['latency_ms']:>8.3f} ms, 90 %{row['latency_p90_ms']:>8.3f} ms"
                    sys.stdout.write(
                        f"{head:<50}{size:>10,} bytes after{row['delay_ms']:>5.1f} ms: {found},"
                        f" mean{row['latency_mean_ms']:>8.3f} ms, core{100 * row['core']:>6.1f} %\n"
                    )
                    sys.stdout.flush()
    if transport.rank == 0 and options.json:
        kept = json.loads(options.json.read_text())["rows"] if options.json.exists() else []
        kept = [row for row in kept if not place.items() <= row.items()]
        options.json.write_text(json.dumps({"about": about, "rows": kept + rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
