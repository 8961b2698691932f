"""Collective calls as the adapter makes them: with which options, on which communicator, in which order."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch

from sparsecoll.errors import check_integer
from sparsecoll.transport import LocalTransport, Transport, as_transport, check_timeout, launcher
from sparsecoll.transport.all_ranks import allgather
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.progress import completed_future


@dataclass
class Options:
    """The keyword arguments of DistributedOptimizer, of which the others have the last two.

    `verify` becomes a number of steps, where 0 stands for never.

    Raises:
        ValueError, TypeError: An option is invalid.
    """

    bucket_bytes: int | None = 25 << 20
    dense_below: int = 1024
    overlap: bool = True
    gradient_as_bucket_view: bool = False
    verify: bool | int = 0
    timeout: float | None = None

    def __post_init__(self) -> None:
        if self.bucket_bytes is not None:
            check_integer("bucket_bytes", self.bucket_bytes, 1)
        check_integer("dense_below", self.dense_below, 0)
        for name in ("overlap", "gradient_as_bucket_view"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}: expected True or False, got {getattr(self, name)!r}")
        if isinstance(self.verify, bool):
            self.verify = 100 * self.verify
        check_integer("verify", self.verify, 0)
        check_timeout(self.timeout)


P = ParamSpec("P")
T = TypeVar("T")


def communicator(comm: Any, timeout: Any = None) -> Transport:
    """Return the transport of a communicator; None stands for what `sparsecoll.transport.default_comm` returns.

    Raises:
        RuntimeError: It has one rank, and a launcher has started several processes: each of them would train on its
            own. `comm` is not MPI.COMM_SELF.
    """
    if isinstance(comm, LocalTransport):
        launcher.refuse_one_rank()
    return as_transport(comm, timeout)


def collective(
    transport: Transport,
    name: str,
    timeout: float | None,
    function: Callable[[CollectiveCall], T],
    phase: str = "",
    failed: Exception | None = None,
) -> T:
    """Call a function within a CollectiveCall, after the nonblocking calls that were made before it.

    The phase is that of its traffic, "" for none. What has `failed` is raised on all ranks in place of the call.
    """

    def call() -> T:
        with (
            CollectiveCall(transport, name, timeout, failed) as call,
            transport.phase(phase) if phase else nullcontext(),
        ):
            return function(call)

    return transport.in_order(call)


@contextmanager
def agreed(transport: Transport, timeout: float | None) -> Iterator[None]:
    """Context manager for work around the calls of a collective method: what it raises on one rank is raised on all.

    The other ranks raise it in the call that they make now or, if they have finished the method, in their next one.
    """
    try:
        yield
    except Exception as error:
        if not getattr(error, "on_all_ranks", False):
            collective(transport, "after an exception", timeout, lambda _: None, failed=error)
        raise


def agreeing(path: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator of a collective method: what it raises is raised in the context manager that `path()` returns.

    Args:
        path: attributes that lead from the object to a function, such as "replica.agreed".
    """
    context = operator.attrgetter(path)

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return method(*args, **kwargs)
            except Exception:
                with context(args[0])():
                    raise

        return call

    return decorate


def mean_of_loss(transport: Transport, loss: Any, timeout: float | None) -> Any:
    """Return the mean of a loss over the ranks, with the same bits on all of them, in its type. Collective."""
    own = float(loss.detach() if torch.is_tensor(loss) else loss)

    def gather(_: CollectiveCall) -> list[float]:
        numbers: list[float] = allgather(transport, np.array([own], np.float64)).ravel().tolist()
        transport.waitall()
        return numbers

    numbers = collective(transport, "mean", timeout, gather)
    mean = (math.fsum if all(map(math.isfinite, numbers)) else sum)(numbers) / len(numbers)
    return torch.full_like(loss.detach(), mean) if torch.is_tensor(loss) else mean


def mean_loss(transport: Transport, closure: Callable[[], Any], timeout: float | None) -> Any:
    """Evaluate a closure on every rank; return the mean of the losses, in the type of the loss. Collective."""
    with torch.enable_grad():
        loss = completed_future(closure)

    def mean(_: CollectiveCall) -> Any:
        return mean_of_loss(transport, 0.0 if loss.result() is None else loss.result(), timeout)

    value = collective(transport, "closure", timeout, mean)
    return None if loss.result() is None else value
