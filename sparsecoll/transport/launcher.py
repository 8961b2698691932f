"""The launcher (mpirun, srun, torchrun) of this process, by environment variables, and its machine; without MPI."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import socket
import zlib
from pathlib import Path

from sparsecoll.errors import on_all_ranks

# The variables for the number of processes and the rank, in order: MPICH and Intel MPI, Open MPI, torchrun, srun.
# srun is last, since an mpirun inside a step of Slurm counts, not the step. SLURM_NTASKS is that of the allocation,
# in which one process may run by itself.
VARIABLES = (
    ("PMI_SIZE", "PMI_RANK"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("WORLD_SIZE", "RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)
TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by torchrun only: its processes may have inherited the variables of an mpirun
MEETING = ("RANK", "MASTER_ADDR", "MASTER_PORT")  # by which, with WORLD_SIZE, its processes meet


def by_torchrun() -> bool:
    """Return whether torchrun has started this process, or something else that sets all of its variables has."""
    return _detected()[0] == "WORLD_SIZE" and all(name in os.environ for name in MEETING)


def processes() -> tuple[str, int]:
    """Return the variable with the number of processes, and that number; ("", 1) without a launcher."""
    return _detected()[:2]


def rank() -> int:
    """Return the rank that the launcher gave this process; 0 without a launcher.

    It tells which process prints if there is no communicator, or if each process is a world of its own because the
    launcher belongs to another MPI.
    """
    return _detected()[2]


@functools.cache
def machine() -> int:
    """Return a number for this machine: a checksum of its name and of the boot id of its kernel."""
    name = socket.gethostname()
    with contextlib.suppress(FileNotFoundError, PermissionError):
        name += Path("/proc/sys/kernel/random/boot_id").read_text()
    return zlib.crc32(name.encode())


def refuse_one_rank() -> None:
    """Raise RuntimeError if a launcher has started others with this process, which makes up a world of one rank."""
    variable, expected = processes()
    if expected > 1:
        start = "with torchrun, or with the mpirun of mpi4py's MPI (`python -m sparsecoll doctor` names it)"
        cure, itself = f"Start the job {start}", " or pass comm=MPI.COMM_SELF"
        if importlib.util.find_spec("mpi4py") is None:
            cure, itself = f"mpi4py is not installed (pip install mpi4py). {cure}", ""
        if by_torchrun():
            cure = "Call torch.distributed.init_process_group() first"
        text = (
            f"comm: expected {expected} ranks, as {variable} says, got one: each process would work on its own. {cure};"
            f" unset {variable}{itself} if that is what you want"
        )
        raise on_all_ranks(RuntimeError(text))


def _detected() -> tuple[str, int, int]:
    for size, number in VARIABLES if TORCHRUN not in os.environ else [("WORLD_SIZE", "RANK")]:
        try:
            return size, int(os.environ[size]), int(os.environ.get(number, "0"))
        except (KeyError, ValueError):
            continue
    return "", 1, 0
