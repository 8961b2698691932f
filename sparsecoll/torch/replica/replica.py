"""A rank's copy of the model: which parameters it has, and how they are kept the same on all ranks, and compared."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from sparsecoll.errors import CommunicationError
from sparsecoll.torch.compressors import StepContext
from sparsecoll.torch.replica.broadcasts import broadcast_optimizer, broadcast_tensors
from sparsecoll.torch.replica.calls import JOINED, MEMBERS, REPLACED, SUSPECT, Options, Outcome, Row, agreed, collective
from sparsecoll.torch.replica.guards import refuse_renormalized, warn_if_equal
from sparsecoll.torch.tensors.layout import device_of, residual_dtype
from sparsecoll.torch.tensors.model import Buffers, Named, bits_of, check_buffers, check_whole, describe, sparse_weights
from sparsecoll.transport import Transport
from sparsecoll.transport.all_ranks import allgather, barrier
from sparsecoll.transport.call import CollectiveCall

CURE = "(change the model and the optimizer on all ranks, between the same steps)"  # if ranks have other changes
_block = threading.local()  # whether this thread, a rank, is in the block of a join()
Pairs = Iterable[tuple[str, torch.Tensor]]  # names and parameters


@contextlib.contextmanager
def restoring_groups(groups: list[Any], release: Callable[[], None]) -> Iterator[int]:
    """Context manager that yields the number of groups; if it raises, those that were added in it are removed.

    All ranks raise then, and discard the buckets by `release`, which some may have done already.
    """
    count = len(groups)
    try:
        yield count
    except Exception:
        del groups[count:]
        release()
        raise


class Members:
    """The parameters that a wrapper knows, compared with the optimizer's groups and with the model as they are now.

    One in the groups that is not known was added. One that is neither in the groups nor in the model any more was
    removed. One that is still in the model is kept: it is frozen, or another optimizer's.

    Args:
        params: name -> parameter, those that are known; may change.
        others: returns pairs (name, parameter) of the model; None if it is not known: none counts as removed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, params: Named, others: Callable[[], Pairs] | None) -> None:
        self._optimizer, self._params, self._others = optimizer, params, others

    def changed(self) -> bool:
        """Return whether any were added or removed."""
        return not self.stepped().issubset(id(p) for p in self._params.values()) or bool(self.removed())

    def stepped(self) -> set[int]:
        """Return the ids of the parameters that the optimizer steps."""
        return {id(p) for group in self._optimizer.param_groups for p in group["params"]}

    def removed(self) -> list[str]:
        """Return the names of those that were removed."""
        here = self.stepped()
        outside = [name for name, p in self._params.items() if id(p) not in here]
        if self._others is None or not outside:
            return []
        present = {id(p) for _, p in self._others()}
        return [name for name in outside if id(self._params[name]) not in present]

    def added(self, params: Named) -> Named:
        """Return those of `params` that are not known."""
        known = {id(p) for p in self._params.values()}
        return {name: p for name, p in params.items() if id(p) not in known}

    def kept(self) -> dict[str, str]:
        """Return the names of those that are kept, old -> new: group<i>.<j> becomes the model's once that is free."""
        removed = set(self.removed())
        stay = {name: p for name, p in self._params.items() if name not in removed}
        free = {id(p): name for name, p in self._of_model() if name not in stay}
        return {name: free.get(id(p), name) if NUMBERED.fullmatch(name) else name for name, p in stay.items()}

    def named(self, first: int = 0, given: Pairs = ()) -> Named:
        """Return the parameters of the groups from number `first` on by name.

        A name is the first of these: the one that the parameter has already, the one in `given`, the model's unless a
            parameter that stays has it, group<i>.<j>.
        """
        stay = {new: self._params[old] for old, new in self.kept().items()}
        pairs = [*((name, p) for name, p in self._of_model() if name not in stay), *given, *stay.items()]
        names, taken = {id(p): name for name, p in pairs}, {name for name, _ in pairs}
        result: Named = {}
        for i, group in enumerate(self._optimizer.param_groups[first:], first):
            for j, p in enumerate(group["params"]):
                name = names.get(id(p), f"group{i}.{j}")
                while id(p) not in names and name in taken:
                    name += "'"
                if result.setdefault(name, p) is not p:
                    raise ValueError(f"named_parameters: expected every name once, got {name!r} for two parameters")
        return result

    def _of_model(self) -> Pairs:
        return () if self._others is None else self._others()


def changes(added: Collection[str], removed: Collection[str]) -> dict[str, Any]:
    """Return which parameters were added and removed, for ranks to compare; an error shows the cure."""
    return {f"parameters added {CURE}": sorted(added), f"parameters removed {CURE}": sorted(removed)}


def check_added(params: Named, stay: Mapping[str, str]) -> None:
    """Raise unless parameters can be added to those that stay, old name -> new."""
    if taken := params.keys() & set(stay.values()):
        raise ValueError(f"named_parameters: expected every name once, got {min(taken)!r} again")
    for p in params.values():
        if p.requires_grad:
            residual_dtype(p.dtype)
            device_of(p)


T = TypeVar("T")
NUMBERED = re.compile(r"group\d+\.\d+'*")  # names of parameters without another one
CHANGE = "change of parameters, to be made on all ranks between the same steps"  # a call; errors show its name


class Replica:
    """Parameters and buffers of one rank, and the ranks that have the same ones.

    Args:
        model: its buffers are kept the same; None if it is not known.

    Attributes:
        params: by name.
        sparse_weights: ids of the parameters whose modules say that their gradients are sparse.
        context: the number of steps taken, and what else compressors know.
        shared_options: returns options that must be the same on all ranks.
        changed: returns whether parameters were added or removed on this rank.
        warmed: whether a reduction has succeeded.
        equal: whether all ranks have the same values already, so that `introduce` only compares names and shapes.
        suspect: whether this rank's parameters may differ from the others'.
        stopped_at: the number of steps that this rank had taken when it ran out of data; None while it has some.
    """

    def __init__(self, transport: Transport, model: torch.nn.Module | None, options: Options) -> None:
        self.transport, self.options = transport, options
        self.params: Named = {}
        self.buffers, self.sparse_weights = Buffers(model), sparse_weights(model)
        self.context = StepContext()
        self.shared_options: Callable[[], dict[str, Any]] = dict
        self.changed: Callable[[], bool] = lambda: False
        self.compares: Callable[[torch.Tensor], bool] = lambda t: True  # whether one is the same on all ranks
        self.warmed = self.suspect = self.equal = False
        self.stopped_at: int | None = None
        self._model = model

    @property
    def steps(self) -> int:
        """The number of steps that this rank has taken; `context` has that of the ranks that have data."""
        return self.context.step if self.stopped_at is None else self.stopped_at

    def call(self, name: str, function: Callable[[CollectiveCall], T], phase: str = "") -> T:
        """See `collective`."""
        return collective(self.transport, name, self.options.timeout, function, phase)

    def agree(
        self, name: str, row: Row, digest: Callable[[Outcome], int | None], failed: Exception | None = None
    ) -> Outcome:
        """Tell all ranks whether a reduction succeeded here; an exception `failed` on one is raised on all. Collective.

        Args:
            digest: returns that of this rank's own gradients, which are compared in the first step; None: they are not.
        """

        def exchange(_: CollectiveCall) -> Outcome:
            if failed is not None:
                raise failed
            outcome = row.exchange(self.transport)
            if (own := digest(outcome)) is not None:
                warn_if_equal(self.transport, own)
            return outcome

        outcome = self.call(name, exchange, "agree")
        if outcome.members:
            return outcome
        if not outcome.same_options:
            self.call("step", self._disagree)
        if outcome.flags & SUSPECT:
            self.compare()
            self.suspect = False
        return outcome

    def row(self, flags: int, trainable: Sequence[bool] | None = None, steps: int | None = None) -> Row:
        """Return this rank's message at the end of a reduction, with the flags of the replica, too; see `Row`.

        Without `steps`, those that this rank has taken are told.
        """
        modules = self.buffers.changed()
        flags |= JOINED * (self.stopped_at is not None) | SUSPECT * self.suspect | MEMBERS * self.changed()
        flags |= REPLACED * self.buffers.replaced
        checksum = zlib.crc32(json.dumps(self.shared_options()).encode())
        taken, compares = self.steps if steps is None else steps, self.stopped_at is None
        return Row(taken, flags, self.params, modules, trainable, checksum, self.sparse_weights, compares)

    def _disagree(self, call: CollectiveCall) -> None:
        """Raise an error that names the option that differs between ranks."""
        call.signature |= self.shared_options()
        call.agree()

    def _with_model(self, params: Named) -> Named:
        """Return all that is kept the same on all ranks: these parameters, the model's others, and its buffers."""
        known = {id(p) for p in params.values()}
        others = [] if self._model is None else self._model.named_parameters()
        return {**{name: p for name, p in others if id(p) not in known}, **params, **self.buffers.tensors}

    def introduce(self, params: Named, signature: Mapping[str, Any], check: Callable[[], Any] = lambda: None) -> None:
        """Broadcast parameters from rank 0, with all others of the model and the buffers at first. Collective.

        The signature has further values that must be the same on all ranks, and what `check` raises, all ranks raise.
        """
        tensors = params if self.params else self._with_model(params)
        self.sparse_weights = sparse_weights(self._model)

        def introduce(call: CollectiveCall) -> None:
            check_whole(tensors.values())
            check_buffers(self.buffers.tensors)
            refuse_renormalized(self._model if self.transport.size > 1 else None)
            check()
            call.signature |= {**signature, **describe(tensors)}
            call.agree(entries=0)
            if not self.equal:
                broadcast_tensors(self.transport, tensors.values())

        self.call(CHANGE if self.params else "parameters", introduce)
        if not self.params:
            self.buffers.mark()

    def follow(self, name: str, *optimizers: torch.optim.Optimizer, root: int = 0) -> None:
        """Make parameters, buffers, states of optimizers and the number of steps those of rank `root`. Collective."""
        tensors = self._with_model(self.params)

        def follow(call: CollectiveCall) -> None:
            call.signature |= describe(tensors)
            call.agree()
            steps = allgather(self.transport, np.array([self.steps], np.int64))
            broadcast_tensors(self.transport, tensors.values(), root)
            for optimizer in optimizers:
                broadcast_optimizer(self.transport, optimizer, root)
            self.context.step = int(steps[root, 0])

        self.call(name, follow)
        self.buffers.mark()
        self.suspect = False

    @contextlib.contextmanager
    def all_or_none(self, release: Callable[[], None], *dicts: dict[Any, Any]) -> Iterator[Callable[[], None]]:
        """Context manager for a change of parameters that all ranks make, or none: they end it together. Collective.

        Args:
            release: discards the buckets, of which parameters keep their state.
            dicts: become what they were, without buckets, if a rank raises.

        Yields:
            A function to be called before the first change.
        """
        copies: list[dict[Any, Any]] = []

        def begin() -> None:
            release()
            copies.extend(dict(own) for own in dicts)

        try:
            yield begin
            self.call(CHANGE, lambda _: barrier(self.transport))
        except Exception:
            release()
            for own, copy in zip(dicts, copies, strict=False):
                own.clear()
                own.update(copy)
            raise

    def agreed(self) -> contextlib.AbstractContextManager[None]:
        """See `sparsecoll.torch.replica.calls.agreed`."""
        return agreed(self.transport, self.options.timeout)

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Context manager of a join(): an exception that leaves it on one rank is raised in the others' next call."""
        if getattr(_block, "is_open", False):
            raise RuntimeError(
                "join: expected none inside that of another optimizer, got one: a rank that leaves one waits"
                " for those in the other. End such loops on all ranks with the shortest data, without join()"
            )
        _block.is_open = True
        try:
            yield
        except Exception as error:
            traceback = error.__traceback__
            with contextlib.suppress(Exception), self.agreed():
                raise
            error.__traceback__ = traceback
            raise
        finally:
            _block.is_open = False

    @contextlib.contextmanager
    def leaving(self) -> Iterator[None]:
        """Context manager for a rank that has run out of data and takes part in the others' reductions."""
        self.stopped_at = self.context.step
        try:
            with self.agreed():
                yield
        finally:
            self.stopped_at = None

    def follow_step(self, outcome: Outcome) -> None:
        """On a rank that has run out of data: the others step after a reduction, and compressors count their steps."""
        if outcome.step is not None:
            self.context.step = outcome.step + 1

    def broadcast_buffers(self, outcome: Outcome) -> None:
        """Set buffers that a forward pass has changed to those of the lowest rank that has data. Collective."""
        replaced = outcome.flags & REPLACED
        if self.buffers.tensors and not (replaced or outcome.modules):  # of an ElasticGroup: workers keep their own
            self.buffers.mark()
            return
        tensors = list(self.buffers.tensors.values()) if replaced else self.buffers.of(outcome.modules)

        def broadcast(call: CollectiveCall) -> None:
            if replaced:
                check_buffers(self.buffers.tensors)
                call.signature |= describe(self.buffers.tensors, "buffer")
                call.agree(entries=0)
            broadcast_tensors(self.transport, tensors, outcome.root)

        if tensors or replaced:
            self.call("buffers", broadcast)
            self.buffers.mark()

    def compare(self) -> None:
        """Raise on all ranks if bits of parameters or buffers differ between them. Collective.

        Buffers that a forward pass has changed since they were made the same are left out.
        """
        tensors = self._with_model(self.params)
        left_out = self.buffers.tensors.keys() - self.buffers.unchanged()

        def gather(_: CollectiveCall) -> Any:  # 31 bits of each checksum, and whether the tensor is to be compared
            found = {n: n in self.params or (n not in left_out and self.compares(t)) for n, t in tensors.items()}
            marks = [zlib.crc32(bits_of(t)) & ~1 | found[n] for n, t in tensors.items()]
            return allgather(self.transport, np.array(marks, np.uint32))

        rows = self.call("verify", gather, "verify")
        for name, column in zip(tensors, rows.T, strict=True):
            if (column & 1).all() and (column != column[0]).any():
                others = ", ".join(str(rank) for rank, value in enumerate(column.tolist()) if value != column[0])
                raise CommunicationError(
                    f"verify: expected the same bits on all ranks after step {self.context.step}, got others than rank"
                    f" 0's in {name!r} on rank {others}: load the same model on all, or use sparsecoll.torch.broadcast"
                )

    def compare_if_due(self, step: int | None = None) -> None:
        """After a step, or the one with this number: compare where `verify` asks for it. Collective."""
        if self.options.verify and (self.context.step if step is None else step) % self.options.verify == 0:
            self.compare()
