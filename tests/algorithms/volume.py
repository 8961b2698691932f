"""Counted words and messages of one call, for the tests of each algorithm's formulas."""

from dataclasses import dataclass

import numpy as np
from cases import support

import sparsecoll
from sparsecoll import SparseVector, simulate

OVERHEAD = ("agree", "repartition", "pattern")  # phases that move counts or bits, not entries
HEADER_WORDS = 12  # 16 bytes of header, 16 of sizes and up to 14 of padding, for each region or block sent
COUNTED = {"format": "coo", "return_reduction": True}


@dataclass
class Volume:
    """Of the busiest rank, without agreement and boundaries."""

    received: float
    sent: float
    messages: int
    nnz: int


def measure(algorithm, name, P, k, n=400_000):
    """`algorithm()` makes a fresh one for each rank; entries with COO, float32."""

    def program(comm):
        rng = np.random.default_rng([comm.rank, 1])
        indices = support(name, comm.rank, P, k, rng, n)
        x = SparseVector(indices, rng.standard_normal(indices.size).astype(np.float32), n)
        y = sparsecoll.allreduce(comm, x, algorithm(), k=k, **COUNTED)
        phases = [c for phase, c in y.traffic.phases.items() if phase not in OVERHEAD]
        return (
            sum(c.bytes_received for c in phases) / 4,
            sum(c.bytes_sent for c in phases) / 4,
            sum(c.messages_sent for c in phases),
            y.value.nnz,
        )

    rows = simulate(P, program).results
    return Volume(*(max(row[i] for row in rows) for i in range(4)))
