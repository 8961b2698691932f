"""Nonblocking calls complete in order and raise at `wait` or `await` (over MPI: mpi/test_progress.py)."""

import asyncio
import inspect
import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest
from cases import case, same_bits
from launching import python
from socket_ranks import run

import sparsecoll
from sparsecoll import Request, SparseVector, simulate
from sparsecoll.collectives import nonblocking
from sparsecoll.transport import LocalTransport

NAMES = [name for name in sparsecoll.__all__ if name[0] == "i" and name[1:] in sparsecoll.__all__]


def test_requests_give_what_allreduce_gives():
    def program(comm):
        x = case("random", comm.rank, 3)
        request = sparsecoll.iallreduce(comm, x, "oktopk", k=20)
        return request.wait(), request.test(), sparsecoll.allreduce(comm, x, "oktopk", k=20)

    assert all(same_bits(y, z) and done for y, done, z in simulate(3, program).results)


def test_blocking_calls_follow_the_nonblocking_ones_before_them():
    comm, order = LocalTransport(), []

    class Noting(sparsecoll.Allgather):
        def select(self, x, k, ranks=1):
            order.append(k)
            return super().select(x, k, ranks)

    x = SparseVector(np.arange(9), np.ones(9), 9)
    requests = [sparsecoll.iallreduce(comm, x, Noting(), k=k) for k in range(5)]
    sparsecoll.allreduce(comm, x, Noting(), k=5)
    assert [request.wait().nnz for request in requests] == list(range(5)) and order == list(range(6))


def test_a_rank_on_which_no_thread_can_be_started_makes_its_calls_at_once(monkeypatch):
    start, crowded = threading.Thread.start, set()

    def refused(thread):
        if threading.get_ident() in crowded:
            raise RuntimeError("can't start new thread")
        start(thread)

    def program(transport):
        if transport.rank:
            crowded.add(threading.get_ident())
        x = SparseVector([transport.rank], np.ones(1), 9)
        requests = [sparsecoll.iallreduce(transport, x) for _ in range(3)]
        return [request.wait().nnz for request in requests], transport.worker is None

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert run(2, program) == [([2, 2, 2], False), ([2, 2, 2], True)]


def test_errors_come_at_wait():
    request = sparsecoll.iallreduce(LocalTransport(), ([3, 1], np.ones(2), 9))
    with pytest.raises(ValueError, match="strictly ascending"):
        request.wait()


def test_every_collective_has_a_nonblocking_one_with_its_arguments():
    modules = {name: getattr(getattr(sparsecoll, name), "__module__", "") for name in sparsecoll.__all__}
    public = {name for name, module in modules.items() if module.startswith("sparsecoll.collectives.")}
    blocking = public - set(NAMES) - {"as_vector", "like", "Comm", "Plan", "allreduce_init"}
    assert {name[1:] for name in NAMES} == blocking
    for name in NAMES:
        start, call = getattr(sparsecoll, name), getattr(sparsecoll, name[1:])
        assert start.__name__ == name and start.__doc__.startswith(f"Start `sparsecoll.{name[1:]}` in")
        assert list(inspect.signature(start).parameters) == list(inspect.signature(call).parameters)
        assert getattr(nonblocking, name) is start


@pytest.mark.parametrize("name", NAMES)
def test_results_are_those_of_the_blocking_call(name):
    def program(comm):
        x = case("random", comm.rank, 3)
        given = {"ialltoall": [x] * 3, "ialltoallv": {1: x}, "iscatter": [x] * 3}.get(name, x)
        request = getattr(sparsecoll, name)(comm=comm, x=given, timeout=30)
        return request.wait(), getattr(sparsecoll, name[1:])(comm, given)

    for y, z in simulate(3, program).results:
        for a, b in zip(
            *([part] if not isinstance(part, (list, dict)) else list(part) for part in (y, z)), strict=True
        ):
            assert a is b is None or a == b


class Slow(sparsecoll.Allgather):
    """Takes a while, or until an event, or fails."""

    until = None

    def select(self, x, k, ranks=1):
        time.sleep(0.1)
        assert self.until is None or self.until.wait(60)
        if k == 7:
            raise ValueError("no")
        return super().select(x, k, ranks)


def held(event):
    made = Slow()
    made.until = event
    return made


X = SparseVector(np.arange(9), np.ones(9), 9)


def test_waitall_returns_all_results_or_raises_the_first_exception_after_all_have_finished():
    comm, goes_on = LocalTransport(), threading.Event()
    requests = [sparsecoll.iallreduce(comm, X, held(goes_on), k=k) for k in (3, 7, 5)]
    with pytest.raises(sparsecoll.CommunicationError, match=r"3 of 3 calls have not finished within 0\.01 s"):
        Request.waitall(requests, timeout=0.01)
    goes_on.set()
    with pytest.raises(ValueError, match="no"):
        Request.waitall(iter(requests))
    assert all(request.test() for request in requests)
    assert [y.nnz for y in Request.waitall(requests[::2])] == [3, 5] and Request.waitall([]) == []


def test_requests_cannot_be_cancelled():
    request = sparsecoll.iallreduce(LocalTransport(), X, Slow(), k=3)
    with pytest.raises(sparsecoll.CommunicationError, match="cannot be cancelled"):
        request.cancel()
    assert request.wait().nnz == 3


def test_await_does_not_block_the_loop():
    comm, ticks, goes_on = LocalTransport(), [], threading.Event()

    async def tick():
        while True:
            ticks.append(None)
            await asyncio.sleep(0.005)

    async def main():
        ticker = asyncio.create_task(tick())
        results = await asyncio.gather(*(sparsecoll.iallreduce(comm, X, Slow(), k=k) for k in (3, 4)))
        with pytest.raises(ValueError, match="no"):
            await sparsecoll.iallreduce(comm, X, Slow(), k=7)
        request = sparsecoll.iallreduce(comm, X, held(goes_on), k=5)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(request, 0.01)
        assert not request.test()  # it goes on
        goes_on.set()
        ticker.cancel()
        return [y.nnz for y in results], (await request).nnz, (await request).nnz

    assert asyncio.run(main()) == ([3, 4], 5, 5)
    assert len(ticks) > 5


def test_a_request_outlives_the_loop_in_which_it_was_awaited():
    async def main():
        request = sparsecoll.iallreduce(LocalTransport(), X, Slow(), k=5)
        waiting = asyncio.create_task(asyncio.wait_for(request, 5))
        await asyncio.sleep(0)
        waiting.cancel()
        return request

    assert asyncio.run(main()).wait().nnz == 5


def test_waitall_takes_nothing_but_requests():
    with pytest.raises(TypeError, match="requests: expected Requests of sparsecoll, got NoneType at position 1"):
        Request.waitall([sparsecoll.iallreduce(LocalTransport(), {0: 1}), None])


def test_handlers_of_atexit_make_calls_at_once():
    """The thread of nonblocking calls has ended by then."""
    program = """
import atexit
from sparsecoll.transport import LocalTransport
from sparsecoll.transport.progress import Worker
worker, alone = Worker(), LocalTransport()
atexit.register(lambda: print(worker.in_order(lambda: "blocking", alone), worker.submit(lambda: "in order").result()))
worker.submit(lambda: print("queued"))
"""
    result = python("-c", program, timeout=60, check=True)
    assert result.stdout.split("\n")[:2] == ["queued", "blocking in order"]


def test_a_call_that_ends_as_the_time_to_wait_is_over_gives_its_result():
    """It raised TimeoutError, as if that were the call's own exception."""

    class Late(Future):
        def result(self, timeout=None):
            if timeout is not None:
                self.set_result("the result")
                raise TimeoutError
            return super().result()

    assert Request(Late()).wait(1e-6) == "the result"
