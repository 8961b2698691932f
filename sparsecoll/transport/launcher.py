"""What the environment says of the launcher (mpirun, srun, torchrun) that started this process; needs no MPI."""

from __future__ import annotations

import os

# Number of processes and number of this one, as launchers tell them: MPICH and Intel MPI, Open MPI, Slurm, torchrun.
# The innermost launcher comes first: an mpirun inside a Slurm allocation counts, not the allocation.
VARIABLES = (
    ("PMI_SIZE", "PMI_RANK"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("WORLD_SIZE", "RANK"),
    ("SLURM_NTASKS", "SLURM_PROCID"),
)


def processes() -> tuple[str, int]:
    """The variable that says how many processes were started, and how many; ("", 1) if no launcher did."""
    name, size, _ = _detected()
    return name, size


def rank() -> int:
    """The number that the launcher gave this process; 0 if no launcher started it.

    Ranks of a job print once by this where no communicator is at hand, or where each process has a world of its own
    because the launcher belongs to another MPI.
    """
    return _detected()[2]


def _detected() -> tuple[str, int, int]:
    for size, number in VARIABLES:
        try:
            return size, int(os.environ[size]), int(os.environ.get(number, "0"))
        except (KeyError, ValueError):
            continue
    return "", 1, 0
