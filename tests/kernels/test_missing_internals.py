"""A Numba that lacks an internal of intrinsics/, or does not compile: other kernels, the same bits, and one warning."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import logging
import numba
logging.basicConfig(format="%(levelname)s %(name)s %(message)s")
numba.njit(lambda: 0)()  # Numba itself needs some of these internals, once
{damage}
import numpy as np
from sparsecoll import SparseVector, formats, select
from sparsecoll.kernels import cpu, host_kernels, reference
assert host_kernels() is cpu and cpu.lanes.SET == "portable"
rng = np.random.default_rng(0)
for dtype in {dtypes}:
    x = (100 * rng.standard_normal(20_000)).astype(dtype)
    chosen = select.topk(x, 300)
    expected = reference.topk(x, 300)
    assert chosen.indices.tobytes() == expected[0].tobytes() and chosen.values.tobytes() == expected[1].tobytes()
    for name in ("packed", "bitmap"):
        back = formats.decode(formats.encode(chosen, name), chosen.length)
        assert back.indices.tobytes() == chosen.indices.tobytes() and back.values.tobytes() == chosen.values.tobytes()
    half = SparseVector.merge([chosen, chosen._slice_entries(0, 99)], chosen.dtype)
    summed = reference.merge_sum([(chosen.indices, chosen.values), (chosen.indices[:99], chosen.values[:99])], dtype)
    assert half.values.tobytes() == summed[1].tobytes()
print(cpu.lanes.operations.__name__)
"""
DAMAGES = {  # name -> statement, types for which kernels are compiled and compared: the kernels are the same ones
    "an internal is gone": ("import numba.cpython.unsafe.numbers as n; del n.trailing_zeros", "[np.float32]"),
    "an internal cannot be compiled": ("import llvmlite.ir as ir; del ir.IRBuilder.shuffle_vector", "[]"),
}


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
    run = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    assert "sparsecoll.kernels.reference" in run.stdout and "NUMBA_DISABLE_JIT" in run.stdout
    warnings = [line for line in run.stderr.splitlines() if "WARNING" in line]
    assert len(warnings) == 1 and "NUMBA_DISABLE_JIT is set" in warnings[0]


@pytest.mark.slow  # every kernel is compiled again
@pytest.mark.parametrize(("damage", "dtypes"), DAMAGES.values(), ids=DAMAGES.keys())
def test_portable_kernels_and_a_warning(damage, dtypes, tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SPARSECOLL_")}
    environment["NUMBA_CACHE_DIR"] = str(tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(damage=damage, dtypes=dtypes)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if "shuffle_vector" in damage and run.stdout.strip().endswith("intrinsics"):
        pytest.skip("no AVX-512 here: this internal is not used")
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "sparsecoll.kernels.cpu.portable"
    warnings = [line for line in run.stderr.splitlines() if "WARNING" in line]
    assert len(warnings) == 1 and "the slower portable kernels are used" in warnings[0]
