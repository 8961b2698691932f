"""The default gives the same bits in every run: separate jobs of two processes, over MPI and over torchrun."""

import os
import sys
import zlib

import numpy as np
import pytest
from launching import mpirun, run, torchrun

import sparsecoll
from sparsecoll.cli.job import joined
from sparsecoll.transport import as_transport

RUNS = int(os.environ.get("SPARSECOLL_RUNS", "2"))  # jobs of a launcher
SIZES = [(1000, 10), (10**5, 30_000), (10**6, 10_000), (10**6, 300_000)]


def checksum(comm):
    """Of sums of random floats, of which few and many overlap, from dense and from sparse vectors."""
    found = 0
    for n, k in SIZES:
        x = np.random.default_rng([n, as_transport(comm).rank]).standard_normal(n, dtype=np.float32)
        for y in (sparsecoll.allreduce(comm, x, k=k), sparsecoll.allreduce(comm, sparsecoll.select.topk(x, k))):
            found = zlib.crc32(y.values, zlib.crc32(y.indices, found))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_jobs_give_the_same_bits(launcher):
    command, printed = mpirun(2) if launcher == "mpirun" else torchrun(2, "--standalone"), []
    for _ in range(RUNS):
        done = run(*command, __file__)
        assert done.returncode == 0, done.stderr
        printed += done.stdout.split()
    assert len(printed) == 2 * RUNS and len(set(printed)) == 1


if __name__ == "__main__":
    with joined() as comm:
        sys.stdout.write(f"{checksum(comm)}\n")
