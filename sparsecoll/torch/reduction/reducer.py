"""A reduction: the gradients of a back-propagation become their means over the ranks, on all ranks or on none.

Gradients are copied into buckets as autograd completes them, and the progress thread reduces one bucket after the other
on trial. Then the ranks tell each other whether all have succeeded, and only then gradients become means.
`steps.State` and `steps.TRANSITIONS` are their states.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import numpy as np
import torch

from sparsecoll.errors import NonFiniteError, is_known
from sparsecoll.telemetry import trace
from sparsecoll.torch.compressors import Compressor
from sparsecoll.torch.reduction.bucket import Bucket, NewGrads
from sparsecoll.torch.reduction.buckets import Buckets
from sparsecoll.torch.reduction.grad_scaler import Scaling
from sparsecoll.torch.reduction.hooks import MeanGradients, Owner, is_alike
from sparsecoll.torch.reduction.steps import State, Steps
from sparsecoll.torch.replica.calls import CHANGED, MEMBERS, NO_OUTCOME, Outcome, Row
from sparsecoll.torch.replica.guards import fingerprint
from sparsecoll.torch.replica.replica import Replica
from sparsecoll.torch.tensors.model import Seen
from sparsecoll.transport.all_ranks import allgather
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.progress import in_background

logger = logging.getLogger(__name__)


class Reducer(Owner):
    """Reduces the gradients of a replica's parameters, as often as they are reduced before a step; Engine says when.

    Args:
        compressor: of the parameters that are not small; if it refuses NaN and infinity, small ones refuse them, too.
        scaling: the scale of gradients.

    Attributes:
        seconds: of this rank by kind of work (see `telemetry.trace`), and "exposed": waited for in `reduce`.
        params: all named parameters; those that want gradients are in buckets.
        steps: tells whether a step was taken with the means.
        gradients: the state of the gradients.
        means: the parameters whose gradients are means.
        nonfinite: what the next step raises while they are NaN.
    """

    def __init__(self, replica: Replica, compressor: Compressor, scaling: Scaling) -> None:
        self.replica, self.params, self._scaling = replica, replica.params, scaling
        replica.compares = partial(is_alike, weakref.ref(self))
        self.buckets = Buckets(compressor, replica)
        self.steps = Steps(self.buckets, replica, lambda: replica.params, "DistributedOptimizer")
        self.gradients = self.steps.gradients
        self.nonfinite: NonFiniteError | None = None
        self.seconds = dict.fromkeys((*trace.KINDS, "exposed"), 0.0)
        self._finite = not compressor.passes_nonfinite
        self.means = MeanGradients(replica.params)
        self._early = replica.options.overlap  # whether buckets are sent before back-propagation ends
        self._threads = torch.get_num_threads()
        self._end()

    def _end(self) -> None:
        """No reduction is under way."""
        self._order: dict[str, None] = {}  # parameters by the order of their gradients, while there are no buckets
        self._copied: list[tuple[torch.Tensor, Seen]] = []  # parameters whose gradients back-propagation has copied
        self._jobs: list[Future[None]] = []  # of buckets, in their order, which is the same on all ranks
        self._invalid: Exception | None = None  # why these gradients cannot be reduced
        self._await_all()

    def _await_all(self) -> None:
        """Wait for the gradients of all parameters, in buckets that are new or empty."""
        self._awaited = [dict.fromkeys(bucket.params) for bucket, _ in self.buckets]  # by bucket

    # -- during back-propagation

    @property
    def _is_open(self) -> bool:
        """Whether a reduction has begun."""
        return self.gradients.are(State.LOCAL, State.SENDING, State.STALE)

    def release(self) -> None:
        """Drop the reduction and the buckets, which are rebuilt in the next one; residuals are kept."""
        self.buckets.release()
        self._end()
        if not self.gradients.are(State.MEANS, State.NAN):
            self.gradients.to(State.EMPTY)

    def send(self, name: str, final: bool = True) -> None:
        """Copy a gradient into its bucket, and queue the buckets that are complete and next in order.

        The first reduction records the order instead. A gradient that is not `final`, since another hook may change it,
        is copied when back-propagation has ended.
        """
        if not self.buckets:
            self._order[name] = None
            return
        early = self._early and final and not self.gradients.are(State.STALE)
        if not early or len(self.replica.transport.sharers) > 1 or name not in self.buckets.index_of:
            return
        index = self.buckets.index_of[name]
        if name not in self._awaited[index]:  # once more in this back-propagation, or after one that has raised
            self.gradients.to(State.STALE)
            self._early = False  # gradients are sent when back-propagation has ended, from now on
            logger.warning(
                "rank %d: gradients were computed more than once before a back-propagation ended (reentrant"
                " checkpointing does so; use_reentrant=False does not): they are sent at its end from now on",
                self.replica.transport.rank,
            )
            return
        self.gradients.to(State.SENDING)
        self._copy(index, name)
        p = self.params[name]
        self._copied.append((p, Seen.of(p)))
        while len(self._jobs) < len(self.buckets) and not self._awaited[len(self._jobs)]:
            self._isend()

    def _open(self) -> None:
        """Begin a reduction: restore the residuals of gradients thrown away, unless the loop has used them."""
        self.commit_if_updated()
        self.gradients.to(State.STALE if self.gradients.are(State.DISCARDED) else State.LOCAL)
        if (changed := self.means.changed()) is not None:
            self._invalid = RuntimeError(
                f"the gradient of {changed!r} was changed in place after it had been reduced: call step() or"
                " zero_grad() of the optimizer before the next back-propagation"
            )
        self._rollback(self.means.replaced())
        if self._scaling.scaler is not None:
            self._scaling.begin()

    def _rollback(self, names: set[str]) -> None:
        """Restore the residuals of parameters whose gradients were thrown away after they had been reduced."""
        if names:
            self.buckets.rollback(None if len(names) == len(self.means) else names)
            self.means.discard(names)

    # -- jobs of the progress thread

    def _scale(self, compressor: Compressor) -> float:
        """Return what gradients are divided by before they are clipped or added to a residual, which is unscaled."""
        return self._scaling.scale if compressor.unscales else 1.0

    def _copy(self, index: int, name: str) -> None:
        bucket, compressor = self.buckets[index]
        bucket.take_grad(name, self._scale(compressor))
        del self._awaited[index][name]

    def _isend(self) -> None:
        bucket, compressor = self.buckets[len(self._jobs)]
        event = bucket.layout.device.record_event()
        self._jobs.append(in_background(self.replica.transport, lambda: self._job(bucket, compressor, event)))

    def _send_rest(self) -> None:
        """Send all buckets that are left after back-propagation; missing gradients count as zeros."""
        for index in range(len(self._jobs), len(self.buckets)):
            for name in [*self._awaited[index]]:
                self._copy(index, name)
            self._isend()

    @property
    def _failed(self) -> Exception | None:
        """The exception by which this reduction fails, as far as this rank knows."""
        errors: Iterator[Any] = (job.exception() for job in self._jobs if job.done())
        return self._invalid or next(filter(None, errors), None)

    def _job(self, bucket: Bucket, compressor: Compressor, event: Any) -> None:
        """Reduce one bucket, whose gradients are complete at `event`, unless the reduction has failed already."""
        if self._failed is not None:
            return
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)  # holds for the thread
        with trace.record(trace.Recorder()) as recorder, bucket.layout.device.stream_context(event):
            bucket.reduce(self.replica.transport, compressor)
            if bucket.layout.small and self._finite and not bucket.mean_is_finite():
                self._refuse(bucket)
        for kind, seconds in recorder.seconds.items():
            self.seconds[kind] += seconds

    def _refuse(self, bucket: Bucket) -> None:
        """Raise the error of the compressor for a NaN in a mean that is not compressed, which all ranks see."""
        transport = self.replica.transport
        for name, p in bucket.params.items():
            if not torch.isfinite(bucket.part_of_mean(name)).all():
                local = p.grad is not None and not torch.isfinite(p.grad).all()
                with CollectiveCall(transport, "gradients", self.replica.options.timeout):
                    if local or transport.size == 1:
                        raise NonFiniteError(f"gradient of {name!r}: expected finite values, got NaN or infinity")
                    rows = allgather(transport, np.zeros(1, np.uint8))  # the rank that has it raises
                    assert rows.size
                raise NonFiniteError(f"gradient of {name!r}: expected a finite sum over the ranks, got an overflow")

    def _wait(self, name: str, row: Row, digest: int | None) -> Outcome:
        """Wait for all buckets, and tell all ranks whether this one succeeded; raise the exception of any of them.

        Args:
            digest: of this rank's own gradients, which are compared in the first reduction.
        """

        def agree() -> Outcome:
            failed = self._failed
            known = failed is not None and is_known(failed, self.replica.transport)
            return NO_OUTCOME if known else self.replica.agree(name, row, lambda _: digest, failed)

        start = time.perf_counter()
        last: Future[Any] = in_background(self.replica.transport, agree)
        wait([*self._jobs, last])
        self.seconds["exposed"] += time.perf_counter() - start
        if last.exception() is None and self._failed is not None:
            raise self._failed
        return last.result()  # type: ignore[no-any-return]

    # -- at the end of back-propagation

    def reduce(self, name: str, regroup: Callable[[], None]) -> Outcome:
        """Send the rest, wait for all, and make gradients the means; raise as `Engine.synchronize`. Collective.

        Args:
            name: of the call at the end.
            regroup: adds and removes parameters as the optimizer and the model have them now; collective.
        """
        with self.failing():
            while (outcome := self._attempt(name, regroup)) is None:
                pass
        return outcome

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Context manager: an exception inside is raised on all ranks, and undoes the reduction."""
        try:
            with self.replica.agreed():
                yield
        except Exception as error:
            wait(self._jobs)
            self._drop()
            if isinstance(error, NonFiniteError):
                self.gradients.to(State.NAN if self._is_open else State.EMPTY)
                self.nonfinite = error
                for name, index in self.buckets.index_of.items():  # for code that reads them before the step
                    self.params[name].grad = self.buckets[index][0].nan(name)
            else:
                self.gradients.to(State.EMPTY)
            raise

    def _attempt(self, name: str, regroup: Callable[[], None]) -> Outcome | None:
        """One reduction of all buckets; None if it has to be made again."""
        if self._is_open:
            self._rollback(self.means.replaced())
        else:
            self._open()
        if not self.buckets:
            self.make_buckets()
        self.steps.settle()
        if self._scaling.scaler is not None:
            self._scaling.begin()  # unscale_() may have been called since
        self._send_rest()
        if self.gradients.are(State.LOCAL):
            self.gradients.to(State.SENDING)
        replica, altered = self.replica, any(seen.has_changed(p) for p, seen in self._copied)
        row = replica.row(CHANGED * (self.gradients.are(State.STALE) or altered))
        digest = None if replica.warmed or replica.transport.size == 1 else fingerprint(replica.params.values())
        outcome = self._wait(name, row, digest)
        changed, learned = outcome.flags & (CHANGED | MEMBERS), self.buckets.learn(outcome.rows, outcome.dense)
        relaid = learned or outcome.trainable != set(self.buckets.index_of)
        if not (changed or relaid or outcome.over):
            replica.broadcast_buffers(outcome)
            self._accept(outcome)
            return outcome
        self._drop()
        self.gradients.to(State.LOCAL)
        if outcome.members:
            regroup()
        elif relaid:  # parameters were frozen or unfrozen, or have gradients of another kind
            self.buckets.release()
            self.make_buckets(outcome.trainable)
        return None if changed or relaid else outcome

    def make_buckets(self, trainable: set[str] | None = None) -> None:
        """Lay the parameters out in the order in which rank 0's gradients were completed. Collective."""
        self.buckets.make(trainable, list(self._order))
        self._await_all()

    def _drop(self) -> None:
        """Restore the state before the reduction."""
        self.buckets.drop()
        self._end()

    def _accept(self, outcome: Outcome) -> None:
        """The reduction is good on all ranks: gradients become means, all of them or none."""
        made, left = [], self.buckets.leave_out(outcome.used)
        for bucket, compressor in self.buckets:
            bucket.layout.device.wait_stream()
            names = [n for n in bucket.params if n in outcome.used or (n not in left and bucket.has_mean(n))]
            made.append((bucket, bucket.new_grads(names, self._scale(compressor))))
        try:
            self._assign(made)
        except Exception:
            self._assign(made)
            raise

    def _assign(self, made: list[tuple[Bucket, NewGrads]]) -> None:
        """Set all gradients; the same again does no harm."""
        self.replica.warmed = True
        self.means.clear()
        self._end()
        for bucket, gradients in made:
            bucket.accept()  # nothing refers to gradients any more
            bucket.assign_grads(gradients)
            for name in gradients:
                self.means.add(name)
        self.steps.accept({name: self.params[name] for name in self.means})

    # -- a step, or none

    def commit_if_updated(self) -> bool:
        """Commit if the loop has updated parameters by itself; return whether it has."""
        if updated := self.steps.updated():
            self.commit(by_hand=True)
        return updated

    def commit(self, by_hand: bool = False) -> None:
        """A step was taken, see `Steps.commit`."""
        self.steps.commit(by_hand)
        self.means.clear()
