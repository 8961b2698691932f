"""Ctrl-C: commands end at once by the signal, also under mpirun, and no virtual rank goes on."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from launching import mpirun

import sparsecoll

PROGRAM = """
import ctypes, os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # of a shell's job in the background it is ignored
from sparsecoll.bench import timing
from sparsecoll.cli import doctor
from sparsecoll.cli.main import main
slow = lambda *_, **__: time.sleep(60)
{measure}
os.write(1, b"ready\\n")  # at once: ranks of a job print into one pipe
main()
"""
SLOW = "timing.measure = slow"  # one that computes
DROPS = """
def measure(*_, **__):
    ctypes.CFUNCTYPE(None)(lambda: time.sleep(60))()  # as functions of Python that LLVM calls
    time.sleep(60)
timing.measure = measure
"""
COMMANDS = {
    "simulate": (["simulate", "--ranks", "8", "--n", "1e5", "--repeat", "9999"], ""),
    "simulate computes": (["simulate", "--ranks", "2"], SLOW),
    "bench": (["bench", "--n", "1e5", "--repeat", "99999"], ""),
    "bench computes": (["bench"], SLOW),
    "bench drops it": (["bench"], DROPS),
    "bench ends slowly": (["bench"], f"{SLOW}; import atexit; atexit.register(time.sleep, 60)"),  # as in MPI_Finalize
    "doctor": (["doctor"], "doctor._versions = slow"),
    "warmup": (["warmup"], "from sparsecoll.cli import warmup; warmup._algorithms = slow"),
    "gain": (["gain"], "from sparsecoll.cli import gain; gain.predict = slow"),
    "plot": (["plot", "no.json"], "from sparsecoll.cli import plot; plot.rows_of = slow"),
    "doctor's self-tests": (["doctor"], "doctor._PROGRAM = 'import time; time.sleep(60)'"),
}


def interrupted(command, after=0.5, ranks=1):
    """What a command prints (stdout, stderr), its status, and the seconds it takes to end after Ctrl-C."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    assert [process.stdout.readline() for _ in range(ranks)] == ["ready\n"] * ranks
    time.sleep(after)
    os.killpg(process.pid, signal.SIGINT)
    began = time.monotonic()
    out, err = process.communicate(timeout=60)
    return out, err, process.returncode, time.monotonic() - began


@pytest.mark.parametrize(("name", "after"), [*((name, 2) for name in COMMANDS), ("simulate", 0.1), ("bench", 0.1)])
def test_a_command_ends(name, after):
    arguments, measure = COMMANDS[name]
    out, err, status, seconds = interrupted([sys.executable, "-c", PROGRAM.format(measure=measure), *arguments], after)
    lines = [line for line in err.splitlines() if "note: there is only 1 rank" not in line]
    assert (lines, status) == ([], -signal.SIGINT), out + err
    assert seconds < 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["simulate", "bench", "bench computes", "bench drops it", "doctor"])
def test_a_command_under_mpirun_ends(name):
    arguments, measure = COMMANDS[name]
    command = [*mpirun(2), "-c", PROGRAM.format(measure=measure), *arguments]
    out, err, _, seconds = interrupted([*map(str, command)], 2, ranks=2)
    assert "Traceback" not in out + err, out + err
    assert seconds < 30


def forever(comm):
    while True:
        comm.Barrier()


def keeps_on(comm):
    """Makes calls after a call has raised."""
    try:
        forever(comm)
    finally:
        comm.Barrier()


def computes(comm):
    if comm.rank == 1:
        time.sleep(0.5)
    sparsecoll.allreduce(comm, sparsecoll.SparseVector([comm.rank], [1.0], 9))
    forever(comm)


def rest(comm):
    some = comm.Split(0 if comm.rank else None)
    if some is not None:
        forever(some)


@pytest.mark.parametrize("program", [forever, keeps_on, computes, rest])
def test_no_virtual_rank_goes_on(program):
    before = set(threading.enumerate())
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            sparsecoll.simulate(8, program)
    finally:
        signal.signal(signal.SIGINT, handler)
    deadline = time.monotonic() + 10
    while set(threading.enumerate()) - before - {timer} and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before - {timer}


def test_an_interrupt_while_the_ranks_are_started(monkeypatch):
    """As many as have been started by then."""
    before, start = set(threading.enumerate()), threading.Thread.start

    def interrupt(thread):
        if len(set(threading.enumerate()) - before) == 3:
            raise KeyboardInterrupt
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupt)
    with pytest.raises(KeyboardInterrupt):
        sparsecoll.simulate(8, forever)
    deadline = time.monotonic() + 10
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before
    assert sparsecoll.simulate(3, lambda comm: comm.allgather(comm.rank)).results == [[0, 1, 2]] * 3
