"""What a call with async_op=True returns: of the library's own calls, and of those of torch's backends."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from sparsecoll.torch.tensors.private import untraced

NO_LIMIT = timedelta(0)  # torch's word for it


class Call(Work):
    """A call of the library, under way in the transport's thread.

    Args:
        future: of the call.
        tensors: that the call writes.
    """

    def __init__(self, future: Future[None], tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._future, self._tensors = future, tensors

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Wait for the call to finish; raise its exception, or RuntimeError if it takes longer than `timeout`."""
        try:
            self._future.result(timeout.total_seconds() or None)
        except TimeoutError as error:
            if self._future.done():  # meanwhile, or it has raised this itself
                return self._future.result() is None
            raise RuntimeError(f"wait: the call has not finished within {timeout}; it continues") from error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self._future.done() and self._future.exception() is None

    def exception(self) -> Any:
        return self._future.exception() if self._future.done() else None

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._tensors

    def get_future(self) -> Any:
        """Return a future of torch with the tensors; C++ code finds an exception only if a callback has raised it."""
        done: Any = torch.futures.Future()
        self._future.add_done_callback(lambda _: done.set_result(None))
        return done.then(lambda _: self.result())


class Watched(Work):
    """A call of a backend of torch, whose exception is replaced by one that names the rank that is gone.

    Args:
        work: what the backend has returned.
        named: returns the exception to raise.
    """

    def __init__(self, work: Any, named: Callable[[RuntimeError], Exception]) -> None:
        super().__init__()
        self._work, self._named = work, named

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        try:
            return bool(self._work.wait(timeout))
        except RuntimeError as error:
            if "Operation timed out!" in str(error):  # of torch: the caller's time is over, not the call
                raise
            raise self._named(error) from error

    def get_future(self) -> Any:
        def value(future: Any) -> Any:
            try:
                return future.value()
            except RuntimeError as error:
                raise self._named(error) from error

        return self._work.get_future().then(value)


def _delegate(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self._work, name)(*args)


for _name in ("is_completed", "is_success", "exception", "result", "synchronize", "source_rank"):
    setattr(Watched, _name, _delegate(_name))
for _class in (Call, Watched):
    for _name in [name for name, value in vars(_class).items() if callable(value) and not name.startswith("__")]:
        setattr(_class, _name, untraced(getattr(_class, _name)))
