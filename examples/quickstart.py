"""Sum sparse vectors over all ranks: virtual ranks in one process, or the ranks of mpirun.

python examples/quickstart.py
mpirun -n 4 python examples/quickstart.py
"""

from __future__ import annotations

import numpy as np

import sparsecoll
from sparsecoll.transport import LocalTransport, default_comm


def program(comm) -> str:
    """Run on one rank and return a line of text."""
    gradient = np.random.default_rng(comm.rank).standard_normal(1_000_000).astype(np.float32) ** 3

    exact = sparsecoll.allreduce(comm, gradient, algo="allgather", density=0.01)
    top = sparsecoll.allreduce(comm, gradient, algo="oktopk", density=0.01, return_reduction=True)

    counted = sparsecoll.allreduce(comm, (np.array([comm.rank, comm.size]), np.array([1.0, 1.0]), comm.size + 1))
    indices, values, _ = counted
    return (
        f"rank {comm.rank} of {comm.size}: the sum of all ranks' top 1 % has {exact.nnz:,} entries;"
        f" its top 1 % {top.value.nnz:,}, for {top.traffic.total.bytes_received:,} bytes"
        f" instead of {8 * gradient.size * (comm.size - 1) // comm.size:,};"
        f" entry {indices[-1]} counts {values[-1]:.0f} ranks"
    )


def main() -> None:
    comm = default_comm()
    if isinstance(comm, LocalTransport) or comm.size == 1:
        print("one process: 4 virtual ranks")
        simulation = sparsecoll.simulate(4, program)
        print("\n".join(simulation.results))
        print(f"modelled on 1 Gb/s Ethernet: {1000 * simulation.seconds:.1f} ms")
    else:
        print(program(comm), flush=True)


if __name__ == "__main__":
    main()
