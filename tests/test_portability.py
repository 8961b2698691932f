"""Without an optional package everything that does not need it works."""

import functools
import importlib.util

import pytest
from launching import python

PROGRAM = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing!r}:
            raise ImportError(f"no {{name}}")

sys.meta_path.insert(0, Missing())
import numpy as np
import sparsecoll
from sparsecoll.transport import default_comm

sparsecoll.select.topk(np.ones(1 << 18, np.float32), 1)  # small arrays would do without Numba at first

def program(comm):
    x = np.random.default_rng(comm.rank).standard_normal(5000).astype(np.float32)
    values = [sparsecoll.allreduce(comm, x, algo, k=50) for algo in sparsecoll.ALGORITHMS if algo != "auto"]
    return [int(value.indices.sum()) for value in values]

print(sparsecoll.simulate(3, program).results[0])
if "mpi4py" in {missing!r}:
    alone = sparsecoll.SparseVector([1], np.ones(1), 4)
    assert sparsecoll.allreduce(default_comm(), alone).nnz == 1
"""


@functools.cache
def run(*missing, kernels=""):
    done = python("-c", PROGRAM.format(missing=missing), variables={"SPARSECOLL_KERNELS": kernels})
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_without_numba_the_same_result_and_one_warning():
    expected, quiet = run()
    result, text = run("numba", "llvmlite")
    assert result == expected and not quiet
    assert text.count("Numba cannot be used") == 1 and len(text.splitlines()) == 1


@pytest.mark.parametrize("missing", [("mpi4py",), ("mpi4py", "torch", "scipy", "matplotlib", "rich")])
def test_without_a_package_the_result_is_the_same(missing):
    assert run(*missing) == run()


@pytest.mark.parametrize("kernels", ["portable", "reference"])
def test_other_kernels_give_the_same_bits(kernels):
    assert run(kernels=kernels) == run()


WITHOUT_MPI = """
import os, sys
sys.modules["mpi4py"] = None  # as if it were not installed
import sparsecoll
from sparsecoll.cli import doctor
from sparsecoll.cli.main import main
from sparsecoll.transport import LocalTransport

def text(call, *arguments):
    try:
        call(*arguments)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"

x = sparsecoll.SparseVector([1], [1.0], 4)
main(["simulate", "--ranks", "2", "--n", "1000", "--algo", "allgather", "--repeat", "1"])
main(["bench", "--n", "1000", "--algo", "MPI_Allreduce", "allgather", "--repeat", "1", "--density", "0.1"])
print(text(sparsecoll.shrink, LocalTransport()))
print([f.found for f in doctor._mpi()], next(doctor._sockets()).state)
os.environ["PMI_SIZE"] = "3"
print(text(sparsecoll.allreduce, None, x))
print(text(main, ["bench", "--n", "1000"]))
print(next(doctor._ranks(LocalTransport())).advice)
"""


def test_what_needs_mpi_says_how_to_get_it():
    done = python("-c", WITHOUT_MPI)
    assert done.returncode == 0, done.stderr
    shrink, mpi, allreduce, bench, ranks = done.stdout.splitlines()[-5:]
    expected = "CommunicationError: shrink: expected an mpi4py intracommunicator, got LocalTransport; mpi4py is not"
    assert shrink == f"{expected} installed (pip install mpi4py)"
    assert mpi == "['not available, mpi4py is not installed'] good" or importlib.util.find_spec("torch") is None
    assert allreduce.startswith("RuntimeError: comm: expected 3 ranks, as PMI_SIZE says, got one")
    assert "mpi4py is not installed (pip install mpi4py)" in allreduce
    assert bench == "SystemExit: 1" and "sparsecoll: mpi4py: expected it to be installed for the 3 ranks" in done.stderr
    assert ranks == "each of the 3 processes is a separate job: pip install mpi4py"
    assert "Traceback" not in done.stderr
