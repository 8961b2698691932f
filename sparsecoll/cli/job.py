"""The ranks of the job in which a command runs: torchrun's, mpirun's, or this process alone."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from sparsecoll.cli.arguments import fail
from sparsecoll.transport import default_comm, launcher


@contextlib.contextmanager
def joined(seconds: float | None = None) -> Iterator[Any]:
    """Context manager: the communicator of the ranks that the launcher has started.

    Under torchrun it is the default process group, which is created if there is none, within so many seconds if they
    are given, and destroyed in the end.
    """
    if not under_torchrun():
        yield default_comm()
        return
    from sparsecoll.torch.replica.process_group import torchrun_group

    with torchrun_group(**({} if seconds is None else {"timeout": timedelta(seconds=seconds)})) as group:
        yield group


def under_torchrun() -> bool:
    """Return whether torchrun has started this process, and PyTorch is there."""
    return launcher.by_torchrun() and importlib.util.find_spec("torch") is not None


def check_mpi4py() -> None:
    """End the program if an mpirun has started it, and mpi4py is missing: each process would be a job of one rank."""
    variable, processes = launcher.processes()
    if processes > 1 and variable != "WORLD_SIZE" and importlib.util.find_spec("mpi4py") is None:
        use = f"for the {processes} ranks of the job (from {variable})"
        cure = "pip install mpi4py, or start the job with torchrun"
        fail(f"mpi4py: expected it to be installed {use}, got none: {cure}", 1)
