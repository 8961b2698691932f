"""A Numba that lacks an internal of intrinsics/, or does not compile: the kernels of the reference, and one warning."""

import os
import subprocess
import sys

from launching import python

PROGRAM = """
import logging
logging.basicConfig(format="%(levelname)s %(name)s %(message)s")
import numba.cpython.unsafe.numbers as numbers
del numbers.trailing_zeros
from sparsecoll.kernels import host_kernels, reference
assert host_kernels() is host_kernels() is reference
"""


INTERPRETED = """
import logging
logging.basicConfig(format="%(levelname)s %(name)s %(message)s")
import numpy as np
import sparsecoll
from sparsecoll.cli import doctor
from sparsecoll.kernels import host_kernels

def program(comm):
    x = np.random.default_rng(comm.rank).standard_normal(200_000).astype(np.float32)
    for algo in ("allgather", "oktopk", "dense"):
        y = sparsecoll.allreduce(comm, x, algo, k=2_000)
    return y.nnz

assert sparsecoll.simulate(2, program).results[0] >= 2_000
print(host_kernels().__name__, next(doctor._kernels()))
"""


def test_reference_kernels_and_a_warning_with_numba_disable_jit():
    """As coverage and debuggers need it."""
    run = python("-c", INTERPRETED, variables={"NUMBA_DISABLE_JIT": "1"})
    assert run.returncode == 0, run.stderr
    assert "sparsecoll.kernels.reference" in run.stdout and "NUMBA_DISABLE_JIT" in run.stdout
    warnings = [line for line in run.stderr.splitlines() if "WARNING" in line]
    assert len(warnings) == 1 and "NUMBA_DISABLE_JIT is set" in warnings[0]


def test_the_reference_and_a_warning():
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SPARSECOLL_")}
    run = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    [warning] = run.stderr.splitlines()
    assert warning.startswith("WARNING sparsecoll.kernels Numba cannot be used") and "trailing_zeros" in warning
