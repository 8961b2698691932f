"""Ranks that are killed, stopped or late, under mpirun and torchrun (see fault_programs.py). Bounds are generous."""

import functools
import json
import re
from pathlib import Path

import pytest
from launching import OPEN_MPI, mpirun, run, torchrun

PROGRAM = Path(__file__).parent / "fault_programs.py"
ENDS_WELL = ("threads", "late", "watchdog")
ENDS_BADLY = ("too late", "cold", "alone", "stopped")


@functools.cache
def job(launcher, programs, options=(), on_timeout="raise"):
    """(program -> rank -> rows, in order; what else was printed; exit status) of programs that one job runs in turn."""
    command = mpirun(3, *options) if launcher == "mpirun" else torchrun(3, "--monitor-interval", 3)
    done = run(*command, PROGRAM, *programs, variables={"SPARSECOLL_ON_TIMEOUT": on_timeout})
    rows = {program: {0: [], 1: [], 2: []} for program in programs}
    for text in done.stdout.replace("}{", "}\n{").splitlines():
        if text.startswith("{"):
            row = json.loads(text[: text.index("}") + 1])
            rows[row["program"]][row["rank"]].append(row)
    return rows, done.stdout + done.stderr, done.returncode


@pytest.fixture
def well():
    """Programs of mpirun after which every rank goes on."""
    rows, text, status = job("mpirun", ENDS_WELL)
    assert status == 0, text
    return rows, text


@pytest.fixture(params=["mpirun", "torchrun"])
def badly(request):
    """Programs that leave a communicator out of use, the last of them a stopped rank."""
    return job(request.param, ENDS_BADLY if request.param == "mpirun" else ("cold", "stopped"))[:2]


@pytest.fixture
def ulfm():
    """A killed rank, and the survivors on a communicator without it."""
    if not OPEN_MPI:
        pytest.skip("MPICH's mpirun ends the job")
    return job("mpirun", ("shrunk",), ("--with-ft", "ulfm"))[:2]


def test_a_killed_rank_ends_the_job():
    assert job("mpirun", ("killed",))[2] != 0


def test_a_killed_rank_is_named_at_once_by_ulfm(ulfm):
    rows, text = ulfm
    for rank in (0, 1):
        first = rows["shrunk"][rank][0]
        assert "rank 2" in first["error"] and first["seconds"] < 10, text


def test_a_killed_rank_is_named_at_once_over_sockets():
    rows, text, status = job("torchrun", ("killed",))
    assert status != 0
    for rank in (0, 1):
        first = rows["killed"][rank][0]
        assert "lost rank 2: " in first["error"] and first["seconds"] < 10, text


def test_a_stopped_rank_is_given_up_after_the_timeout(badly):
    rows, text = badly[0]["stopped"], badly[1]
    assert len(rows[0]) == len(rows[1]) == 1, text
    assert any("waits for a message of rank 2 for 1 s" in rows[rank][0]["error"] for rank in (0, 1))
    assert all(rows[rank][0]["error"] and rows[rank][0]["seconds"] < 10 for rank in (0, 1))


@pytest.mark.parametrize("launcher", [mpirun, torchrun])
def test_doctor_reports_that_a_rank_does_not_come(launcher, tmp_path):
    done = run(*launcher(2), PROGRAM.with_name("silent_rank.py"), tmp_path / "done", timeout=120)
    lines = re.sub(r"\x1b\[\d+m", "", done.stdout).splitlines()  # Open MPI gives ranks a terminal
    first = next(line for line in lines if line.startswith("broken"))
    assert "joining the ranks: CommunicationError" in first and "exit status 1" in lines, done.stdout + done.stderr
    assert f"{'':<17}-> see the row joining the ranks" in lines  # no other MPI is to blame


def test_a_late_rank_is_waited_for(well):
    rows, text = well[0]["late"], well[1]
    assert [len(rows[rank]) for rank in rows] == [2, 2, 2], text
    assert all(row["error"] is None for rank in rows for row in rows[rank])


@pytest.mark.parametrize("badly", ["mpirun"], indirect=True)
def test_a_rank_that_is_too_late_is_told_that_the_others_have_gone(badly):
    rows, text = badly[0]["too late"], badly[1]
    assert [len(rows[rank]) for rank in rows] == [2, 2, 2], text
    for rank in rows:
        assert "for 1 s: no answer within the timeout" in rows[rank][0]["error"]
        assert rows[rank][0]["seconds"] < 10
        assert rows[rank][1]["error"].startswith("communicator is out of use since rank")


@pytest.mark.parametrize("badly", ["mpirun"], indirect=True)
def test_a_rank_that_fails_alone_says_so_and_does_not_wait_for_ever(badly):
    rows, text = badly[0]["alone"], badly[1]
    assert rows[0][0]["error"] is None and rows[1][0]["error"] is None, text
    error, seconds = rows[2][0]["error"], rows[2][0]["seconds"]
    assert error.startswith("rank 2 failed: MemoryError: no room; then rank 2 waits for the report of rank"), text
    assert error.endswith("; the communicator is out of use") and 2 < seconds < 20
    assert "Traceback" in text and "MemoryError: no room" in text


def test_the_timeout_covers_the_first_call_on_a_communicator(badly):
    rows, text = badly[0]["cold"], badly[1]
    for rank in (0, 1):
        assert "for all ranks to make their first call on the communicator" in rows[rank][0]["error"], text
        assert rows[rank][0]["seconds"] < 5.5 and rows[rank][1]["seconds"] < 5.5
        assert "continue with a new one" in rows[rank][1]["error"]
    assert rows[2][0]["error"] and rows[2][0]["seconds"] < 10


def test_communicators_in_threads(well):
    rows, text = well[0]["threads"], well[1]
    assert [len(rows[rank]) for rank in rows] == [1, 1, 1], text
    assert all(row["sums"] == [3000.0] * 4 for rank in rows for row in rows[rank])


def test_the_job_aborts_with_a_message_where_that_is_wanted():
    rows, text, status = job("mpirun", ("stopped",), on_timeout="abort")
    assert status != 0 and not rows["stopped"][0] and not rows["stopped"][1]
    assert "waits for a message of rank" in text and "SPARSECOLL_ON_TIMEOUT=abort" in text


def test_the_watchdog_says_who_waits_for_whom(well):
    text = well[1]
    assert "rank 0 waits for a message of rank 2" in text


def test_survivors_go_on_where_mpi_can(ulfm):
    rows, text = ulfm
    for rank in (0, 1):
        last = rows["shrunk"][rank][1]
        assert last["size"] == 2 and last["sum"] == last["expected"], text


def test_a_rank_that_is_killed_before_the_first_call_is_no_other_error(ulfm):
    rows, text = ulfm
    *_, first, last = rows["shrunk"][0]
    assert "out of use since MPI_ERR_" in first["error"] and last["left"] == 1, text


def test_calls_after_mpi_was_finalized_raise():
    """MPI itself would abort the process."""
    rows, text, status = job("mpirun", ("finalized",))
    assert status == 0, text
    for rank in range(3):
        errors = [row["error"] for row in rows["finalized"][rank]]
        assert len(errors) == 6, text
        assert all(e.startswith("communicator is out of use since MPI.Finalize() was called; call it") for e in errors)
