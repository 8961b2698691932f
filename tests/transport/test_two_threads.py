"""Two threads that make calls on one communicator at the same time: an error on all ranks instead of mixed sums."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from failing import Held
from socket_ranks import run, together

import sparsecoll
from sparsecoll import CommunicationError, SparseVector
from sparsecoll.telemetry import trace
from sparsecoll.transport import LocalTransport
from sparsecoll.transport.progress import in_background

WHY = "two threads made calls at the same time"


SECOND = {
    "allreduce": lambda transport, x: sparsecoll.allreduce(transport, x),
    "bcast": lambda transport, x: sparsecoll.bcast(transport, x),
    "allreduce_init": lambda transport, x: sparsecoll.allreduce_init(transport, x),
    "first iallreduce": lambda transport, x: sparsecoll.iallreduce(transport, x),
}


@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("before", ["", "iallreduce"])
def test_all_ranks_raise(second, before):
    """Rank 0's first thread is in a call when its second one makes another."""
    if before and second == "first iallreduce":
        pytest.skip("there is a worker already, which takes calls of any thread in turn")

    def program(transport):
        x = SparseVector([transport.rank], np.ones(1), 9)
        if before:
            sparsecoll.iallreduce(transport, x).wait()
        held, texts = Held(), []
        if transport.rank:
            held.goes_on.set()
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(sparsecoll.allreduce, transport, x, held)
            if transport.rank == 0:
                assert held.begun.wait(60)
                with pytest.raises(CommunicationError, match=WHY) as raised:
                    SECOND[second](transport, x)
                texts.append(str(raised.value))
                held.goes_on.set()
            with pytest.raises(CommunicationError, match=WHY) as raised:
                first.result(60)
                sparsecoll.allreduce(transport, x)
            texts.append(str(raised.value))
        return texts

    outcomes = run(3, program)
    assert [len(texts) for texts in outcomes] == [2, 1, 1], outcomes


def test_one_rank_raises_too():
    transport, held, x = LocalTransport(), Held(), SparseVector([1], np.ones(1), 9)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(sparsecoll.allreduce, transport, x, held)
        assert held.begun.wait(60)
        with pytest.raises(CommunicationError, match=WHY):
            sparsecoll.allreduce(transport, x)
        held.goes_on.set()
        assert first.result(60).nnz == 1


def test_threads_that_take_turns_are_served():
    """One after the other, blocking or not, in a call of another and while nonblocking calls are under way."""

    def program(transport):
        x, sums = SparseVector([transport.rank], np.ones(1), 9), []
        for turn in range(4):
            with ThreadPoolExecutor(1) as pool:
                if turn == 2:
                    pending = pool.submit(sparsecoll.iallreduce, transport, x).result(60)
                sums.append(pool.submit(sparsecoll.allreduce, transport, x).result(60).nnz)
            sums.append(sparsecoll.allreduce(transport, x).nnz)
        transport.in_order(lambda: sums.append(sparsecoll.allreduce(transport, x).nnz))
        return [*sums, pending.wait(60).nnz]

    assert run(3, program) == [[3] * 10] * 3


def test_a_rank_that_waits_is_told_of_another_one_after_its_own_threads_have_met():
    wait_for_all = together(2)

    def program(transport):
        x, held = SparseVector([transport.rank], np.ones(1), 9), Held()
        if transport.rank == 0:
            held.goes_on.set()
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(sparsecoll.allreduce, transport, x, held)
            assert held.begun.wait(60)
            time.sleep(0.2)  # rank 0 waits for rank 1's message
            with pytest.raises(CommunicationError, match=f"{WHY} on rank {transport.rank}"):
                sparsecoll.allreduce(transport, x)
            wait_for_all()
            held.goes_on.set()
            with pytest.raises(CommunicationError, match=WHY):
                first.result(60)

    assert run(2, program) == [None, None]


def interrupted(submit, wait):
    """`submit` of a worker, for a call whose caller is interrupted after wait()."""

    def submitted(call):
        future = submit(call)
        result = future.result

        def stop(*given):
            wait()
            future.result = result
            raise KeyboardInterrupt

        future.result = stop
        return future

    return submitted


def test_a_blocking_call_in_the_worker_that_is_interrupted_is_no_silent_one(monkeypatch):
    """As by a signal handler that raises, while the worker of nonblocking calls makes the call."""

    def program(transport):
        x = SparseVector([transport.rank], np.ones(1), 9)
        sparsecoll.iallreduce(transport, x).wait()
        held = Held()
        if transport.rank:
            held.goes_on.set()
        else:
            submit = transport.worker.submit
            transport.worker.submit = interrupted(submit, lambda: held.begun.wait(60))
            with pytest.raises(KeyboardInterrupt):
                sparsecoll.allreduce(transport, x, held)
            transport.worker.submit = submit
            held.goes_on.set()
        with pytest.raises(CommunicationError) as raised:
            sparsecoll.allreduce(transport, x, held)
            sparsecoll.allreduce(transport, x)
        return str(raised.value)

    texts = run(2, program)
    assert all("a call was interrupted on rank 0: KeyboardInterrupt" in text for text in texts), texts


def test_a_call_in_the_worker_that_is_interrupted_ends_although_another_rank_does_not_come():
    """So do later calls, which come after it, and `close`."""
    over = threading.Event()

    def program(transport):
        x = SparseVector([transport.rank], np.ones(1), 9)
        sparsecoll.iallreduce(transport, x).wait()
        if transport.rank:
            assert over.wait(60)
            return
        submit = transport.worker.submit
        transport.worker.submit = interrupted(submit, lambda: time.sleep(0.2))  # the call waits for rank 1
        with pytest.raises(KeyboardInterrupt):
            sparsecoll.allreduce(transport, x)
        transport.worker.submit, start = submit, time.monotonic()
        with pytest.raises(CommunicationError, match="a call was interrupted on rank 0: KeyboardInterrupt"):
            sparsecoll.allreduce(transport, x)
        transport.close()
        assert time.monotonic() < start + 30
        over.set()

    assert run(2, program) == [None, None]


def test_the_worker_reports_to_the_listener_of_the_thread_that_waits():
    def work():
        with trace.span("select", 1):
            time.sleep(0.01)

    transport = LocalTransport()
    in_background(transport, work).result()
    with trace.record(trace.Recorder()) as recorder:
        transport.in_order(work)
    assert recorder.seconds["select"] >= 0.01
