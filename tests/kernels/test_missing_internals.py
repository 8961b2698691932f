"""A Numba without an internal that intrinsics/ uses: the kernels of the reference, and one warning."""

import os
import subprocess
import sys

PROGRAM = """
import logging
logging.basicConfig(format="%(levelname)s %(name)s %(message)s")
import numba.cpython.unsafe.numbers as numbers
del numbers.trailing_zeros
from sparsecoll.kernels import host_kernels, reference
assert host_kernels() is host_kernels() is reference
"""


def test_the_reference_and_a_warning():
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SPARSECOLL_")}
    run = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    [warning] = run.stderr.splitlines()
    assert warning.startswith("WARNING sparsecoll.kernels numba cannot be used") and "trailing_zeros" in warning
