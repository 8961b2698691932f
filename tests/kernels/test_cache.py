"""Processes that need the same kernels at once: one compiles, and the others wait for it, but never for ever."""

import os
import subprocess
import sys
import time

import pytest

COUNT = """
import numpy as np
from sparsecoll.kernels import cpu
from sparsecoll.kernels.cpu.intrinsics import cache
{before}
for dtype in (np.float32, np.int32):
    x = np.arange(-500, 500).astype(dtype)
    assert cpu.count_at_least(x, int(cpu.magnitude_keys(x[:1])[0])) == 1
stats = cpu.selection._count.stats
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""
HOLD = """
import fcntl, os, pathlib, time
from sparsecoll.kernels import cpu
folder = pathlib.Path(cpu.selection._count.stats.cache_path)
folder.mkdir(parents=True, exist_ok=True)
file = open(folder / "kernels.lock", "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("ready", flush=True)
time.sleep(600)
"""
FOLDER = "import os; os.makedirs(os.path.join(cpu.selection._count.stats.cache_path, 'kernels.lock'))"
NO_FILE = """
import pathlib, shutil
folder = pathlib.Path(cpu.selection._count.stats.cache_path)
shutil.rmtree(folder)
folder.touch()
"""
FAILS = """
import time
import numpy as np
from numba.core.compiler import Compiler
from sparsecoll.kernels import cpu
Compiler.compile_extra = None
x = np.ones(9, np.float32)
try:
    cpu.count_at_least(x, 1)
except (TypeError, AttributeError):
    print("ready", flush=True)
    time.sleep(600)
"""
CODES = """
import numpy as np
from sparsecoll.formats import Codes
x = np.linspace(-1, 1, 512, dtype=np.float32)
for bits in {bits}:
    codes = Codes(bits, "linear", 512)
    message, y = np.zeros(codes.size(0, 512), np.uint8), np.zeros_like(x)
    codes.encode(x.copy(), 0, None, message, False)
    codes.decode(message, 0, y)
    assert np.abs(x - y).max() < 2 ** (1 - bits), bits
"""


@pytest.fixture
def start(tmp_path):
    """Starts programs with one empty cache, and ends them after the test."""
    if os.environ.get("SPARSECOLL_KERNELS") == "reference":
        pytest.skip("nothing is compiled")
    processes = []

    def started(program):
        environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
        process = subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        return process

    yield started
    for process in processes:
        process.kill()
        process.communicate()


def counts(process):
    """The kernels that a process has loaded and those that it has compiled."""
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return tuple(map(int, out.split()))


@pytest.mark.slow
def test_each_kernel_is_compiled_by_one_process(start):
    found = [counts(process) for process in [start(COUNT.format(before="")) for _ in range(4)]]
    assert [sum(pair) for pair in found] == [2] * 4 and sum(compiled for _, compiled in found) == 2, found


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_compiles(start):
    holder = start(HOLD)
    assert holder.stdout.readline() == "ready\n"
    waiting = start(COUNT.format(before="print(flush=True)"))
    assert waiting.stdout.readline() == "\n"
    time.sleep(1)
    assert waiting.poll() is None
    holder.kill()
    assert counts(waiting) == (0, 2)


@pytest.mark.slow
def test_each_of_those_that_wait_makes_another_call_ahead(start, tmp_path):
    made = tmp_path / "made"
    holder = start(HOLD.replace("LOCK_EX)", "LOCK_EX, 1 << 62)"))  # not the bytes of calls ahead
    assert holder.stdout.readline() == "ready\n"
    calls = ", ".join(f"lambda: open({str(made)!r}, 'a').write({word!r}) / {word == 'b':d}" for word in "abc")
    before = f"from sparsecoll.kernels import AHEAD\nAHEAD[:] = [{calls}]"  # two of them raise
    waiting = [start(COUNT.format(before=before)) for _ in range(3)]
    stop = time.monotonic() + 120
    while (not made.exists() or len(made.read_text()) < 3) and time.monotonic() < stop:
        time.sleep(0.1)
    time.sleep(0.5)  # for calls that are made twice
    holder.kill()
    assert sum(sum(counts(process)) for process in waiting) == 6
    assert sorted(made.read_text()) == ["a", "b", "c"]


def test_calls_ahead_succeed(start):  # in a process of its own: one that has waited makes no more of them
    calls = "calls = AHEAD.copy()\nassert calls\nfor call in calls:\n    call()"
    assert start(f"from sparsecoll.formats import AHEAD\n{calls}").wait(120) == 0


BEFORE = {"a process that is stopped": "cache.WAIT_SECONDS = 0.1", "no lock": FOLDER, "no file": NO_FILE}


@pytest.mark.slow
@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
def test_what_does_not_come_is_compiled(before, start):
    if "WAIT" in before:
        assert start(HOLD).stdout.readline() == "ready\n"
    assert counts(start(COUNT.format(before=before))) == (0, 2)


@pytest.mark.slow
def test_a_compilation_that_fails_keeps_nobody_waiting(start):
    failed = start(FAILS)
    assert failed.stdout.readline() == "ready\n"
    assert counts(start(COUNT.format(before="cache.WAIT_SECONDS = 1e9"))) == (0, 2)


def test_kernels_of_one_closure_that_two_processes_have_compiled_are_not_mixed_up(start):
    for bits in ([8], [4], [8, 4], [4, 8]):
        assert start(CODES.format(bits=bits)).wait(120) == 0
