"""Seconds from the start of a program to its first sum, without and with compiled kernels in the cache.

    python perf/cold.py --json perf/results/cold.json

They include the imports of NumPy and mpi4py, which have a column of their own. Bytecode of all packages is on file.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import harness
import numpy as np
from harness import load, markdown, source

PROGRAM = """
import time
start = time.perf_counter()
import numpy as np
from mpi4py import MPI
imported = time.perf_counter() - start
import sparsecoll
comm = MPI.COMM_WORLD
x = np.random.default_rng(comm.rank).standard_normal(100_000, np.float32)
sparsecoll.allreduce(comm, x, "oktopk", density=0.01)
times = comm.gather((imported, time.perf_counter() - start))
if times:
    print(*map(max, zip(*times)))
"""


def rows(options):
    """Yield a row for each number of processes."""
    mpirun = Path(sys.executable).parent / "mpirun"
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for P in options.ranks:
        found = []
        for _ in range(options.repeat):
            with tempfile.TemporaryDirectory() as folder:
                command = [mpirun, "-n", str(P), sys.executable, "-c", PROGRAM]
                environment = kept | {"NUMBA_CACHE_DIR": folder}
                runs = [subprocess.check_output(command, env=environment, text=True) for _ in range(2)]
                found.append([float(word) for out in runs for word in out.split()])
        _, cold, imports, warm = np.median(found, axis=0).tolist()
        yield {"processes": P, "empty cache": cold, "full cache": warm, "imports of NumPy and mpi4py": imports}


def tables():
    """Return the table of docs/kernels.md."""
    return {"cold": f"{markdown(load('cold')['rows'])}\n\n{source('cold')}"}


if __name__ == "__main__":
    options = harness.options(__doc__, ranks=[1, 2, 8], repeat=3)
    harness.record(rows(options), options)
