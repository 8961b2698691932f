"""Memory is used again only after the last view of it is gone, and only so much is kept."""

import gc
import os
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest

from sparsecoll.kernels import memory


@pytest.fixture(autouse=True)
def start_empty():
    gc.collect()
    memory.release()
    yield
    memory.release()


def address(array):
    return array.__array_interface__["data"][0]


def test_memory_comes_back_when_the_last_view_is_gone():
    first = memory.empty(100_000, np.float32)
    place, view = address(first), first[10:20].view(np.uint8)
    del first
    other = memory.empty(100_000, np.float32)
    assert address(other) != place  # the view still holds it
    view[:] = 7
    del view
    again = memory.empty(99_000, np.int32)  # nearly the same size
    assert address(again) == place and again.dtype == np.int32 and again.size == 99_000
    assert again.flags.writeable and again.flags.aligned and again.flags.c_contiguous


def test_small_arrays_are_plain_ones():
    assert memory.empty(10, np.float64).base is None
    assert memory.empty(0, np.float64).size == 0


def test_no_more_than_the_limit_is_kept_and_the_newest_stays():
    held = [memory.empty(memory.RETAINED // 4, np.uint8) for _ in range(7)]
    newest = address(held[-1])
    while held:
        held.pop(0)
    assert 0 < sum(raw.size for alike in memory._free.values() for raw in alike) <= memory.RETAINED
    assert address(memory.empty(memory.RETAINED // 4, np.uint8)) == newest


def test_a_finaliser_inside_the_lock_only_queues():
    """The garbage collector may run while the list is searched: then the list must not change."""
    array = memory.empty(memory.SMALLEST, np.uint8)
    place = address(array)
    with memory._lock:
        del array
        assert not memory._free and len(memory._returned) == 1
    assert address(memory.empty(memory.SMALLEST, np.uint8)) == place


def test_a_signal_handler_inside_the_lock_does_not_wait():
    memory.release()
    with memory._lock:
        held = memory.empty(memory.SMALLEST, np.uint8)
    assert address(held) % memory.ALIGNMENT == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked")
def test_a_forked_process_begins_anew():
    """A thread that it does not have may hold the lock."""
    with memory._lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads, which the test has
        if (child := os.fork()) == 0:
            places = set()
            try:
                places = {address(memory.empty(memory.SMALLEST, np.uint8)) for _ in range(3)}
            finally:
                os._exit(memory._lock.locked() or len(places) != 1)
    assert os.waitpid(child, 0)[1] == 0


def test_rounding_wastes_at_most_an_eighth():
    for size in (memory.SMALLEST, memory.SMALLEST + 1, 10**6, 2**24 - 1, 2**24 + 1, 10**8 + 7):
        fitting = memory._fitting(size)
        assert size <= fitting[0] <= size * 1.13 + 4096 and fitting[-1] < 2 * fitting[0]


def test_an_array_takes_the_memory_of_one_that_was_less_than_twice_as_large():
    place = address(memory.empty(1_900_000, np.uint8))
    small = memory.empty(1_000_000, np.uint8)
    assert address(small) == place and small.size == 1_000_000
    del small
    assert address(memory.empty(900_000, np.uint8)) != place  # in whose memory half would be idle
    assert address(memory.empty(1_900_000, np.uint8)) == place


def test_threads_never_share():
    wrong = []

    def work(number):
        for _ in range(300):
            array = memory.empty(70_000, np.int64)
            array[:] = number
            if not (array == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_arrays_that_outlive_the_modules_are_silent():
    """Numba keeps the globals of the script that compiles a function until the interpreter has cleared all modules."""
    script = """
import numba, numpy as np
from sparsecoll.kernels.memory import empty

x = empty(1 << 20, np.uint8)

@numba.njit
def first(values):
    return values[0]

first(x)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    assert ended.stderr == ""
