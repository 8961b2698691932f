"""Threads: the same bits for any number of them, and never more of them than idle cores."""

import os
import threading

import numpy as np
import pytest

from sparsecoll.kernels import cpu, keys, reference, threads

SIZES = (0, 1, 5, 2048, 70_001)


def several(monkeypatch, count):
    """Let `count` threads share every pass."""
    monkeypatch.setattr(threads, "SHARED", 0)
    monkeypatch.setattr(threads, "allowed", lambda: count)


def gradient(dtype, size, seed):
    """Values with ties, and NaN and infinities if they are floats."""
    rng = np.random.default_rng(seed)
    drawn = np.round(rng.standard_normal(size) ** 3 * 20)
    if np.dtype(dtype).kind == "f":
        drawn[rng.random(size) < 0.001] = np.nan
        drawn[rng.random(size) < 0.001] = -np.inf
    return drawn.astype(dtype)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_threads_select_what_one_thread_selects(dtype, count, monkeypatch):
    several(monkeypatch, count)
    for size in SIZES:
        x, g = gradient(dtype, size, 0), gradient(dtype, size, 1)
        for name, argument in (("select_at_least", keys.key_of(60, x.dtype)), ("topk", size // 50)):
            mine, theirs, sums = x.copy(), x.copy(), (np.zeros(4), np.zeros(4))
            extra = [{} if name == "topk" else {"moments": m} for m in sums]
            work = keys.Pass(add=(g, 2), clear=True)
            with np.errstate(all="ignore"):
                found = getattr(cpu, name)(mine, argument, work=work, **extra[0])
                expected = getattr(reference, name)(theirs, argument, work=work, **extra[1])
                apart = getattr(cpu, name)(out := np.empty_like(x), argument, work=work._replace(source=x))
            for a, b in zip((*found, mine, sums[0]), (*expected, theirs, sums[1]), strict=True):
                np.testing.assert_array_equal(a, b)
            for a, b in zip((*apart, out), (*expected, theirs), strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("nesterov", [False, True])
def test_threads_form_momentum_as_one_thread_does(nesterov, count, monkeypatch):
    several(monkeypatch, count)
    for size in SIZES:
        x, v, g = (gradient(np.float32, size, seed) for seed in range(3))
        for name, argument in (("select_at_least", keys.key_of(60, x.dtype)), ("topk", size // 50)):
            results = []
            for kernels in (cpu, reference):
                new, out = np.empty_like(x), np.empty_like(x)
                momentum = keys.Momentum(v, 0.7, new, nesterov)
                with np.errstate(all="ignore"):
                    found = getattr(kernels, name)(out, argument, work=keys.Pass(x, momentum, (g, 2), True))
                results.append((*found, out, new))
            for a, b in zip(*results, strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("dense", [False, True])
def test_threads_merge_as_one_thread_does(count, dense, monkeypatch):
    several(monkeypatch, count)
    rng = np.random.default_rng(0)
    for size in SIZES:
        parts = []
        for place in range(5):  # the last one lies behind all others
            top = max(1, 3 * size if dense else 2**40)
            indices = np.unique(rng.integers(0, top, size // (place + 1), dtype=np.uint64)) + np.uint64(
                top * (place > 3)
            )
            parts.append((indices, rng.standard_normal(indices.size)))
        for mine, theirs in zip(
            cpu.merge_sum(parts, np.dtype(float)), reference.merge_sum(parts, np.dtype(float)), strict=True
        ):
            assert mine.tobytes() == theirs.tobytes()


def test_results_keep_their_order_and_an_error_waits_for_all(monkeypatch):
    several(monkeypatch, 3)
    ended = []

    def work(number):
        if number == 0:
            raise ValueError("first")
        ended.append(number)
        return number

    assert threads.run(abs, [(-3,), (-2,), (-1,)]) == [3, 2, 1]
    with pytest.raises(ValueError, match="first"):
        threads.run(work, [(n,) for n in range(20)])
    assert sorted(ended) == list(range(1, 20))


def test_one_thread_where_the_system_allows_no_more(monkeypatch):
    def refused(self):
        raise RuntimeError("can't start new thread")

    several(monkeypatch, 9)
    monkeypatch.setattr(threading.Thread, "start", refused)
    assert threads.run(abs, [(-2,), (-1,)]) == [2, 1]
    threads._tasks.cache_clear()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_process_starts_threads_of_its_own(monkeypatch):
    several(monkeypatch, 2)
    assert threads.run(abs, [(-2,), (-1,)]) == [2, 1]
    child = os.fork()
    if child == 0:
        os._exit(threads.run(abs, [(-2,), (-1,)]) != [2, 1])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    "variables, cores, expected",
    [
        ({}, 8, 1),  # nothing tells how many ranks there are
        ({"MPI_LOCALNRANKS": "4"}, (4, 16), 4),  # each rank is bound to cores of its own
        ({"MPI_LOCALNRANKS": "16"}, (8, 16), 1),  # eight ranks are bound to the same half
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, 2, 2),
        ({"MPI_LOCALNRANKS": "3"}, 8, 2),
        ({"MPI_LOCALNRANKS": "3"}, 2, 1),
        ({"LOCAL_WORLD_SIZE": "1"}, 64, threads.MOST),
        ({"MPI_LOCALNRANKS": "1", "LOCAL_WORLD_SIZE": "8"}, 8, 1),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}, 6, 3),
        ({"SPARSECOLL_THREADS": "6"}, 2, 6),
    ],
)
def test_how_many_threads(variables, cores, expected, monkeypatch, tmp_path):
    for name in (*threads.LOCAL_RANKS, threads.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    own, launcher = cores if isinstance(cores, tuple) else (cores, cores)
    monkeypatch.setattr(threads, "cores", lambda process=0: launcher if process else own)
    assert threads.allowed.__wrapped__() == expected


def test_a_wrong_number_is_refused(monkeypatch):
    monkeypatch.setenv("SPARSECOLL_THREADS", "0")
    with pytest.raises(ValueError, match="SPARSECOLL_THREADS: expected an integer of at least 1, got '0'"):
        threads.allowed.__wrapped__()


def test_the_limit_of_a_container(monkeypatch, tmp_path):
    monkeypatch.setattr(threads, "QUOTA", tmp_path / "cpu.max")
    unlimited = threads.cores()
    for text, expected in (("max 100000", unlimited), ("150000 100000", 1), ("", unlimited)):
        (tmp_path / "cpu.max").write_text(text)
        assert threads.cores() == expected
