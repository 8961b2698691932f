"""How the changes of a Window are averaged: means begin, are formed on trial, and are taken on all ranks or on none."""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from sparsecoll.errors import NonFiniteError, check_number
from sparsecoll.torch.compressors import Compressor
from sparsecoll.torch.reduction.bucket import Bucket
from sparsecoll.torch.reduction.pace import Mean
from sparsecoll.torch.reduction.shards import mesh_of, raise_on_all
from sparsecoll.torch.reduction.window import Window, may_move
from sparsecoll.torch.replica.calls import JOINED, MEMBERS, Outcome, Row
from sparsecoll.torch.replica.guards import fingerprint
from sparsecoll.torch.tensors.model import is_finite, own_part
from sparsecoll.transport.all_ranks import allgather
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.progress import completed_future, in_background

Pair = tuple[Bucket, Compressor]


class Trial(NamedTuple):
    """What a mean is formed of.

    Attributes:
        number: of the mean.
        buckets: of its parameters.
        row: this rank's message at the end.
        weight: of this rank.
        failed: what all ranks raise; None: nothing.
        take: lets a bucket take the changes, unless it has.
        before: result of the mean before, if that is under way.
    """

    number: int
    buckets: list[Pair]
    row: Row
    weight: float
    failed: Exception | None
    take: Callable[[Bucket, Compressor], None]
    before: Future[Any] | None


UNDER_WAY = 2  # buckets with messages under way; one by one, rounds of 20 M at 100 Mb/s wait 1.3 to 1.6 times as long


class Means(Window):
    """The means of a window.

    A mean is formed on trial, on the progress thread if this rank takes steps meanwhile. In its last message ranks tell
    each other that they have succeeded, and only then the values of the mean before are moved. All ranks begin and take
    means in one order (`Pace.under_way`), whatever their steps, since the taking of one may communicate.

    Attributes:
        after: called after every mean, on all ranks; what it raises on one, the mean raises on all.
    """

    after: Callable[[], None] = staticmethod(lambda: None)

    @property
    def _next(self) -> int:
        """The number of the next mean; the progress thread sets the replica's."""
        return self._number if self._under_way else self.replica.context.step

    def is_due(self) -> bool:
        """Return whether a mean begins or is taken after the next step."""
        return self._may_take(self._taken + 1) or self.steps + 1 >= self._pace.steps_before(self._next)

    def _may_take(self, taken: int) -> bool:
        return len(self._under_way) > self._pace.under_way and taken >= self._under_way[0].due

    @torch.inference_mode(False)
    @torch.no_grad()
    def end_step(self, due: bool) -> None:
        """Called after a step, with what `is_due` has returned before it. Collective if it is due."""
        self.steps, self._taken = self.steps + 1, self._taken + 1
        while due and self._may_take(self._taken):
            self._take()
        if due and self.steps >= self._pace.steps_before(self._next):
            self.turn()

    @torch.inference_mode(False)
    @torch.no_grad()
    def turn(self, flags: int = 0) -> Outcome:
        """Begin the next mean, and take it at once unless it has a delay. Collective.

        Args:
            flags: JOINED if this rank has no more data: it takes all means but those that are under way on others.

        Raises:
            NonFiniteError: a parameter is NaN or infinite on some rank; nothing has changed.
            CommunicationError: some rank failed; nothing has changed.
        """
        pace, outcome = self._pace, Outcome()
        while len(self._under_way) > pace.under_way:
            self._take()
        self._begin(pace.fragment(self._next), flags, pace.delay)
        while len(self._under_way) > pace.under_way and (flags & JOINED or not pace.delay):
            outcome = self._take()
        return outcome

    @torch.inference_mode(False)
    @torch.no_grad()
    def mean(self) -> None:
        """Take the means that are under way, then one of all parameters. Collective; raises as `turn`."""
        while self._under_way:
            self._take()
        self._begin(None, 0)
        self._take()

    def finish(self, leaves: bool = False, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Take part in the others' means until all ranks do only this; all parameters are then the same. Collective.

        Args:
            leaves: whether this rank takes no more steps, which an ElasticGroup wants to know.
            goes_on: returns whether more means follow, the same on all ranks.
        """
        while goes_on() and not self.turn(JOINED).over:
            pass
        if goes_on() and self._streams:
            self.mean()

    def _begin(self, fragment: int | None, flags: int, delay: int = 0) -> None:
        """Begin a mean, on the progress thread if it may take some steps."""
        self._check_loaded()
        if not self.steps:
            self._start()
        if not len(self._buckets):
            with self._all_or_none():
                made = completed_future(partial(self._make_buckets, flags))
                raise_on_all(made.exception(), mesh_of(self._params.values()))
        replica, number, weight, failed = self.replica, self._next, 1.0, self._refused
        ours = {name for name in self._params if fragment is None or self._fragments[name] == fragment}
        moved, buckets = self._moved & ours, [pair for pair in self._buckets if pair[0].layout.names[0] in ours]
        suspect, replica.suspect = replica.suspect, replica.suspect and not delay  # values change meanwhile
        row = replica.row(flags, [name in moved for name in self._shared], number)
        replica.suspect = suspect

        def take(bucket: Bucket, compressor: Compressor) -> None:
            if bucket.gradient is None:
                if not compressor.sends_at_once:
                    self._check_finite(moved.intersection(bucket.layout.names))
                bucket.take_changes(self._own, moved)

        try:
            if failed is None:
                given = 1.0 if self._pace.weight is None else float(self._pace.weight())
                weight = check_number("weight", given, "[0, inf)", f" on rank {replica.transport.rank}")
                for pair in buckets if delay else ():
                    take(*pair)
        except Exception as error:
            failed = error

        before = self._under_way[-1].result if self._under_way else None
        form = partial(self._form, Trial(number, buckets, row, weight, failed, take, before))
        try:
            result = in_background(replica.transport, form) if delay else completed_future(form)
        except BaseException:  # an interrupt: the next attempt takes the changes anew
            replica.context.step = number
            for bucket, _ in buckets:
                bucket.drop()
            raise
        due, steps = self._taken + delay, self.steps
        self._under_way.append(Mean(number, fragment, buckets, flags, steps, due, delay > 0, result))
        self._number, self.steps = number + 1, 0

    def _form(self, trial: Trial) -> Outcome:
        """Form a mean on trial; return what the ranks have told each other. Collective."""
        replica, (number, buckets, row, weight, failed, take, before) = self.replica, trial
        if before is not None and before.done() and before.exception():
            before.result()  # which raises: other ranks are in another call
        replica.context.step, scale = number // self._pace.fragments, 1.0  # means of this fragment
        if self._pace.weight is not None:
            weights = replica.call(self._name, lambda _: allgather(replica.transport, np.array([weight])))
            scale = shares_of(weights.reshape(-1).tolist())[replica.transport.rank]
        for at_once, pairs in itertools.groupby(buckets if failed is None else (), lambda pair: pair[1].sends_at_once):
            for part in [list(pairs)] if at_once else [[pair] for pair in pairs]:
                self._reduce(part, take, scale)
        outcome = replica.agree(self._name, row, lambda _: None, failed)
        replica.context.step = number + 1
        return outcome

    def _make_buckets(self, flags: int) -> None:
        """Make the buckets of all parameters that have moved on a rank. Collective."""
        replica, outcome = self.replica, Outcome(MEMBERS)

        def digest(outcome: Outcome) -> int | None:
            return fingerprint(self._own.values()) if not outcome.most and replica.transport.size > 1 else None

        while outcome.members:
            row = replica.row(flags, [name in self._moved for name in self._shared])
            outcome = replica.agree(self._name, row, digest, self._refused)
            if outcome.members:
                self.regroup()
        if outcome.trainable:
            self._buckets.make(outcome.trainable)

    def _check_finite(self, names: Collection[str]) -> None:
        for name in (name for name in self._params if name in names):
            if not is_finite(own_part(self._params[name])):
                raise NonFiniteError(
                    f"change of parameter {name!r}: expected finite values, got NaN or infinity: call discard() on all"
                    " ranks to give up the steps since the last mean"
                )

    def _reduce(self, pairs: list[Pair], take: Callable[[Bucket, Compressor], None], scale: float) -> None:
        """Average scale * the changes of buckets on trial, while messages of others are under way. Collective."""
        transport, sent = self.replica.transport, collections.deque[tuple[Pair, Any, Any]]()

        def send(pair: Pair) -> None:
            try:
                message, block = pair[0].message(pair[1], transport)
            except NonFiniteError:
                self._check_finite(pair[0].layout.names)
                raise
            for step in range(1, transport.size):
                transport.isend((transport.rank - step) % transport.size, block)
            sent.append((pair, message, block))

        def receive() -> None:
            (bucket, compressor), message, block = sent.popleft()
            with bucket.layout.device.stream_context():
                blocks = [block if r == transport.rank else transport.recv(r) for r in range(transport.size)]
                bucket.combine(compressor, message, blocks)
                if self._outer.rate(bucket.params.values()) is None:
                    bucket.form_mean()

        def reduce(call: CollectiveCall) -> None:
            if pairs[0][1].sends_at_once:
                lengths = [bucket.layout.length for bucket, _ in pairs]
                call.signature |= {"compressor": pairs[0][1].describe(), "lengths": lengths}
                call.agree()
            for bucket, compressor in pairs:
                with bucket.layout.device.stream_context():
                    take(bucket, compressor)
                    if scale != 1.0:
                        bucket.gradient_buffer().tensor.mul_(scale)
                    if compressor.sends_at_once:
                        send((bucket, compressor))
                    else:
                        changed = None if compressor.keeps_zeros else bucket.nonzero(bucket.gradient_buffer().tensor)
                        bucket.reduce(transport, compressor)
                        for part in () if changed is None else bucket.leave_out(transport, changed):
                            bucket.mean.tensor[part].zero_()  # type: ignore[union-attr]
                        check_mean(bucket)
                if len(sent) > UNDER_WAY:
                    receive()
            while sent:
                receive()

        self.replica.call(self._name, reduce, "gather" if pairs[0][1].sends_at_once else "")

    def _take(self) -> Outcome:
        """Wait for the oldest mean that is under way, and take it, on all ranks or on none. Collective."""
        mean = self._under_way[0]
        with self._all_or_none():
            raise_on_all(mean.result.exception(), mesh_of(self._params.values()))
            outcome: Outcome = mean.result.result()
            names = {name for bucket, _ in mean.buckets for name in bucket.layout.names}
            if outcome.members or (outcome.trainable and outcome.trainable != names):
                return self._take_again(mean, outcome)
            self._last = self._last | outcome.trainable
            counts = bool(outcome.trainable) and not (outcome.over and self._streams)  # of all parameters instead
            if counts:
                for bucket, _ in mean.buckets:
                    self._accept(bucket, outcome.flags)
                alpha = self._pace.alpha if mean.delayed else 0.0
                self._apply([bucket for bucket, _ in mean.buckets], alpha, outcome.flags)
            else:
                self._drop(mean)
                self.steps += mean.steps if outcome.over else 0
            if outcome.over:
                outcome.modules = [True] * len(outcome.modules)  # which ranks without data do not tell
            if not mean.delayed:
                self.replica.broadcast_buffers(outcome)
        del self._under_way[0]
        if counts:
            self.replica.compare_if_due(mean.number + 1)
            self.after()
        elif not self._under_way and (mean.fragment is None or outcome.over):  # a frozen fragment has had its turn
            self.replica.context.step = mean.number
        return outcome

    @contextlib.contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Context manager: ranks may fail at different points: the next mean compares, and makes buckets again."""
        try:
            yield
        except Exception:
            self.drop()
            self.replica.suspect = True
            self._buckets.release()
            raise

    def _take_again(self, mean: Mean, outcome: Outcome) -> Outcome:
        """Form a mean once more, because parameters take part that its buckets lack, or others do not. Collective."""
        steps = self.steps + sum(later.steps for later in self._under_way[1:])
        self.drop()
        if outcome.members:
            self.regroup()
        else:
            fragment = mean.fragment
            others = {n for n in self._buckets.index_of if fragment is not None and self._fragments[n] != fragment}
            self._buckets.release()
            self._buckets.make(outcome.trainable | others)
        self._begin(mean.fragment, mean.flags)
        self.steps = steps
        return self._take()

    def _names_of(self, bucket: Bucket) -> Sequence[str]:
        """Return the names of the parameters that a mean moves."""
        return bucket.layout.names

    def _accept(self, bucket: Bucket, flags: int) -> None:
        """Accept the mean of a bucket."""
        bucket.accept()
        bucket.versions.commit()

    def _move(self, buckets: Sequence[Bucket]) -> None:
        """Move the shared parameters of buckets by their means, one after the other if that needs less memory."""
        for part in [[bucket] for bucket in buckets] if self._outer.keeps_nothing_in_common else [buckets]:
            self._move_at_once(part)

    def _move_at_once(self, buckets: Sequence[Bucket]) -> None:
        rest = []
        for bucket in buckets:
            rate = self._outer.rate(bucket.params.values())
            with bucket.layout.device.stream_context():
                if rate is None or not bucket.add_mean(-rate):
                    bucket.form_mean()
                    rest.append(bucket)
        if not rest:
            return
        for own in self._outer.optimizers:
            own.zero_grad()  # what an earlier failure has left
        for bucket in rest:
            bucket.assign_grads(bucket.new_grads(self._names_of(bucket)))
        for own in self._outer.optimizers:
            own.step()
        for bucket in rest:
            for shared in bucket.params.values():
                shared.grad = None

    def _apply(self, buckets: Sequence[Bucket], alpha: float, flags: int) -> None:
        """Move the parameters of buckets by their means."""
        self._move(buckets)
        for name, shared in (pair for bucket in buckets for pair in bucket.params.items()):
            p, own = self._params[name], own_part(self._params[name])
            if alpha and may_move(p):
                own.lerp_(shared.to(own.device), 1 - alpha)
                self._moved.add(name)
            else:
                own.copy_(shared)
                self._moved.discard(name)


def shares_of(weights: Sequence[float]) -> list[float]:
    """Return weights in units of their mean; zeros if all are 0."""
    parts = [weight / (max(weights) or 1.0) for weight in weights]
    return [part / (math.fsum(parts) / len(parts) or 1.0) for part in parts]


def check_mean(bucket: Bucket) -> None:
    """Raise unless all means are finite."""
    if not bucket.mean_is_finite():
        name = next(n for n in bucket.layout.names if not bucket.part_of_mean(n).isfinite().all())
        raise NonFiniteError(f"change of parameter {name!r}: expected a finite mean, got an overflow")
