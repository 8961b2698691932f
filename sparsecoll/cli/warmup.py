"""Compiles the kernels of this machine's instruction set into Numba's cache, by making calls of all kinds."""

from __future__ import annotations

import importlib.util
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sparsecoll.algorithms import ALGORITHMS
from sparsecoll.bench import rows
from sparsecoll.bench.timing import heavy_tailed
from sparsecoll.collectives import allreduce as module
from sparsecoll.formats import FORMATS
from sparsecoll.kernels import host_kernels
from sparsecoll.residual import Residual
from sparsecoll.select import SELECTORS
from sparsecoll.transport import simulate
from sparsecoll.vector import RowSparse

LENGTH = 100_000  # values
allreduce: Any = module.allreduce  # also of names that types do not know


def warm_up() -> Iterator[tuple[str, float, int]]:
    """Make calls, and yield their kind, the seconds that they took, and the number of kernels compiled."""
    kinds: dict[str, Any] = {
        f"allreduce of {name}": partial(simulate, 3, partial(_algorithms, name)) for name in DTYPES
    }
    kinds["formats, dtypes on the wire, mappings, rows"] = partial(simulate, 3, _formats_and_types)
    kinds["selectors and residuals"] = partial(simulate, 3, _selectors)
    if importlib.util.find_spec("torch") is not None:
        kinds["compressors"] = _compressors
    folder = cache()
    for kind, make in kinds.items():
        start, began = time.perf_counter(), time.time()
        make()
        files = folder.parent.rglob("*.nbc") if folder else ()  # those of intrinsics/ are in a folder beside
        yield kind, time.perf_counter() - start, sum(path.stat().st_mtime >= began for path in files)


def cache() -> Path | None:
    """Return the folder in which Numba keeps compiled kernels, if there is one."""
    kernels = host_kernels()
    folder = kernels.select_chunks.stats.cache_path if kernels.__name__ == "sparsecoll.kernels.cpu" else None
    return Path(folder) if folder else None


DTYPES = ("float32", "float64", "int64")


def _values(rank: int, dtype: str = "float32") -> Any:
    return (100 * heavy_tailed(LENGTH, rank)()).astype(dtype)


def _algorithms(dtype: str, comm: Any) -> None:
    for algo, made in ALGORITHMS.items():
        if dtype != "int64" or made.semantics == "exact_sum":
            y = allreduce(comm, _values(comm.rank, dtype), algo, density=None if made.takes_dense else 0.01)
            allreduce(comm, y, algo)


def _formats_and_types(comm: Any) -> None:
    for name in FORMATS:
        allreduce(comm, _values(comm.rank), "allgather", density=0.01, format=name)
    for algo, density in (("dense", None), ("allgather", 0.01), ("oktopk", 0.01)):
        for dtype in ("float16", "bfloat16"):
            allreduce(comm, _values(comm.rank), algo, density=density, value_dtype=dtype)
    allreduce(comm, Counter({f"word {i}": i for i in range(comm.rank, 99)}))
    allreduce(comm, {i: 0.5 * i for i in range(comm.rank, 99)})
    for algo in ("auto", "allgather", "owners"):
        allreduce(comm, RowSparse(np.arange(comm.rank, 9), np.ones((9 - comm.rank, 4), np.float32), 99), algo)


def _selectors(comm: Any) -> None:
    for dtype in ("float32", "float64"):
        for make in SELECTORS.values():
            residual, selector = Residual(LENGTH, np.dtype(dtype)), make()
            for _ in range(2):
                allreduce(comm, residual.take(_values(comm.rank, dtype), selector, k=LENGTH // 100), "allgather")


def _compressors() -> None:
    from sparsecoll.torch.compressors import COMPRESSORS

    rows(2, {name: make() for name, make in COMPRESSORS.items()}, LENGTH, repeat=1)
