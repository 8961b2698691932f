"""Which environment variables say that a launcher started this process with others, and the cures of the error."""

import re

import pytest

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
