"""Times allreduces on a communicator, from the dense vector to the sparse sum, as the OSU micro-benchmarks do.

A barrier precedes each timed call; the time of a call is that of the slowest rank, and a row has the median over the
calls. Every call gets a different vector (entries have moved, and grown or shrunk), so that reused thresholds and
boundaries have to adapt as they would in training.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsecoll._version import __version__
from sparsecoll.algorithms import Algorithm
from sparsecoll.bench import names
from sparsecoll.collectives.allreduce import allreduce
from sparsecoll.collectives.options import CallOptions
from sparsecoll.kernels import host_kernels
from sparsecoll.telemetry import trace
from sparsecoll.transport import as_transport, simulate, traffic
from sparsecoll.transport.all_ranks import allgather, barrier
from sparsecoll.transport.network import Network
from sparsecoll.vector import SparseVector

Row = dict[str, Any]
Run = Callable[[Any], tuple[float, float, float, float]]
Vectors = Callable[[], NDArray[Any] | SparseVector]
MPI_ALLREDUCE = "MPI_Allreduce"  # the name of MPI's own dense sum among the algorithms
STEP = 4099  # coordinates by which the entries move from one call to the next
GROWTH, PERIOD = 1.01, 64  # factor per call by which values grow for PERIOD calls, then shrink for as many


class Gradients:
    """Dense vectors of one rank, a different one for every call, as views of one array.

    Args:
        base: the values; n consecutive ones are a vector.
        n: length of a vector, at most base.size (the default).
    """

    def __init__(self, base: NDArray[Any], n: int | None = None) -> None:
        self.base, self.n, self._calls = base, base.size if n is None else n, 0

    def __call__(self) -> NDArray[Any]:
        """Return the next vector; the previous one is overwritten."""
        start = STEP * self._calls % (self.base.size - self.n + 1)
        self._calls += 1
        self.base *= self.base.dtype.type(1 / GROWTH if self._calls // PERIOD % 2 else GROWTH)
        return self.base[start : start + self.n]


def heavy_tailed(n: int, rank: int, spare: int = 1 << 18) -> Gradients:
    """Return cubes of normal values, independent on every rank; all coordinates are equally likely to be large."""
    x = np.random.default_rng([7, rank]).standard_normal(n + spare, dtype=np.float32)
    x *= np.abs(x) ** 2
    return Gradients(x, n)


def from_file(path: str | Path, rank: int) -> Gradients:
    """Return the vector in a .npy file; `{rank}` in the name stands for the rank.

    Raises:
        ValueError: The file cannot be read, or does not contain a 1-D array of floats.
    """
    name = str(path).replace("{rank}", str(rank))
    try:
        base = np.load(name)
    except (ValueError, EOFError, OSError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"{name}: expected a .npy file with a 1-D array of floats ({why})") from None
    if not isinstance(base, np.ndarray):
        raise ValueError(f"{name}: expected a .npy file with a 1-D array of floats, got an archive")
    if base.ndim != 1 or base.dtype.kind != "f" or base.size == 0:
        raise ValueError(f"{name}: expected a 1-D array of floats, got {base.dtype} of shape {base.shape}")
    return Gradients(base)


@dataclass(frozen=True)
class Call:
    """What is timed: an algorithm at a density, with a wire format and a dtype of the values on the wire.

    Args:
        algo: text of an algorithm, or MPI_ALLREDUCE; or an Algorithm or a Compressor, which is copied.
        density: k / n; None for sparse vectors, all of whose entries are sent.
        format: as in `sparsecoll.allreduce`, of algorithms only.
        value_dtype: likewise.
        selector: text of a selector, which takes the place of the algorithm's own.
        compressor: whether `algo` is the text of a compressor.
        label: what rows call it; "" for the texts.
    """

    algo: Any
    density: float | None
    format: Any = "auto"
    value_dtype: Any = None
    selector: str | None = None
    compressor: bool = False
    label: str = ""

    def __str__(self) -> str:
        if self.label or not isinstance(self.algo, str):
            return self.label or str(getattr(self.algo, "name", self.algo))
        if self.compressor:
            return f"compressor {self.algo}"
        return f"{self.algo}{',' if '=' in self.algo else ':'}selector={self.selector}" if self.selector else self.algo

    def made(self) -> Any:
        """Return a new Algorithm or Compressor.

        Raises:
            ValueError: A text names none.
        """
        if not isinstance(self.algo, str):
            if isinstance(self.algo, type) or not hasattr(self.algo, "name"):
                found = f"the class {self.algo.__name__}" if isinstance(self.algo, type) else repr(self.algo)
                raise TypeError(f"algo: expected text, an Algorithm or a Compressor object, got {found}")
            own = copy.deepcopy(self.algo)
            if self.density is not None and isinstance(own, Algorithm) and own.k is not None:
                raise ValueError(f"algo: expected density instead of k, which it would override, got {self.algo!r}")
            if self.density is not None and hasattr(own, "density"):  # of a Compressor, as k of an Algorithm
                own.density = self.density
            return own
        if self.compressor:
            if self.density is not None and re.search("[:,]density=", self.algo):
                raise ValueError(f"compressor: expected --density instead of density, got {self.algo!r}")
            return names.compressor(self.algo, density=self.density)
        made = names.algorithm(self.algo)
        if made.k is not None:
            raise ValueError(f"algo: expected --density instead of k, which it would override, got {self.algo!r}")
        if self.selector:
            made.selector = names.selector(self.selector)
        return made


def measure(
    comm: Any, call: Call, vectors: Vectors, repeat: int = 7, warm: int = 2, run: Run | None = None, **about: Any
) -> Row:
    """Measure one row, the same on every rank; collective.

    Args:
        comm: communicator, or a virtual rank of the simulator.
        call: what to time. The algorithm `MPI_Allreduce` is the MPI library's own dense sum of the same vectors.
        vectors: function that returns the vector of the next call.
        repeat: number of timed calls.
        warm: number of calls before them that are not timed.
        run: function that makes the call instead, to time other libraries; it returns (bytes sent, bytes received,
            messages, entries), with NaN for what was not counted.
        about: more columns of the row.

    Returns:
        The row: seconds (median, least and most over the calls, of the slowest rank), seconds by kind of work (median
        over the calls, mean over the ranks; "other" is the rest), bytes and messages of the last call on the busiest
        rank (None if not counted, as for MPI_Allreduce), entries of the result, and the peak memory in bytes of a rank
        beyond what it held before (too low if earlier calls left buffers behind: measure it in a fresh process).
    """
    transport = as_transport(comm)
    if not transport.virtual:
        host_kernels()  # Numba starts now, not in the calls that are timed
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, on Linux
    before, times, kinds = _memory("VmRSS"), [], []
    run = run or runner(comm, call)
    for _ in range(warm):
        run(vectors())
    for _ in range(repeat):
        vector = vectors()
        barrier(transport)
        start = transport.now()
        with trace.record(trace.Recorder(transport.now)) as recorder:
            counts = run(vector)
        seconds = transport.now() - start
        times.append(seconds)
        on_thread = {} if transport.virtual else getattr(run, "seconds", {})
        parts = list((on_thread or recorder.seconds).values())
        kinds.append([*parts, seconds - sum(parts)])
    peak = max(_memory("VmHWM") - before, 0)
    table = allgather(transport, np.array([*times, *np.median(kinds, axis=0), *counts, peak], np.float64))
    slowest = table[:, :repeat].max(axis=0)
    spent = table[:, repeat : repeat + len(trace.KINDS) + 1].mean(axis=0)
    n = vector.length if isinstance(vector, SparseVector) else vector.size
    row: Row = {**about, "algo": str(call), "n": int(n), "density": call.density, "P": transport.size}
    row |= {"format": str(call.format), "value_dtype": call.value_dtype or vector.dtype.name}
    row |= {"seconds": float(np.median(slowest)), "least": float(slowest.min()), "most": float(slowest.max())}
    row |= dict(zip((*trace.KINDS, "other"), spent.tolist(), strict=True))
    most = table[:, repeat + len(trace.KINDS) + 1 :].max(axis=0).tolist()
    counted = [None if math.isnan(count) else int(count) for count in most]
    return row | dict(zip(("bytes_sent", "bytes_received", "messages", "entries", "memory"), counted, strict=True))


def runner(comm: Any, call: Call) -> Run:
    """Return a function that makes the call and returns bytes sent and received, messages sent, and entries."""
    if call.algo == MPI_ALLREDUCE:
        if not hasattr(comm, "Allreduce"):
            raise ValueError(f"algo: expected another one without a communicator of MPI, got {call.algo}: use dense")
        out: list[NDArray[Any]] = []

        def dense(vector: NDArray[Any]) -> tuple[float, float, float, int]:
            if not out:
                out.append(np.empty_like(vector))
            comm.Allreduce(vector, out[0])
            return math.nan, math.nan, math.nan, vector.size

        return dense
    chosen = call.made()
    if not isinstance(chosen, Algorithm):
        from sparsecoll.bench.compressors import Mean

        return Mean(comm, chosen)
    counters, density = traffic(comm), None if chosen.takes_dense else call.density  # a dense sum selects nothing

    def sparse(vector: Any) -> tuple[float, float, float, int]:
        before = counters.copy()
        value: Any = allreduce(comm, vector, chosen, density=density, format=call.format, value_dtype=call.value_dtype)
        moved = counters.since(before).total
        return moved.bytes_sent, moved.bytes_received, moved.messages_sent, getattr(value, "nnz", vector.size)

    return sparse


def _memory(which: str) -> int:
    """Return VmRSS or VmHWM of this process in bytes; 0 if the system does not report it."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(which)), 0)
    return 0


def simulated(
    ranks: int, n: int, call: Call, repeat: int = 3, network: Network | None = None, ranks_per_node: int = 1
) -> Row:
    """Return a row of virtual ranks: exact bytes and messages, the modelled seconds of the network."""

    def program(comm: Any) -> Row:
        return measure(comm, call, heavy_tailed(n, comm.rank), repeat, warm=1)

    return simulate(ranks, program, network, ranks_per_node=ranks_per_node).results[0]


def calls(
    algos: Sequence[Any],
    densities: Sequence[float],
    formats: Sequence[Any] = ("auto",),
    value_dtypes: Sequence[str | None] = (None,),
    selectors: Sequence[str | None] = (None,),
    compressors: Sequence[str] = (),
    dtype: Any = np.float32,
) -> Iterator[Call]:
    """Yield all combinations, dense algorithms at one density in one format; compressors have neither format nor dtype.

    Raises:
        ValueError: A text names no algorithm, selector or compressor, or an algorithm cannot send values of this dtype
            in a format and a dtype on the wire.
    """
    for base in [*(Call(algo, 1.0) for algo in algos), *(Call(text, 1.0, compressor=True) for text in compressors)]:
        made: Any = None if base.algo == MPI_ALLREDUCE else base.made()
        algorithm = isinstance(made, Algorithm)
        dense = made is None or (made.takes_dense if algorithm else not hasattr(made, "density"))
        of_entries = itertools.product(formats, selectors) if algorithm and not dense else [("auto", None)]
        for density, (form, selector), value_dtype in itertools.product(
            [1.0] if dense else densities, of_entries, value_dtypes if algorithm else [None]
        ):
            call = replace(base, density=density, format=form, value_dtype=value_dtype, selector=selector)
            if algorithm:
                options = CallOptions(format=form, value_dtype=value_dtype)
                options.check_dtype(np.dtype(dtype), f"algo={made.name!r}" if made.sends_sums else None)
                call.made()  # with its selector
            yield call


def about() -> Row:
    """Return machine, versions and commit, for the head of a file of rows."""
    versions = {"python": platform.python_version(), "sparsecoll": __version__}
    for name in ("numpy", "numba", "mpi4py", "torch"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    if "mpi4py.MPI" in sys.modules:
        versions["MPI"] = sys.modules["mpi4py.MPI"].Get_library_version().splitlines()[0].strip("\0 ")
    return {"machine": f"{_processor()}, {os.cpu_count()} cores", "versions": versions, "commit": _commit()}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    generation = f" (family {found['cpu family']}, model {found['model']})" if "cpu family" in found else ""
    return found.get("model name", platform.machine()) + generation


def _commit() -> str:
    """Return the commit of the checkout that has this file; empty if there is none, or no git.

    It ends in "-dirty" if a file has changed since, other than rows and pages, which measurements write.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    if shutil.which("git") is None or not git("ls-files", __file__):  # or the repository around an environment
        return ""
    own = (":/", ":(top,exclude)perf/results", ":(top,exclude)docs")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", *own)
    return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")
