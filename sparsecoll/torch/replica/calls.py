"""Collective calls as the adapter makes them, and the message that ranks exchange at the end of a reduction."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch

from sparsecoll.errors import CommunicationError, check_flag, check_integer, is_known
from sparsecoll.formats import Buffer
from sparsecoll.torch.tensors.layout import has_rows, takes_part
from sparsecoll.torch.tensors.model import Named
from sparsecoll.transport import LocalTransport, Transport, as_transport, check_timeout, launcher
from sparsecoll.transport.all_ranks import NEAR_RANKS, allgather, disseminate
from sparsecoll.transport.call import CollectiveCall


@dataclass
class Options:
    """The keyword arguments of DistributedOptimizer; other wrappers have the last two of them.

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
            check_flag(name, getattr(self, name))
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

    What the function sends is sent when it returns. The phase is that of its traffic, "" for none. An exception
    `failed` is raised on all ranks in place of the call.
    """

    def call() -> T:
        with (
            CollectiveCall(transport, name, timeout, failed) as call,
            transport.phase(phase) if phase else nullcontext(),
        ):
            result = function(call)
            transport.waitall()
            return result

    return transport.in_order(call)


@contextmanager
def agreed(transport: Transport, timeout: float | None) -> Iterator[None]:
    """Context manager around the calls of a collective method: an exception inside is raised on all ranks.

    The other ranks raise it in the call that they make now or, if they have finished the method, in their next one.
    """
    try:
        yield
    except Exception as error:
        if not is_known(error, transport):
            collective(transport, "after an exception", timeout, lambda _: None, failed=error)
        raise


def agreeing(path: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator of a collective method, whose exceptions leave it through the context manager that `path()` returns.

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
    """Return the mean of a loss over the ranks, with the same bits on all of them, in its type. Collective.

    Of None on all ranks, which closures may return, return None; on some, it is an error on all.
    """

    def gather(_: CollectiveCall) -> list[list[float]]:
        if isinstance(loss, (tuple, list, dict)):
            raise TypeError(f"closure: expected one that returns a loss, or None, got a {type(loss).__name__}")
        own = math.nan if loss is None else float(loss.detach() if torch.is_tensor(loss) else loss)
        return allgather(transport, np.array([loss is None, own], np.float64)).T.tolist()  # type: ignore[no-any-return]

    without, numbers = collective(transport, "closure", timeout, gather)
    if all(without):
        return None
    if any(without):
        ranks = [rank for rank, lacks in enumerate(without) if lacks]
        raise ValueError(f"closure: expected a loss from all ranks or from none, got None from ranks {ranks}")
    mean = (math.fsum if all(map(math.isfinite, numbers)) else sum)(numbers) / len(numbers)
    return torch.full_like(loss.detach(), mean) if torch.is_tensor(loss) else mean


# -- the end of a reduction

CHANGED = 1  # a gradient has changed after it was sent: the reduction has to be made again
JOINED = 2  # this rank has run out of data
SUSPECT = 4  # this rank's parameters may differ from the others'
REPLACED = 8  # this rank's model has other buffers than before
LATE = 32  # this worker's changes are not in the mean
MEMBERS = 16  # this rank's optimizer and model have other parameters than before

HEAD = 6  # numbers of a row, of which the maximum over the ranks is formed
LEAST = -(1 << 62)  # in place of those of a rank that has no data


@dataclass
class Outcome:
    """The messages of all ranks combined; the same on every rank.

    Attributes:
        flags: those that are set on any rank.
        step: the number of steps that every rank with data has taken before this one; None if no rank has data.
        most: the largest number of steps that a rank has taken.
        root: the lowest rank that has data, or 0 if none has.
        furthest: the lowest of the ranks that have taken the most steps.
        used, rows, dense, trainable: parameters of which any rank has a gradient, one of rows (or a module that says
            so), a dense one, and that take part.
        modules: by module with buffers, whether any rank has changed them.
        same_options: whether all ranks that have data have the same `checksum`.
    """

    flags: int = 0
    step: int | None = None
    most: int = 0
    root: int = 0
    furthest: int = 0
    used: set[str] = field(default_factory=set)
    rows: set[str] = field(default_factory=set)
    dense: set[str] = field(default_factory=set)
    trainable: set[str] = field(default_factory=set)
    modules: list[bool] = field(default_factory=list)
    same_options: bool = True

    @property
    def members(self) -> bool:
        """Whether a rank's optimizer or model has other parameters than before, which are to be taken in first."""
        return bool(self.flags & MEMBERS)

    @property
    def joined(self) -> bool:
        """Whether a rank has run out of data."""
        return bool(self.flags & JOINED)

    @property
    def over(self) -> bool:
        """Whether no rank has data."""
        return self.joined and self.step is None


NO_OUTCOME = Outcome()


class Row:
    """The message of one rank, of its parameters and their gradients as they are now.

    Args:
        steps: taken by this rank before this one.
        flags: of this rank, below 256.
        params: by name, the same names in the same order on all ranks.
        modules: by module with buffers, whether they have changed.
        trainable: which parameters take part; None, the default: those that want a gradient or have one.
        checksum: of options that must be the same on all ranks, at least 0.
        sparse: ids of the parameters whose modules say that their gradients are sparse.
        compares: whether the checksum is compared, with `trainable`; without, only a rank that has run out of data
            leaves it out.
    """

    def __init__(
        self,
        steps: int,
        flags: int,
        params: Named,
        modules: Sequence[bool] = (),
        trainable: Sequence[bool] | None = None,
        checksum: int = 0,
        sparse: Collection[int] = (),
        compares: bool = True,
    ) -> None:
        here, tensors = not flags & JOINED, list(params.values())
        used = [here and p.grad is not None for p in tensors]
        rows = [has_rows(p.grad) or id(p) in sparse for p in tensors]
        dense = [p.grad is not None and not has_rows(p.grad) for p in tensors]
        taking = [takes_part(p) for p in tensors] if trainable is None else trainable
        self._names, self._steps, self._checksum, self._here = list(params), steps, checksum, here
        self._compares = here if trainable is None else compares
        self._flags = np.array([flags], np.uint8)
        self._bits = np.array([*used, *rows, *dense, *taking, *(here and changed for changed in modules)], np.uint8)

    def exchange(self, transport: Transport) -> Outcome:
        """Combine the rows of all ranks. Collective; called within `collective`.

        Volume: 49 bytes and a bit for each of the marks of parameters and modules, in each of ceil(log2 P) messages; of
        P - 1 at once for up to NEAR_RANKS ranks on several nodes.

        Raises:
            CommunicationError: ranks have taken other numbers of steps.
        """
        size, names, steps, own = transport.size, self._names, self._steps, self._checksum
        above = size - 1 - transport.rank  # greater for lower ranks
        here = [steps, -steps, above] if self._here else [LEAST] * 3
        head = np.array([*here, *([own, -own] if self._compares else [LEAST] * 2), steps * size + above], np.int64)
        row = np.concatenate([head.view(np.uint8), self._flags, np.packbits(self._bits)])
        row = disseminate(transport, row, _combine, direct=size <= NEAR_RANKS and not transport.one_node)
        most, least, root, checksum, other, furthest = row[: head.nbytes].view(np.int64).tolist()
        if most != LEAST and most != -least:
            counts = allgather(transport, np.array([steps if self._here else LEAST]))[:, 0].tolist()
            raise CommunicationError(
                f"steps: expected every rank to take or skip the same ones, got {_counted(counts)}: decide on"
                " all ranks whether to skip a step, by the mean gradients or by a value summed over the ranks"
            )
        marks = np.unpackbits(row[head.nbytes + 1 :], count=self._bits.size).astype(bool)
        *parts, modules = np.split(marks, np.arange(1, 5) * len(names))
        used, rows, dense, trainable = ({names[i] for i in np.flatnonzero(part).tolist()} for part in parts)
        return Outcome(
            flags=int(row[head.nbytes]),
            step=None if most == LEAST else most,
            most=furthest // size,
            root=0 if most == LEAST else size - 1 - root,
            furthest=size - 1 - furthest % size,
            used=used,
            rows=rows,
            dense=dense,
            trainable=trainable,
            modules=modules.tolist(),
            same_options=checksum in (LEAST, -other),
        )


def _combine(row: Buffer, other: Buffer, out: Buffer) -> None:
    """Combine two rows: the maxima of the numbers at their beginning, then the bits that are set in either."""
    split = HEAD * 8
    np.maximum(row[:split].view(np.int64), other[:split].view(np.int64), out=out[:split].view(np.int64))
    np.bitwise_or(row[split:], other[split:], out=out[split:])


def _counted(steps: list[int]) -> str:
    """Return which ranks have taken how many steps, of those that have data."""
    counts = [f"{taken} on rank {rank}" for rank, taken in enumerate(steps) if taken != LEAST]
    return f"{', '.join(counts[:8])}{', ...' if len(counts) > 8 else ''} so far"
