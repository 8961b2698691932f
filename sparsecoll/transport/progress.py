"""Nonblocking calls: a thread a communicator that carries them out in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Generic, TypeVar

from sparsecoll.errors import CommunicationError
from sparsecoll.kernels.memory import bind_current_stream
from sparsecoll.transport.base import Transport

T = TypeVar("T")


class Request(Generic[T]):
    """A call under way; `wait` for its result, or `test` whether it is there."""

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def wait(self, timeout: float | None = None) -> T:
        """The result, or whatever the call raised.

        Raises:
            CommunicationError: not finished within `timeout` seconds; the call goes on, and `wait` may be called again.
        """
        try:
            return self._future.result(timeout)
        except FutureTimeout as error:
            if self._future.done():
                raise
            raise CommunicationError(f"request: expected to finish within {timeout} s, is still under way") from error

    def test(self) -> bool:
        """Whether the call has finished, well or badly."""
        return self._future.done()


def in_background(transport: Transport, call: Callable[[], T]) -> Future[T]:
    """Carry out a call on this transport after all calls before it."""
    if not transport.threads:
        future: Future[T] = Future()
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)
        return future
    if transport.worker is None:
        transport.worker = Worker()
    worker: Worker = transport.worker
    return worker.submit(call)


class Worker:
    """One thread that carries out calls in order."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="sparsecoll-progress")
        self._thread = self._pool.submit(threading.get_ident).result()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queue a call."""
        return self._pool.submit(bind_current_stream(call))

    def in_order(self, call: Callable[[], T]) -> T:
        """Carry out a blocking call after those queued; at once if this is a part of one of them."""
        return call() if threading.get_ident() == self._thread else self.submit(call).result()

    def close(self) -> None:
        """End the thread, after what is queued."""
        self._pool.shutdown()
