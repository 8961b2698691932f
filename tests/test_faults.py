"""Ranks that are killed, stopped or late, under a real mpirun (see fault_programs.py). Bounds are generous."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mpi4py")
MPIRUN = Path(sys.executable).parent / "mpirun"
PROGRAM = Path(__file__).parent / "fault_programs.py"

if not MPIRUN.exists() and shutil.which("mpirun") is None:
    pytest.skip("no mpirun", allow_module_level=True)
COMMAND = str(MPIRUN) if MPIRUN.exists() else "mpirun"
OPEN_MPI = "Open MPI" in subprocess.run([COMMAND, "--version"], capture_output=True, text=True, check=False).stdout


def run(program, *options, env=None):
    """(rows by rank, in order; what else was printed; exit status)."""
    flags = ["--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])] if OPEN_MPI else []
    done = subprocess.run(
        [COMMAND, *flags, *options, "-n", "3", sys.executable, str(PROGRAM), program],
        capture_output=True,
        text=True,
        timeout=60,
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


def test_a_killed_rank_ends_the_job():
    _, _, status = run("killed")
    assert status != 0


@pytest.mark.skipif(not OPEN_MPI, reason="MPICH's mpirun ends the job")
def test_a_killed_rank_is_named_at_once():
    rows, text, _ = run("killed", "--with-ft", "ulfm")
    for rank in (0, 1):
        assert "rank 2" in rows[rank][0]["error"] and rows[rank][0]["seconds"] < 10, text


def test_a_stopped_rank_is_given_up_after_the_timeout():
    rows, text, _ = run("stopped")
    assert len(rows[0]) == len(rows[1]) == 1, text
    assert any("waits for a message of rank 2 for 1 s" in rows[rank][0]["error"] for rank in (0, 1))
    assert all(rows[rank][0]["error"] and rows[rank][0]["seconds"] < 10 for rank in (0, 1))


def test_a_late_rank_is_waited_for():
    rows, text, status = run("late")
    assert status == 0 and [len(rows[rank]) for rank in rows] == [2, 2, 2], text
    assert all(row["error"] is None for rank in rows for row in rows[rank])


def test_a_rank_that_is_too_late_is_told_that_the_others_have_gone():
    rows, text, _ = run("too late")
    assert [len(rows[rank]) for rank in rows] == [2, 2, 2], text
    for rank in rows:
        assert "for 1 s: no answer within the timeout" in rows[rank][0]["error"]
        assert rows[rank][0]["seconds"] < 10
        assert rows[rank][1]["error"].startswith("communicator is out of use since rank")


def test_a_rank_that_fails_alone_says_so_and_does_not_wait_for_ever():
    rows, text, _ = run("alone")
    assert rows[0][0]["error"] is None and rows[1][0]["error"] is None, text
    error, seconds = rows[2][0]["error"], rows[2][0]["seconds"]
    assert error.startswith("rank 2 failed: MemoryError: no room; then rank 2 waits for the report of rank"), text
    assert error.endswith("; the communicator is out of use") and 2 < seconds < 20
    assert "Traceback" in text and "MemoryError: no room" in text


def test_the_timeout_covers_the_first_call_on_a_communicator():
    rows, text, _ = run("cold")
    for rank in (0, 1):
        assert "for all ranks to make their first call on the communicator" in rows[rank][0]["error"], text
        assert rows[rank][0]["seconds"] < 3.5 and rows[rank][1]["seconds"] < 1
        assert "go on with a new one" in rows[rank][1]["error"]
    assert rows[2][0]["error"] and rows[2][0]["seconds"] < 10


def test_communicators_in_threads():
    rows, text, status = run("threads")
    assert status == 0 and [len(rows[rank]) for rank in rows] == [1, 1, 1], text
    assert all(row["sums"] == [3000.0] * 4 for rank in rows for row in rows[rank])


def test_the_job_aborts_with_a_message_where_that_is_wanted():
    rows, text, status = run("stopped", env={"SPARSECOLL_ON_TIMEOUT": "abort"})
    assert status != 0 and not rows[0] and not rows[1]
    assert "waits for a message of rank" in text and "SPARSECOLL_ON_TIMEOUT=abort" in text


def test_the_watchdog_says_who_waits_for_whom():
    _, text, status = run("watchdog")
    assert status == 0 and "rank 0 waits for a message of rank 2" in text and "rank 2 waits" not in text


@pytest.mark.skipif(not OPEN_MPI, reason="MPICH's mpirun ends the job")
def test_survivors_go_on_where_mpi_can():
    rows, text, _ = run("shrunk", "--with-ft", "ulfm")
    for rank in (0, 1):
        last = rows[rank][-1]
        assert last["size"] == 2 and last["sum"] == last["expected"], text
