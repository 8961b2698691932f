"""Array kernels: a specification in NumPy (`reference`) and fast versions that equal it bit for bit (`cpu`, `gpu`).

`kernels_of(array)` returns the module that serves the type of an array, as in kernels_of(x).topk(x, k). All modules
have the same functions with the same parameters, and no code outside this package depends on which one runs.

The environment variable SPARSECOLL_KERNELS=reference selects the specification; avx512, avx2 and portable select what
`cpu` is compiled for, by default the fastest that the processor has (`cpu.lanes`). Long selections and sums run on
several threads where a rank has idle cores (`threads`).

Numba takes about a third of a second to start, in the first call, and some seconds to compile the kernels once.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from sparsecoll.kernels import reference, threads
from sparsecoll.kernels.keys import COMPILED_DTYPES
from sparsecoll.kernels.memory import on_gpu

logger = logging.getLogger(__name__)
AHEAD: list[Callable[[], object]] = []  # calls whose kernels a process compiles while it waits for those of another
CHOICES = ("avx512", "avx2", "portable", "reference")  # of SPARSECOLL_KERNELS


@functools.cache
def host_kernels() -> ModuleType:
    """The kernels for NumPy arrays of any size: `cpu`, or `reference`.

    Raises:
        ValueError: SPARSECOLL_KERNELS or SPARSECOLL_THREADS has a value that is not possible here.
    """
    threads.allowed()  # refuses a wrong number
    choice = os.environ.get("SPARSECOLL_KERNELS", "")
    if choice not in ("", *CHOICES):
        raise ValueError(f"SPARSECOLL_KERNELS: expected one of {', '.join(CHOICES)}, got {choice!r}")
    if choice == "reference":
        return reference
    try:
        from sparsecoll.kernels import cpu
    except (ImportError, AttributeError) as error:  # there is no Numba, or it lacks an internal
        logger.warning("Numba cannot be used (%s): the slower NumPy reference kernels are used", error)
        return reference
    return cpu


def kernels_of_values(values: Any) -> ModuleType:
    """The kernels that write values in blocks or add them: `reference` if not of COMPILED_DTYPES."""
    if isinstance(values, np.ndarray) and values.dtype not in COMPILED_DTYPES:
        return reference
    return kernels_of(values)


def kernels_of(array: Any) -> ModuleType:
    """The kernels for a NumPy or CuPy array: `cpu` (or `reference`) or `gpu`; raises TypeError for another type."""
    if isinstance(array, np.ndarray):
        return host_kernels()
    if on_gpu(array):
        from sparsecoll.kernels import gpu

        return gpu
    kind = type(array)
    raise TypeError(f"array: expected a numpy.ndarray or a cupy.ndarray, got {kind.__module__}.{kind.__qualname__}")
