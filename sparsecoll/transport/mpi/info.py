"""The MPI library: its version, its threads, and whether it takes GPU memory."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from mpi4py import MPI

GPU_DIRECT = "SPARSECOLL_GPU_DIRECT"  # environment variable: "1" or "0" say whether MPI takes device pointers


def about() -> dict[str, Any]:
    """Return the MPI library, the version of the standard, the thread level, and whether counts may exceed an int."""
    levels = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    given = {getattr(MPI, f"THREAD_{level}"): f"MPI_THREAD_{level}" for level in levels}
    version = MPI.Get_version()
    return {
        "library": MPI.Get_library_version().splitlines()[0].strip("\0 "),
        "version": ".".join(map(str, version)),
        "threads": given[MPI.Query_thread()],
        "large_counts": version >= (4, 0),
    }


def takes_device_pointers(comm: MPI.Intracomm) -> bool:
    """Return whether MPI accepts pointers to GPU memory; False where MPI does not say so, since a wrong guess crashes.

    The answer is the first one found: the environment variable SPARSECOLL_GPU_DIRECT; `mpi_memory_alloc_kinds` in the
    communicator's info (MPI 4.1); MPIX_Query_cuda_support (Open MPI, MPICH).

    Raises:
        ValueError: The environment variable is neither 0 nor 1.
    """
    if (wanted := os.environ.get(GPU_DIRECT)) is not None:
        if wanted not in ("0", "1"):
            raise ValueError(f"{GPU_DIRECT}: expected 0 or 1, got {wanted!r}")
        return wanted == "1"
    info = comm.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds") or ""
    info.Free()
    if any(kind.strip().split(":")[0] == "cuda" for kind in kinds.split(",")):
        return True
    for library in (None, MPI.__file__):
        if (query := getattr(ctypes.CDLL(library), "MPIX_Query_cuda_support", None)) is not None:
            return bool(query())
    return False
