"""The means of LocalOptimizer where workers come and go: rounds of an ElasticGroup in place of a collective call."""

from __future__ import annotations

import io
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from typing import Any

import torch

from sparsecoll.errors import CommunicationError, NonFiniteError
from sparsecoll.kernels.memory import asarray_like, to_host
from sparsecoll.torch.reduction.bucket import Bucket
from sparsecoll.torch.reduction.means import Means, Trial, check_mean, shares_of
from sparsecoll.torch.reduction.rounds import Contribution, ElasticGroup, Missed
from sparsecoll.torch.reduction.state import LOCAL
from sparsecoll.torch.reduction.window import may_move
from sparsecoll.torch.replica.calls import LATE, Outcome
from sparsecoll.torch.tensors.model import Named, are_equal, is_finite
from sparsecoll.transport.all_ranks import joined, separated

logger = logging.getLogger(__name__)
MANY = 4  # the turn with which rounds that had this worker too late are worth a warning
BEHIND = LATE << 8  # a flag: the messages of a mean are gone, among which was this worker's


def plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an optimizer's group: numbers, pairs of them, and switches."""
    own = {k: [number(one) for one in v] if isinstance(v, tuple) and v else [number(v)] for k, v in group.items()}
    kept = {k: v for k, v in own.items() if all(isinstance(one, (bool, int, float)) for one in v)}
    return {k: tuple(v) if isinstance(group[k], tuple) else v[0] for k, v in kept.items()}


def number(value: Any) -> Any:
    """Return an array or tensor of one number as Python's."""
    return value.item() if math.prod(getattr(value, "shape", (0,))) == 1 else value


def dumped(what: dict[str, Any]) -> bytes:
    """Return the bytes of a file of torch.save."""
    file = io.BytesIO()
    torch.save(what, file)
    return file.getvalue()


class ElasticMeans(Means):
    """Means over the workers of an ElasticGroup; each is the only rank of its communicator.

    Args:
        group: of the workers.
        signature: options and parameters, the same for all workers.
    """

    def __init__(self, group: ElasticGroup, signature: dict[str, Any], *given: Any) -> None:
        super().__init__(*given)
        self._group, self._signature = group, json.dumps(signature, default=str)
        self._options: dict[int, Any] = {}  # of the outer optimizers, by the number of a mean that is under way
        self._waits = 0  # turns since this worker's changes were in a mean
        self._joined: int | None = None  # the round at which this worker has begun with no state of the inner optimizer

    @torch.inference_mode(False)
    @torch.no_grad()
    def regroup(self, params: Named | None = None) -> None:
        if self._params:
            raise RuntimeError("param_groups: expected the same ones in all rounds of an ElasticGroup, got others")
        super().regroup(params)
        if (state := self._group.enter(self._signature)) is not None:
            self._load_shared(state)
            for name, p in self._params.items():
                p.copy_(self._shared[name])
            self._joined = None if self._optimizer.state else self._group.number
            self._catch_up()
        else:
            self._group.publish(0, self._saved, 0)
        self._group.in_use = True

    def _saved(self) -> bytes:
        """Return the shared parameters and the state of the outer optimizers."""
        return dumped({"shared": self._shared, "outer": self._outer.state_dict()})

    def _first(self) -> bytes:
        """Return the state with which all begin, with parameters that are frozen here as they have been loaded."""
        for name, p in self._params.items():
            if not may_move(p) and name not in self._moved:
                self._shared[name].copy_(p.detach())
        return self._saved()

    def _own_state(self) -> bytes:
        """Return this worker's state of the inner optimizer, as far as it consists of tensors and numbers."""
        states = {name: self._optimizer.state.get(p, {}) for name, p in self._params.items()}
        plain = torch.Tensor | int | float | None
        return dumped({name: own for name, own in states.items() if all(isinstance(t, plain) for t in own.values())})

    def _borrow(self, state: bytes) -> None:
        """Take another worker's state of the inner optimizer, where this worker's has the same entries."""
        self._joined = None
        for name, other in torch.load(io.BytesIO(state), map_location="cpu", weights_only=True).items():
            p, own = self._params[name], self._optimizer.state.get(self._params[name], {})
            if own.keys() == other.keys():  # numbers of steps, too, may be on the device of p
                places = {key: getattr(t, "device", p.device) for key, t in own.items()}
                own |= {k: t.to(places[k]) if isinstance(t, torch.Tensor) else t for k, t in other.items()}

    def _load_shared(self, state: bytes) -> None:
        saved = torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
        for name, t in saved["shared"].items():
            self._shared[name].copy_(t)
        self._outer.load_state_dict(saved["outer"])
        self.replica.context.step = self._group.number

    def finish(self, leaves: bool = False, goes_on: Callable[[], bool] = lambda: True) -> None:
        self.mean()
        if leaves:
            self._group.leave()

    @torch.inference_mode(False)
    @torch.no_grad()
    def turn(self, flags: int = 0) -> Outcome:
        while self._under_way and self._group.is_closed(self._next + 1):  # it would always come too late
            self._take()
        self._catch_up(1)
        self._waits += 1
        if self._waits == MANY + self._pace.under_way:
            logger.warning(
                "worker %r of an ElasticGroup has come too late to %d rounds in a row: its changes are in no mean: give"
                " it fewer steps (every=), or all workers a longer deadline than %s s",
                *(self._group.name, MANY - 1, self._group.deadline),
            )
        return super().turn(flags)

    @torch.inference_mode(False)
    @torch.no_grad()
    def mean(self) -> None:
        while self._under_way:
            self._take()
        for _ in range(self._pace.fragments):
            self._catch_up(1)
            self._begin(self._pace.fragment(self._next), 0)
            self._take()

    @torch.inference_mode(False)
    @torch.no_grad()
    def begin_step(self) -> None:
        if not self._under_way and self._group.has_sent(self._next):  # but for an interrupt it would be over
            self._catch_up()
        super().begin_step()

    def _catch_up(self, last: int = 0) -> None:
        """Take the means of rounds that are over, or the newest state; what this worker has changed stays.

        With `last`, so many are left, which `exchange` finds closed.
        """
        while not self._under_way and self._group.is_closed(self._next + last):
            self._begin(self._pace.fragment(self._next), 0)
            self._take()

    def _share(self, names: list[str]) -> None:
        super()._share(names)
        if self._group.restart(self.replica.context.step, self._first):
            return
        self._load_shared(self._group.newest())  # another worker may have loaded the same values
        own = self._params
        if names := [name for name in names if not are_equal(self._shared[name].to(own[name].device), own[name])]:
            raise CommunicationError(
                f"parameter {names[0]!r}: expected its value after the last mean, got another: load the model before"
                " the optimizer, and both before the first round of the ElasticGroup; discard() goes on with the"
                " others' values"
            )

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], load: Callable[[], Any]) -> None:
        """Load a state. The group begins with it, unless a round is over: then what is this worker's own counts."""
        super().load_state_dict(state, load)
        before = state.get(LOCAL, {}).get("before", {})
        for name in self._params.keys() - self._moved:
            self._shared[name].copy_(before.get(name, self._params[name].detach()))
        self._joined, self._loaded, self._group.last = None, {}, ""
        if not self._group.restart(self.replica.context.step, self._saved):
            self._follow_newest()
            self._catch_up()

    def state_dict(self) -> dict[str, Any]:
        state, shared = super().state_dict(), self._shared
        frozen = {name: p for name, p in self._params.items() if not may_move(p) and name not in self._moved}
        changed = [name for name, p in frozen.items() if not are_equal(shared[name].to(p.device), p)]
        state[LOCAL]["before"] = {name: shared[name].clone() for name in changed}  # that this worker has changed itself
        return state

    @torch.no_grad()
    def start_anew(self, name: str, root: int, everything: bool = False) -> None:
        for n, p in self._params.items():
            if may_move(p):
                p.copy_(self._shared[n])
        self._group.last = ""
        super().start_anew(name, root, everything)

    def _follow_newest(self) -> None:
        """Begin with the newest state; what this worker has changed stays."""
        before = {name: t.clone() for name, t in self._shared.items()}
        self._load_shared(self._group.newest())
        self._follow(before)

    def _make_buckets(self, flags: int) -> None:
        self._buckets.order = []  # of a loaded state, which others may not have
        # those that are frozen may not be so elsewhere, or later
        self._buckets.make({name for name, p in self._params.items() if p.is_floating_point()})

    def _form(self, trial: Trial) -> Outcome:
        number, buckets, _, weight, failed, take, _ = trial
        self.replica.context.step = number
        if failed is not None:
            raise failed
        own = []
        for bucket, compressor in buckets:
            with bucket.layout.device.stream_context():
                take(bucket, compressor)
                if not is_finite(bucket.gradient_buffer().tensor):  # all would raise in each attempt
                    self._check_finite(bucket.layout.names)
                    raise NonFiniteError("change of parameters: expected a finite one, got an overflow")
                sent, block = bucket.message(compressor, self.replica.transport)
                own.append((sent, block, to_host(block)))
        message = joined([block for *_, block in own])
        options = [plain(group) for group in self._outer.groups]
        try:
            found, included = self._group.exchange(number, weight, message, options)
            flags = 0 if included else LATE
        except Missed as error:
            if not error.included:
                raise
            found, included = [Contribution(self._group.name, weight, message)], True
            flags = BEHIND  # the newest state has it
        self._options[number] = self._group.options
        parts, shares = [separated(one.message, len(buckets)) for one in found], shares_of([c.weight for c in found])
        for i, (bucket, compressor) in enumerate(buckets):
            compressor.size = len(found)
            with bucket.layout.device.stream_context():
                blocks = [asarray_like(part[i], own[i][1]) for part in parts]
                bucket.combine(compressor, own[i][0] if included else None, blocks, shares)
                bucket.form_mean()
                check_mean(bucket)
                if included and not {c.worker: c.weight for c in found}[self._group.name]:
                    bucket.versions.drop()  # what this worker has sent does not count, now or later
        self.replica.context.step = number + 1
        return Outcome(flags, number, trainable={name for bucket, _ in buckets for name in bucket.layout.names})

    def _names_of(self, bucket: Bucket) -> list[str]:
        return [name for name in bucket.layout.names if bucket.has_mean(name)]  # others may be frozen on all workers

    def _accept(self, bucket: Bucket, flags: int) -> None:
        if flags & LATE:
            bucket.versions.drop()
            bucket.gradient = bucket.source = None
        else:
            self._waits = 0
            super()._accept(bucket, flags)

    def _apply(self, buckets: Sequence[Bucket], alpha: float, flags: int) -> None:
        params = {name: t for bucket in buckets for name, t in bucket.params.items()}
        here = {name for name in params if may_move(self._params[name]) or name in self._moved}
        before = {name: t.clone() for name, t in params.items() if flags & LATE or name not in here}
        own = {name: self._params[name].detach().clone() for name in before}
        if flags & LATE:
            self._move(buckets)
        else:
            super()._apply(buckets, alpha, flags)
        for name, t in own.items():
            self._params[name].copy_(t)
        self._follow(before)

    def _follow(self, before: Named) -> None:
        """Move this worker's parameters as far as the shared ones have moved; what it has changed stays."""
        for name, then in before.items():
            own, shared = self._params[name], self._shared[name]
            if are_equal(own, then.to(own.device)):
                own.copy_(shared)
            else:
                own.add_((shared - then).to(own.device))
                self._moved |= {name} if may_move(own) else set()

    def _taken_with(self, number: int) -> Outcome:
        """Take a mean with the outer optimizers' options of the worker that has closed the round."""
        wait([self._under_way[0].result])
        groups, given = self._outer.groups, self._options.pop(number, None) or ()
        given = [{k: tuple(v) if isinstance(v, list) else v for k, v in options.items()} for options in given]
        before = [dict(group) for group in groups]
        for group, options in zip(groups, given, strict=False):
            group.update(options)
        try:
            return super()._take()
        finally:
            for group, then, options in zip(groups, before, given, strict=False):  # what a step sets, stays
                group.update({k: then[k] for k, value in options.items() if k in then and group[k] == value})

    def close(self) -> None:
        """Leave the group."""
        self.drop()
        self._group.leave()
        self._group.in_use = False

    def _take(self) -> Outcome:
        number = self._under_way[0].number
        try:
            outcome = self._taken_with(number)
        except Missed:
            outcome = Outcome(BEHIND)
        if outcome.flags & BEHIND:
            self.drop()
            self._follow_newest()
            self.steps = 0
            return Outcome(LATE)
        self._group.number = number + 1
        self._group.publish(number + 1, self._saved, 2 * sum(t.nbytes for t in self._shared.values()))
        if self._joined is None:
            self._group.lend(number + 1, self._own_state)
        elif state := self._group.borrow(self._joined):
            self._borrow(state)
        return outcome
