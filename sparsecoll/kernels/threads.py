"""Threads that share a pass over a long array, and how many of them a rank may use."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from itertools import accumulate, pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from sparsecoll.kernels.keys import Array
from sparsecoll.kernels.memory import empty

SHARED = 1 << 20  # values or entries from which on threads share a pass
MOST = 4  # more threads than this gain little: they share the bandwidth of the memory
VARIABLE = "SPARSECOLL_THREADS"
LOCAL_RANKS = (  # ranks on this node, as the launchers tell it
    "OMPI_COMM_WORLD_LOCAL_SIZE",  # Open MPI
    "MPI_LOCALNRANKS",  # MPICH, Intel MPI
    "MV2_COMM_WORLD_LOCAL_SIZE",  # MVAPICH
    "PALS_LOCAL_SIZE",  # Cray
    "LOCAL_WORLD_SIZE",  # torchrun
    "SLURM_STEP_TASKS_PER_NODE",  # srun: "2(x3),1" for three nodes of two ranks and one of one
)
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of processor time, per so many microseconds

Task = tuple[Callable[..., Any], tuple[Any, ...], "Future[Any]"]


def local_ranks() -> int | None:
    """The number of ranks on this node, or on the fullest one; None if no launcher tells it."""
    words = [word.partition("(")[0] for name in LOCAL_RANKS for word in os.environ.get(name, "").split(",")]
    return max((int(word) for word in words if word.isdecimal()), default=None)


def cores(process: int = 0) -> int:
    """The number of cores that this process, or another, may use: what it is bound to, and what a container may use."""
    try:
        count = len(os.sched_getaffinity(process))
    except (AttributeError, OSError):  # macOS has no such function, and a module of Linux may forbid it
        count = os.cpu_count() or 1
    try:
        quota, period = QUOTA.read_text().split()
        return max(1, min(count, int(quota) // int(period)))
    except (OSError, ValueError):  # there is no such file, or no limit ("max")
        return count


@functools.cache
def allowed() -> int:
    """The number of threads that share a long pass: SPARSECOLL_THREADS, or the idle cores of a rank, at most MOST.

    Ranks share the cores of the launcher, their parent process; one that is bound to some of them uses no others. It is
    1 where no launcher tells how many ranks there are.

    Raises:
        ValueError: SPARSECOLL_THREADS is not an integer of at least 1.
    """
    if (chosen := os.environ.get(VARIABLE)) is None:
        ranks = local_ranks()
        return 1 if not ranks else max(1, min(MOST, cores(), cores(os.getppid()) // ranks))
    if not chosen.isdecimal() or int(chosen) < 1:
        raise ValueError(f"{VARIABLE}: expected an integer of at least 1, got {chosen!r}")
    return int(chosen)


def count_for(size: int) -> int:
    """The number of threads for a pass over `size` values or entries."""
    return allowed() if size >= SHARED else 1


def ranges(size: int, unit: int = 1, width: int = 1) -> list[tuple[int, int]]:
    """The (start, stop) by which threads share `size` items of `width` values; all but the last stop at a multiple of
    `unit`."""
    count = max(1, min(count_for(size * width), size))
    return list(pairwise([*(size * t // count // unit * unit for t in range(count)), size]))


def run(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """[function(*a) for a in arguments], by several threads; returns or raises when none of them runs any more."""
    tasks = _tasks(allowed() - 1) if len(arguments) > 1 else None
    if tasks is None:
        return [function(*a) for a in arguments]
    answers: list[Future[Any]] = [Future() for _ in arguments[1:]]
    for answer, a in zip(answers, arguments[1:], strict=True):
        tasks.put((function, a, answer))
    try:
        first = function(*arguments[0])
    finally:
        wait(answers)
    return [first, *(answer.result() for answer in answers)]


@functools.cache
def _tasks(workers: int) -> SimpleQueue[Task] | None:
    """The queue that so many threads serve; None if there are none."""
    tasks: SimpleQueue[Task] = SimpleQueue()
    for number in range(workers):
        try:
            threading.Thread(target=serve, args=(tasks,), name=f"sparsecoll-kernels-{number}", daemon=True).start()
        except RuntimeError:  # the system allows no more threads, or the interpreter is shutting down
            return tasks if number else None
    return tasks if workers > 0 else None


def serve(tasks: SimpleQueue[Task | None]) -> None:
    """Execute tasks until one is None."""
    while (task := tasks.get()) is not None:
        function, arguments, answer = task
        try:
            answer.set_result(function(*arguments))
        except BaseException as error:
            answer.set_exception(error)
        del task, function, arguments, answer  # they may hold arrays


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_tasks.cache_clear)  # a forked process has none of the threads


def joined(parts: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """The (indices, values) of consecutive parts as one pair of arrays."""
    if len(parts) == 1:
        return parts[0]
    ends = [0, *accumulate(indices.size for indices, _ in parts)]
    out = tuple(empty(ends[-1], array.dtype) for array in parts[0])

    def copy(part: tuple[Array, Array], start: int, stop: int) -> None:
        for target, source in zip(out, part, strict=True):
            target[start:stop] = source

    run(copy, [(part, *edges) for part, edges in zip(parts, pairwise(ends), strict=True)])
    return out[0], out[1]
