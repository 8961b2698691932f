"""Ranks that are killed, stopped or late, under mpirun and torchrun (see fault_programs.py). Bounds are generous."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "fault_programs.py"
MPIRUN = shutil.which("mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
if importlib.util.find_spec("mpi4py") is None:
    MPIRUN = None
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--monitor-interval", "3"]


def _open_mpi():
    printed = subprocess.run([MPIRUN, "--version"], capture_output=True, text=True, check=False) if MPIRUN else None
    return printed is not None and "Open MPI" in printed.stdout


OPEN_MPI = _open_mpi()


@pytest.fixture(params=["mpirun", "torchrun"])
def run(request):
    """Runs a program of fault_programs.py under a launcher."""
    if request.param == "mpirun" and MPIRUN is None:
        pytest.skip("no mpirun")
    if request.param == "torchrun" and importlib.util.find_spec("torch") is None:
        pytest.skip("no torchrun")
    return partial(start, request.param)


@pytest.fixture
def mpirun():
    if MPIRUN is None:
        pytest.skip("no mpirun")
    return partial(start, "mpirun")


def start(launcher, program, *options, env=None):
    """(rows by rank, in order; what else was printed; exit status)."""
    flags = ["--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])] if OPEN_MPI else []
    command = [MPIRUN, *flags, *options, "-n", "3", sys.executable] if launcher == "mpirun" else TORCHRUN
    done = subprocess.run(
        [*command, str(PROGRAM), program],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **(env or {})},
    )
    rows = {0: [], 1: [], 2: []}
    for text in done.stdout.replace("}{", "}\n{").splitlines():
        if text.startswith("{"):
            row = json.loads(text[: text.index("}") + 1])
            rows[row["rank"]].append(row)
    return rows, done.stdout + done.stderr, done.returncode


def test_a_killed_rank_ends_the_job(mpirun):
    _, _, status = mpirun("killed")
    assert status != 0


@pytest.mark.skipif(not OPEN_MPI, reason="MPICH's mpirun ends the job")
def test_a_killed_rank_is_named_at_once_by_ulfm(mpirun):
    rows, text, _ = mpirun("killed", "--with-ft", "ulfm")
    for rank in (0, 1):
        assert "rank 2" in rows[rank][0]["error"] and rows[rank][0]["seconds"] < 10, text


def test_a_killed_rank_is_named_at_once_over_sockets():
    pytest.importorskip("torch")
    rows, text, status = start("torchrun", "killed")
    assert status != 0
    for rank in (0, 1):
        assert "lost rank 2: " in rows[rank][0]["error"] and rows[rank][0]["seconds"] < 1, text


def test_a_stopped_rank_is_given_up_after_the_timeout(run):
    rows, text, _ = run("stopped")
    assert len(rows[0]) == len(rows[1]) == 1, text
    assert any("waits for a message of rank 2 for 1 s" in rows[rank][0]["error"] for rank in (0, 1))
    assert all(rows[rank][0]["error"] and rows[rank][0]["seconds"] < 10 for rank in (0, 1))


def test_a_late_rank_is_waited_for(mpirun):
    rows, text, status = mpirun("late")
    assert status == 0 and [len(rows[rank]) for rank in rows] == [2, 2, 2], text
    assert all(row["error"] is None for rank in rows for row in rows[rank])


def test_a_rank_that_is_too_late_is_told_that_the_others_have_gone(mpirun):
    rows, text, _ = mpirun("too late")
    assert [len(rows[rank]) for rank in rows] == [2, 2, 2], text
    for rank in rows:
        assert "for 1 s: no answer within the timeout" in rows[rank][0]["error"]
        assert rows[rank][0]["seconds"] < 10
        assert rows[rank][1]["error"].startswith("communicator is out of use since rank")


def test_a_rank_that_fails_alone_says_so_and_does_not_wait_for_ever(mpirun):
    rows, text, _ = mpirun("alone")
    assert rows[0][0]["error"] is None and rows[1][0]["error"] is None, text
    error, seconds = rows[2][0]["error"], rows[2][0]["seconds"]
    assert error.startswith("rank 2 failed: MemoryError: no room; then rank 2 waits for the report of rank"), text
    assert error.endswith("; the communicator is out of use") and 2 < seconds < 20
    assert "Traceback" in text and "MemoryError: no room" in text


def test_the_timeout_covers_the_first_call_on_a_communicator(run):
    rows, text, _ = run("cold")
    for rank in (0, 1):
        assert "for all ranks to make their first call on the communicator" in rows[rank][0]["error"], text
        assert rows[rank][0]["seconds"] < 3.5 and rows[rank][1]["seconds"] < 1
        assert "go on with a new one" in rows[rank][1]["error"]
    assert rows[2][0]["error"] and rows[2][0]["seconds"] < 10


def test_communicators_in_threads(mpirun):
    rows, text, status = mpirun("threads")
    assert status == 0 and [len(rows[rank]) for rank in rows] == [1, 1, 1], text
    assert all(row["sums"] == [3000.0] * 4 for rank in rows for row in rows[rank])


def test_the_job_aborts_with_a_message_where_that_is_wanted(mpirun):
    rows, text, status = mpirun("stopped", env={"SPARSECOLL_ON_TIMEOUT": "abort"})
    assert status != 0 and not rows[0] and not rows[1]
    assert "waits for a message of rank" in text and "SPARSECOLL_ON_TIMEOUT=abort" in text


def test_the_watchdog_says_who_waits_for_whom(mpirun):
    _, text, status = mpirun("watchdog")
    assert status == 0 and "rank 0 waits for a message of rank 2" in text and "rank 2 waits" not in text


@pytest.mark.skipif(not OPEN_MPI, reason="MPICH's mpirun ends the job")
def test_survivors_go_on_where_mpi_can(mpirun):
    rows, text, _ = mpirun("shrunk", "--with-ft", "ulfm")
    for rank in (0, 1):
        last = rows[rank][-1]
        assert last["size"] == 2 and last["sum"] == last["expected"], text
