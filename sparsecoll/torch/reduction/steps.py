"""Whether a step was taken with the means of a reduction: one rule for all adapters.

1. A step was taken with the mean of a parameter if an optimizer has stepped while the parameter had a gradient.
2. A step was taken with all means if a parameter has changed since the reduction, and not in an optimizer's step: the
   loop updates parameters by itself. A change shows in the version of the parameter, in where its values are, or, where
   the loop writes through `p.data`, in a sample of values with a mean that is not zero.
3. Otherwise, the step was skipped if the gradient was thrown away: it is None or zero.
4. Otherwise, gradients add up.

A step makes the residuals permanent; one that is skipped restores them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Set
from enum import Enum, auto
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from sparsecoll.errors import on_all_ranks
from sparsecoll.torch.compressors import Compressor
from sparsecoll.torch.reduction.buckets import Buckets
from sparsecoll.torch.replica.guards import warn_of_adam, warn_of_momentum
from sparsecoll.torch.replica.replica import Replica
from sparsecoll.torch.tensors.model import Named, own_part
from sparsecoll.torch.tensors.private import indices_of, is_stepping, is_trial_step, skipped, values_of, version


class State(Enum):
    """The state of an optimizer's gradients since its last step."""

    EMPTY = auto()  # none has come, the step was taken or skipped, or a reduction failed
    LOCAL = auto()  # they are this rank's own, and in no bucket, or all ranks reduce once more
    SENDING = auto()  # they are in buckets, and complete buckets are queued for the progress thread
    STALE = auto()  # some have come after others were sent; all are sent again when back-propagation has ended
    DISCARDED = auto()  # they were thrown away after they had been sent
    MEANS = auto()  # they are the means over the ranks
    NAN = auto()  # they are NaN on all ranks; the next step raises
    STEPPED = auto()  # an optimizer has stepped with them; of DDP and FSDP alone


TRANSITIONS = {
    State.EMPTY: {State.LOCAL, State.SENDING, State.MEANS},
    State.LOCAL: {State.SENDING, State.NAN, State.EMPTY},
    State.SENDING: {State.STALE, State.DISCARDED, State.MEANS, State.NAN, State.LOCAL, State.EMPTY},
    State.STALE: {State.DISCARDED, State.LOCAL, State.NAN, State.EMPTY},
    State.DISCARDED: {State.STALE, State.EMPTY},
    State.MEANS: {State.LOCAL, State.SENDING, State.STEPPED, State.EMPTY},
    State.NAN: {State.LOCAL, State.EMPTY},
    State.STEPPED: {State.SENDING, State.MEANS, State.EMPTY},
}


class Gradients:
    """The state of the gradients of an optimizer."""

    def __init__(self) -> None:
        self.state = State.EMPTY

    def to(self, state: State) -> None:
        """Enter a state, or stay in it."""
        assert state is self.state or state in TRANSITIONS[self.state], f"{self.state.name} to {state.name}"
        self.state = state

    def throw_away(self) -> None:
        """Record that gradients were thrown away or used; those in buckets are sent again with the next ones."""
        self.to(State.DISCARDED if self.are(State.SENDING, State.STALE, State.DISCARDED) else State.EMPTY)

    def are(self, *states: State) -> bool:
        """Return whether the state is one of these."""
        return self.state in states


SAMPLE = 1024  # values of a parameter, about
KEPT, ZERO, EDITED, GONE = "kept", "zero", "zero, but written to", "thrown away"  # gradients; means were zero, too


class Steps:
    """Whether a step was taken with the means of a reduction, and whether the state in the buckets is kept.

    Args:
        buckets: whose state is committed or rolled back.
        replica: whose steps are counted.
        params: returns the parameters by name.
        owner: of the `discard()` that errors name.
        agree: returns which marks are set on any rank, if ranks see different parts of the parameters.
        in_layout: returns the names that parameters have in the layouts of the buckets.

    Attributes:
        gradients: the state of the gradients.
        unverified: whether a step was taken since parameters were last compared.
        after: called after the first optimizer's step since a reduction.
    """

    def __init__(
        self,
        buckets: Buckets,
        replica: Replica,
        params: Callable[[], Named],
        owner: str,
        agree: Callable[[NDArray[Any]], NDArray[Any]] = lambda marks: marks,
        in_layout: Callable[[set[str]], set[str]] = lambda names: names,
    ) -> None:
        self._buckets, self._replica, self._params, self._owner = buckets, replica, params, owner
        self._agree, self._in_layout = agree, in_layout
        self.gradients, self.unverified = Gradients(), False
        self.after: Callable[[], None] = lambda: None
        self._marks: dict[str, _Mark] = {}  # of the parameters with means
        self._stepped: set[str] = set()  # those that optimizers have stepped
        self._by_hand = False  # whether the last step was the loop's own
        self._inside: Any = None  # whose step() calls a closure
        self._entered = False  # whether the loop had updated parameters by itself when that began
        self._found: tuple[list[str], NDArray[Any]] | None = None  # what all ranks have found out about parameters
        self._doubtful: dict[str, _Mark] = {}  # of parameters that the last step left out
        self._sure: set[str] = set()  # those that had not changed before `passing_over`

    def accept(self, params: Named) -> None:
        """Accept a reduction: gradients of these parameters are its means, and residuals those that it left."""
        self._marks, self._stepped, self._entered = {name: _mark(p) for name, p in params.items()}, set(), False
        self._buckets.accept()
        self.gradients.to(State.MEANS)

    # -- what has become of the means

    @property
    def open(self) -> bool:
        """Whether there are means with which no optimizer has stepped."""
        return self._buckets.pending and not self._stepped

    @property
    def stepping(self) -> bool:
        """Whether an optimizer is stepping."""
        if isinstance(self._inside, torch.optim.Optimizer) and not is_stepping(self._inside):
            self._inside = None  # its step has raised
        return self._inside is not None

    def updated(self) -> bool:
        """Return whether the loop has updated a parameter by itself, as far as this rank sees."""
        if not self._buckets.pending or self.stepping:
            return self._buckets.pending and self._entered
        marks = [mark for name, mark in self._marks.items() if name not in self._stepped]
        return any(mark.is_old() for mark in marks) or any(mark.differs() for mark in marks)

    def commit_or_rollback(self) -> None:
        """Before the next gradient, commit, roll back, or let gradients add up. Collective if ranks `agree`."""
        if not self._buckets.pending:
            return
        left = [name for name in self._marks if name not in self._stepped]
        by_hand, gone = self._inspect(left) if left else (False, set())
        if self._marks.keys() <= gone:
            self.rollback()
        else:
            if gone:
                self._buckets.rollback(self._in_layout(gone))
                self._marks = {name: mark for name, mark in self._marks.items() if name not in gone}
            if by_hand or self._stepped:
                self.commit(by_hand=not self._stepped)
        self._found = None

    def _inspect(self, names: list[str]) -> tuple[bool, set[str]]:
        """Return whether the loop has updated parameters by itself, and, if not, the names of gradients thrown away.

        A zero gradient may be a mean of zero, which was clipped perhaps, or have been cleared, as others were then.
        """
        if self._found is None:  # otherwise what comes after has failed on this rank
            seen = [self._marks[name].of_gradient() for name in names]
            here = [self.updated(), *(found == state for state in (KEPT, EDITED, GONE) for found in seen)]
            self._found = names, self._agree(np.array(here, np.uint8))
        names, marks = self._found
        rows = marks[1:].astype(bool).reshape(3, -1).tolist()
        kept, edited, gone = ({name for name, is_so in zip(names, row, strict=True) if is_so} for row in rows)
        gone = (gone | edited if gone or not kept else gone) - kept
        return bool(marks[0]), set() if marks[0] else gone if kept or not gone else set(names)

    def commit(self, by_hand: bool = False) -> None:
        """Make the accepted states permanent: the optimizer, or the loop itself (`by_hand`), has taken a step."""
        self._buckets.commit()
        if not self.gradients.are(State.STEPPED):
            self._count_step()
        self._by_hand = by_hand
        self.gradients.throw_away()

    def leave_out(self, names: Set[str]) -> None:
        """Called before `commit` with the parameters that the optimizer does not have; another one may step them."""
        self._doubtful, self._sure = {name: self._marks[name] for name in names & self._marks.keys()}, set()
        self._buckets.keep(self._doubtful.keys())

    @property
    def unstepped(self) -> set[str]:
        """Those of the parameters left out by the last step that have not changed."""
        return {name for name, mark in self._doubtful.items() if name in self._sure or not mark.has_changed()}

    def settle(self, names: Iterable[str] | None = None) -> None:
        """Before new gradients of these parameters: a mean that was thrown away without a step leaves no residual."""
        names = set(self._doubtful) if names is None else self._doubtful.keys() & names
        for name in names & self.unstepped if names else ():
            if self._doubtful[name].of_gradient() in (GONE, EDITED):
                self._buckets.revert(name)
        self._doubtful = {name: mark for name, mark in self._doubtful.items() if name not in names}

    def _count_step(self) -> None:
        self._replica.context.step += 1
        self.unverified = True

    def rollback(self) -> None:
        """Undo a step that was skipped: restore the residuals after the last one."""
        self._buckets.rollback()
        self._by_hand = False
        self.gradients.throw_away()

    def discard(self) -> None:
        """Skip the step, unless an optimizer has taken it."""
        if self._stepped:
            self.commit_or_rollback()
        self.rollback()

    # -- optimizers

    def follow_optimizers(self, compressor: Compressor, warns: bool) -> None:
        """Hook the steps of all optimizers; those with these parameters count, and must suit the compressor."""
        with _LOCK:
            _hook_all_steps()
            _FOLLOWING[self] = compressor, weakref.WeakSet() if warns else None

    def enter(self, optimizer: Any, evaluates: bool) -> None:
        """Called when an optimizer begins to step; changes of parameters until `leave` are its own.

        Args:
            evaluates: whether it may reduce gradients meanwhile.
        """
        if self.stepping and self._inside is not optimizer:
            return  # an optimizer that steps another one
        self._inside = None
        self._entered = (evaluates or self._by_hand) and self.updated()
        both = self._by_hand and self._buckets.pending and self._buckets.has_residuals
        if both and self._agree(np.array([self._entered], np.uint8))[0]:
            text = (
                "step: parameters are updated by either optimizers or the loop, not by both: the loop has changed them"
                " after the last reduction, and after the one before, which counted as a step. If that was none (SAM),"
                f" call discard() of {self._owner} after the change, before zero_grad()"
            )
            raise on_all_ranks(RuntimeError(text))
        self._inside = optimizer

    def leave(self, optimizer: Any) -> None:
        """Called when an optimizer has stepped."""
        if self._inside is optimizer:
            self._inside = None

    def of(self, optimizer: torch.optim.Optimizer) -> Named:
        """Return those of the parameters that an optimizer has."""
        ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return {name: p for name, p in self._params().items() if id(p) in ids}

    def stepped(self, params: Named) -> None:
        """Called when an optimizer has stepped these parameters."""
        if self.gradients.are(State.SENDING):
            raise RuntimeError("step after back-propagation, not within it, where residuals are not known yet")
        if not self._buckets.pending:
            return
        self._stepped |= {name for name, p in params.items() if p.grad is not None} & self._marks.keys()
        if not self.gradients.are(State.STEPPED):
            self._count_step()
            self.gradients.to(State.STEPPED)
            self.after()

    def pass_over(self) -> None:
        """Called when parameters were written to, but not by a step."""
        self._marks = {name: _mark(mark.param) for name, mark in self._marks.items()}

    @contextlib.contextmanager
    def passing_over(self) -> Iterator[None]:
        """Context manager in which parameters are written to, but not by a step."""
        self._sure = self.unstepped
        marks = {name: mark for name, mark in self._marks.items() if self._buckets.pending and not mark.has_changed()}
        yield
        self._marks |= {name: _mark(mark.param)._replace(gradient=mark.gradient) for name, mark in marks.items()}


Known = weakref.WeakSet[torch.optim.Optimizer]
_FOLLOWING: weakref.WeakKeyDictionary[Steps, tuple[Compressor, Known | None]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


@functools.cache
def _hook_all_steps() -> None:
    """Hook the steps of all optimizers, once in a process: torch would also call hooks of loops that have ended."""
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _following(optimizer: torch.optim.Optimizer) -> list[tuple[Steps, Named, Compressor, Known | None]]:
    """Return all Steps with parameters of an optimizer, these, their compressor, and the optimizers checked for it."""
    with _LOCK:
        alive = list(_FOLLOWING.items())
    return [(steps, params, *suits) for steps, suits in alive if (params := steps.of(optimizer))]


def _before(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
    """A hook before the steps of all optimizers."""
    for steps, params, compressor, known in _following(optimizer):
        if is_trial_step(optimizer):  # which changes nothing but versions
            steps.commit_or_rollback()
            continue
        if known is not None and optimizer not in known:
            known.add(optimizer)
            warn_of_adam(optimizer, compressor)
            rows = {id(p) for p in params.values() if p.grad is not None and p.grad.is_sparse}
            warn_of_momentum(optimizer, compressor, rows)
        steps.enter(optimizer, len(args) > 1 or bool(options))


def _after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """A hook after the steps of all optimizers."""
    for steps, params, *_suits in _following(optimizer):
        if is_trial_step(optimizer):
            steps.pass_over()
            continue
        steps.leave(optimizer)
        if not skipped(optimizer):
            steps.stepped(params)


class _Mark(NamedTuple):
    """A parameter as it was after a reduction."""

    param: torch.Tensor
    version: int
    address: int  # of its values
    start: int  # of the sample, in its first dimension
    sample: torch.Tensor  # some of the values
    gradient: tuple[int, int] | None  # address and version of its gradient; zeros if it was not zero

    def is_old(self) -> bool:
        """Return whether the version or the address has changed."""
        return version(self.param) != self.version or own_part(self.param).data_ptr() != self.address

    def differs(self) -> bool:
        """Return whether a value of the sample has changed."""
        length = self.sample.shape[0] if self.sample.dim() else 1
        return not torch.equal(_part(own_part(self.param), self.start, length), self.sample)

    def has_changed(self) -> bool:
        """Return whether the parameter has changed, as far as this shows."""
        return self.is_old() or self.differs()

    def of_gradient(self) -> str:
        """Return KEPT, ZERO, EDITED or GONE."""
        if self.param.grad is None:
            return ZERO if self.gradient is None else GONE
        values = values_of(own_part(self.param.grad)).detach()
        first = values.narrow(0, 0, min(1, values.shape[0])) if values.dim() else values
        if first.any() or values.any():
            return KEPT
        changed = EDITED if self.gradient != (0, 0) and _is_searched(self.param.grad) else GONE
        return ZERO if _identity(self.param.grad) == self.gradient else changed


@torch.no_grad()
def _mark(p: torch.Tensor) -> _Mark:
    values = own_part(p)
    mean = None if p.grad is None else own_part(p.grad)
    start, length = _range(values, mean)
    sample = _part(values, start, length).detach().clone()
    known = mean is not None and _is_searched(mean) and bool(_part(mean, start, length).any())
    return _Mark(p, version(p), values.data_ptr(), start, sample, (0, 0) if known else _identity(p.grad))


def _is_searched(mean: torch.Tensor) -> bool:
    return not mean.is_sparse and mean.device.type == "cpu"


def _range(values: torch.Tensor, mean: torch.Tensor | None) -> tuple[int, int]:
    """Return start and length of a part in the first dimension in which the mean is not zero; on a GPU the first."""
    size = values.shape[0] if values.dim() else 1
    start, length = 0, max(1, SAMPLE * size // max(1, values.numel()))
    if mean is not None and mean.is_sparse:
        start = int(indices_of(mean)[0, 0]) if values_of(mean).shape[0] else 0
    elif mean is not None and _is_searched(mean):
        while start + length < size and not mean.narrow(0, start, length).any():
            start, length = start + length, 2 * length
    return start, min(length, size - start)


def _part(values: torch.Tensor, start: int, length: int) -> torch.Tensor:
    return values[start : start + length] if values.dim() else values


def _identity(gradient: torch.Tensor | None) -> tuple[int, int] | None:
    """Return the address and the version of a gradient; None for None."""
    return None if gradient is None else (values_of(own_part(gradient)).data_ptr(), version(gradient))
