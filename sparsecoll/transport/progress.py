"""Nonblocking calls: one worker thread per communicator executes calls in FIFO order."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, wait
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

from sparsecoll.errors import CommunicationError
from sparsecoll.kernels.memory import bind_current_stream
from sparsecoll.kernels.threads import Task, serve
from sparsecoll.telemetry.trace import carried
from sparsecoll.transport import process
from sparsecoll.transport.base import Transport
from sparsecoll.transport.waiting import CALL_PARENT, FORKED, out_of_use

T = TypeVar("T")
R = TypeVar("R")


class Request(Generic[T]):
    """A nonblocking call in progress, as `sparsecoll.iallreduce` and the others of that kind return it.

    In a coroutine, `await request` does what `wait` does without blocking asyncio's event loop. A collective cannot be
    cancelled, because other ranks take part in it: if the task that awaits it is cancelled, the call continues.

    Attributes:
        waited_for: whether `wait` has returned the result or raised the exception of the call.
    """

    def __init__(self, future: Future[T], seen: Callable[[], None] = lambda: None) -> None:
        self._future, self._seen = future, seen  # called when the user knows how the call has ended
        self._process, self.waited_for = os.getpid(), False

    def __repr__(self) -> str:
        return f"Request({'finished' if self._future.done() else 'under way'})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("Request cannot be pickled or copied: use the result of wait()")

    def wait(self, timeout: float | None = None) -> T:
        """Wait for the call to finish; return its result or raise its exception.

        Args:
            timeout: seconds to wait; None, the default, for no limit.

        Raises:
            CommunicationError: The call has not finished within `timeout`. It continues, and `wait` may be called
                again. Or this process was forked while the call was under way, and cannot wait for it.
        """
        self._refuse_in_a_fork()
        try:
            return self._future.result(timeout)
        except TimeoutError as error:
            if self._future.done():  # since then, or it is the call's own
                return self._future.result()
            raise CommunicationError(f"the call has not finished within {timeout} s; it continues") from error
        finally:
            self.waited_for = self._future.done()
            if self.waited_for:
                self._seen()

    def test(self) -> bool:
        """Return whether the call has finished, with a result or an exception.

        Raises:
            CommunicationError: This process was forked while the call was under way.
        """
        self._refuse_in_a_fork()
        return self._future.done()

    def _refuse_in_a_fork(self) -> None:
        """Raise in a forked process, which has no thread that could finish the call."""
        if os.getpid() != self._process and not self._future.done():
            raise out_of_use(FORKED, CALL_PARENT)

    def cancel(self) -> None:
        """Raise CommunicationError: a collective that was started cannot be cancelled, as in MPI."""
        raise CommunicationError("cancel: a collective call cannot be cancelled, because other ranks take part in it")

    @staticmethod
    def waitall(requests: Iterable[Request[R]], timeout: float | None = None) -> list[R]:
        """Wait for all calls to finish; return their results in order, or raise the exception of the first that failed.

        Args:
            requests: the requests, of any communicators.
            timeout: seconds to wait; None, the default, for no limit.

        Raises:
            CommunicationError: Some call has not finished within `timeout`. All continue, and they may be waited for
                again. Or this process was forked while a call was under way, and cannot wait for it.
            TypeError: One of `requests` is something else.
        """
        requests = list(requests)
        for position, request in enumerate(requests):
            if not isinstance(request, Request):
                raise TypeError(
                    f"requests: expected Requests of sparsecoll, got {type(request).__name__} at position {position}"
                )
            request._refuse_in_a_fork()
        if pending := wait([request._future for request in requests], timeout).not_done:
            calls = f"{len(pending)} of {len(requests)} calls have"
            raise CommunicationError(f"{calls} not finished within {timeout} s; they continue")
        return [request.wait() for request in requests]

    def __await__(self) -> Generator[Any, None, T]:
        import asyncio

        self._refuse_in_a_fork()
        loop, finished = asyncio.get_running_loop(), asyncio.Event()

        def wake(_: Future[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(finished.set)

        self._future.add_done_callback(wake)
        yield from finished.wait().__await__()
        return self.wait()


class Requests:
    """The calls on a communicator, blocking or not, in the order in which all ranks start them.

    A rank that has finished a call when another one fails in it raises in the next one (see `CollectiveCall`). If that
    is one that the others have started, too, before they saw the exception, they raise in that one as well; otherwise
    their later calls would meet other ones.

    Attributes:
        last: the number of the one under way, or else of the last one.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport, self._started, self._running, self.last = transport, 0, 0, 0
        self._failure = SimpleNamespace(
            numbers=range(0), error=None, seen=False
        )  # what has raised, which the user knows

    def start(self, call: Callable[[], T]) -> Request[T]:
        """Start a call in the background, after earlier ones."""
        number = self._next()
        future = in_background(self._transport, partial(self._execute, number, call))
        return Request(future, partial(self._saw, number))

    def wait_for(self, call: Callable[[], T]) -> T:
        """Execute a blocking call after earlier ones, or at once within one of them."""
        worker = self._transport.worker
        if self._running if worker is None else worker.thread == threading.get_ident():
            return self._transport.in_order(call)
        number = self._next()
        try:
            return self._transport.in_order(partial(self._execute, number, call))
        except Exception:
            self._saw(number)
            raise

    def _next(self) -> int:
        """Return the number of a new call: on no rank is it one of those that have raised if one of these was seen."""
        failure = self._failure
        self._started = max(self._started, failure.numbers.stop - 1 if failure.seen else 0) + 1
        return self._started

    def _execute(self, number: int, call: Callable[[], T]) -> T:
        failure, self.last = self._failure, number
        if number in failure.numbers:
            again = type(failure.error)(*failure.error.args)
            again.on_all_ranks = self._transport.number
            raise again
        before, self._running = self._running, number
        try:
            return call()
        finally:
            self._running = before

    def _saw(self, number: int) -> None:
        failure = self._failure
        failure.seen = failure.seen or number in failure.numbers

    def fail(self, last: int, error: Exception) -> None:
        """Raise an exception in all calls up to number `last`, which another rank is in while this one fails in its."""
        first = self._running or self.last + 1
        if first <= last:
            seen = not self._running and self._started < first  # in a call that is not counted, and blocks
            self._failure = SimpleNamespace(numbers=range(first, last + 1), error=type(error)(*error.args), seen=seen)


def requests_of(transport: Transport) -> Requests:
    """Return the calls on a communicator."""
    if transport.requests is None:
        transport.requests = Requests(transport)
    return transport.requests  # type: ignore[no-any-return]


def in_turn(transport: Transport, call: Callable[[], T]) -> T:
    """Execute a blocking call after earlier nonblocking ones; immediately if it is made within one of them."""
    return requests_of(transport).wait_for(call)


def in_background(transport: Transport, call: Callable[[], T]) -> Future[T]:
    """Execute a call on this transport after all earlier ones, and return its future."""
    if transport.threads and transport.worker is None and not process.ended()[0]:
        transport.worker = transport.in_order(lambda: transport.worker or _new_worker())
    worker: Worker | None = transport.worker
    if worker is None:  # no thread may be started
        return completed_future(lambda: transport.in_order(call))
    if worker.thread == threading.get_ident():  # a callback of a call, which may wait for this one
        return completed_future(call)
    return worker.submit(call)


def _new_worker() -> Worker | None:
    with contextlib.suppress(RuntimeError):  # the system allows no more threads
        return Worker()
    return None


def completed_future(call: Callable[[], T]) -> Future[T]:
    """Execute a call now, on this thread; return a completed future of its result or exception."""
    future: Future[T] = Future()
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)
    return future


class Worker:
    """One thread that executes calls in FIFO order.

    After `close`, calls are executed at once, on the thread of the caller.

    Attributes:
        thread: identifies the thread.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()  # the garbage collector may use it within any function
        self._closed = False
        self._thread = threading.Thread(target=serve, args=(self._tasks,), name="sparsecoll-progress", daemon=True)
        self._thread.start()
        self.thread = self._thread.ident

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queue a call and return its future."""
        future: Future[T] = Future()
        self._tasks.put((bind_current_stream(call), (), future))
        while self._closed and not future.done():  # perhaps the thread has ended before
            self.close()
            serve(self._tasks)
        return future

    def in_order(self, call: Callable[[], T], transport: Transport) -> T:
        """Execute a blocking call of another thread after the queued ones."""
        future = self.submit(carried(call))
        try:
            return future.result()
        except BaseException as error:
            if not future.done() and transport.size > 1:  # of a signal: the call goes on, and tells the other ranks
                transport.broken = transport.broken or f"a call was interrupted on rank {transport.rank}: {error!r}"
            raise

    def close(self, seconds: float | None = None) -> None:
        """Execute the queued calls, then end the thread; wait for that for `seconds`, or without a limit."""
        self._closed = True
        self._tasks.put(None)
        if self.thread != threading.get_ident():
            self._thread.join(seconds)

    def __del__(self) -> None:
        self._tasks.put(None)
