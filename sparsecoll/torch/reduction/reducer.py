"""A reduction: the gradients of a back-propagation become their means over the ranks, on all ranks or on none.

Gradients are taken into buckets, which the progress thread reduces on trial. Then one round of all ranks tells whether
all went well everywhere, and only then gradients become means. docs/architecture.md has a table of their states.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping

from sparsecoll.errors import NonFiniteError
from sparsecoll.torch.compressors import Compressor
from sparsecoll.torch.reduction.bucket import Bucket, NewGrads
from sparsecoll.torch.reduction.buckets import Buckets
from sparsecoll.torch.reduction.grad_scaler import Scaling
from sparsecoll.torch.reduction.gradients import Means, State
from sparsecoll.torch.reduction.hooks import is_shared
from sparsecoll.torch.reduction.sender import Sender
from sparsecoll.torch.reduction.steps import Steps
from sparsecoll.torch.replica.guards import fingerprint
from sparsecoll.torch.replica.replica import Replica
from sparsecoll.torch.replica.rounds import CHANGED, MEMBERS, NOTHING, Round, Row

logger = logging.getLogger(__name__)


class Reducer:
    """Reduces the gradients of a replica's parameters, as often as they are reduced before a step.

    Attributes:
        seconds: of this rank by kind of work (see `telemetry.trace`), and "exposed": waited for in `reduce`.
        steps: tells what has become of the means.
        gradients: the state of the gradients.
        nonfinite: what the next step raises while they are NaN.
    """

    def __init__(self, replica: Replica, compressor: Compressor, scaling: Scaling) -> None:
        self._replica = replica
        self.buckets = Buckets(compressor, replica)
        self.steps = Steps(self.buckets, replica, lambda: replica.params, "DistributedOptimizer")
        self.gradients = self.steps.gradients
        self.nonfinite: NonFiniteError | None = None
        self._scaling = scaling
        self._sender = Sender(replica, self.buckets, scaling, compressor)
        self.seconds = self._sender.seconds
        self._means = Means(replica.params)
        self._early = replica.options.overlap  # whether buckets are sent before back-propagation ends
        self._order: dict[str, None] = {}  # parameters by the order of their gradients, while there are no buckets

    # -- during back-propagation

    @property
    def _is_open(self) -> bool:
        """Whether a reduction has begun with the gradients that have come."""
        return self.gradients.are(State.LOCAL, State.SENDING, State.STALE)

    def _end(self) -> None:
        """Nothing is sent any more."""
        self._sender.begin()
        self._order = {}

    def release(self) -> None:
        """Drop the reduction and the buckets, which are rebuilt in the next one; residuals are kept."""
        self.buckets.release()
        self._end()
        if not self.gradients.are(State.MEANS, State.NAN):
            self.gradients.to(State.EMPTY)

    def rename(self, names: Mapping[str, str]) -> None:
        """Drop the reduction and the buckets, and rename parameters; the state of those that are not named is lost."""
        self.release()
        self._means.rename(names)
        self.buckets.rename(names)

    def accumulating(self, name: str) -> None:
        """Autograd may be about to add to a parameter's gradient; `torch.autograd.grad` does not."""
        self._means.accumulating(name)

    def accumulated(self, name: str) -> None:
        """Autograd has added to a parameter's gradient."""
        self._means.accumulated(name)
        if not self._is_open:
            self._open()
        elif self._means.is_replaced(name):
            self._take_back({name})

    def send(self, name: str, final: bool = True) -> None:
        """Take a gradient into its bucket, which is sent when it is full; the first reduction records the order.

        One that is not `final`, since another hook may change it, is taken when back-propagation has ended.
        """
        if not self.buckets:
            self._order[name] = None
            return
        early = self._early and not self.gradients.are(State.STALE)
        if not early or is_shared(self._replica.transport) or name not in self.buckets.index_of or not final:
            return
        if name in self._sender.taken:  # once more in this back-propagation, or after one that an exception has ended
            self.gradients.to(State.STALE)
            self._send_at_the_end()
        else:
            self.gradients.to(State.SENDING)
            self._sender.take(name)

    def _open(self) -> None:
        """A reduction begins: restore the residuals of gradients thrown away, unless the loop has used them."""
        self.settle()
        self.gradients.to(State.STALE if self.gradients.are(State.DISCARDED) else State.LOCAL)
        changed = self._means.changed()
        if changed is not None:
            self._sender.failed = RuntimeError(
                f"gradient of {changed!r}: expected step() or zero_grad() of the optimizer before the next"
                " back-propagation, got a gradient that was changed in place after it had been reduced"
            )
        self._take_back(self._means.replaced())
        self._scaling.begin()

    def _take_back(self, names: set[str]) -> None:
        """Gradients of these parameters were thrown away after they had been reduced: residuals are as before."""
        if names:
            self.buckets.rollback(None if len(names) == len(self._means) else names)
            self._means.discard(names)

    # -- at its end

    def reduce(self, name: str, regroup: Callable[[], None]) -> Round:
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
        """Context manager: what it raises, all ranks raise, and everything is as before the reduction."""
        try:
            with self._replica.agreed():
                yield
        except Exception as error:
            self._sender.finish()
            self._drop()
            if isinstance(error, NonFiniteError):
                self.gradients.to(State.NAN if self._is_open else State.EMPTY)
                self.nonfinite = error
                self._spread_nan()
            else:
                self.gradients.to(State.EMPTY)
            raise

    def _attempt(self, name: str, regroup: Callable[[], None]) -> Round | None:
        """One reduction of all buckets; None if it has to be made again."""
        if self._is_open:
            self._take_back(self._means.replaced())
        else:
            self._open()
        if not self.buckets:
            self.make_buckets()
        self._scaling.begin()  # unscale_() may have been called since
        self._sender.send_rest()
        if self.gradients.are(State.LOCAL):
            self.gradients.to(State.SENDING)
        replica = self._replica
        row = replica.row(CHANGED * (self.gradients.are(State.STALE) or self._sender.altered))
        digest = None if replica.warmed or replica.transport.size == 1 else fingerprint(replica.params.values())
        outcome, error = self._sender.wait(lambda: self._round(name, row, digest))
        if error is not None:
            raise error
        assert isinstance(outcome, Round)
        changed, learned = outcome.flags & (CHANGED | MEMBERS), self.buckets.learn(outcome.rows, outcome.dense)
        relaid = learned or outcome.trainable != set(self.buckets.index_of)
        if not (changed or relaid or outcome.over):
            replica.broadcast_buffers(outcome)
            self._accept(outcome)
            return outcome
        self._drop()
        self.gradients.to(State.LOCAL)
        if outcome.flags & MEMBERS:
            regroup()
        elif relaid:  # parameters were frozen or unfrozen, or have gradients of another kind
            self.buckets.release()
            self.make_buckets(outcome.trainable)
        return None if changed or relaid else outcome

    def _round(self, name: str, row: Row, digest: int | None) -> Round:
        """Tell all ranks how it went here; `digest` is of this rank's own gradients, in the first reduction."""
        failed = self._sender.failed
        if getattr(failed, "on_all_ranks", False):
            return NOTHING  # all ranks know
        return self._replica.agree(name, row, lambda _: digest, failed)

    def make_buckets(self, trainable: set[str] | None = None) -> None:
        """Lay the parameters out in the order in which rank 0's gradients came. Collective."""
        self.buckets.make(trainable, list(self._order))
        self._sender.laid_out()

    def _drop(self) -> None:
        """Leave everything as it was before the reduction."""
        self.buckets.drop()
        self._end()

    def _spread_nan(self) -> None:
        """Gradients become NaN on all ranks, for code that reads them before the step."""
        for name, index in self.buckets.index_of.items():
            self._replica.params[name].grad = self.buckets[index][0].nan(name)

    def _send_at_the_end(self) -> None:
        """Send gradients when back-propagation has ended, from now on."""
        self._early = False
        logger.warning(
            "rank %d: gradients came more than once before a back-propagation ended (reentrant checkpointing does so;"
            " use_reentrant=False does not): they are sent at its end from now on",
            self._replica.transport.rank,
        )

    def _accept(self, outcome: Round) -> None:
        """The reduction is good on all ranks: gradients become means, all of them or none."""
        made = []
        for bucket, compressor in self.buckets:
            bucket.layout.device.wait_stream()
            names = [
                n for n, p in bucket.params.items() if n in outcome.used or (p.requires_grad and bucket.has_mean(n))
            ]
            made.append((bucket, bucket.new_grads(names, self._scaling.of(compressor))))
        try:
            self._assign(made)
        except Exception:
            self._assign(made)
            raise

    def _assign(self, made: list[tuple[Bucket, NewGrads]]) -> None:
        """Set all gradients; the same again does no harm."""
        self._replica.warmed = True
        self._means.clear()
        self._end()
        for bucket, gradients in made:
            bucket.accept()  # nothing refers to gradients any more
            bucket.assign_grads(gradients)
            for name in gradients:
                self._means.add(name)
        self.steps.accept({name: self._replica.params[name] for name in self._means})

    # -- a step, or none

    def restore_missing(self) -> None:
        """Means that were set to None count as thrown away."""
        self._take_back({name for name in self._means if self._replica.params[name].grad is None})

    def settle(self) -> bool:
        """Commit if the loop has updated parameters; return whether it has."""
        updated = self.steps.updated()
        if updated:
            self.commit(by_hand=True)
        return updated

    def commit(self, by_hand: bool = False) -> None:
        """A step was taken, see `Steps.commit`."""
        self.steps.commit(by_hand)
        self._means.clear()

    def discard(self) -> None:
        """Gradients are about to be thrown away: residuals are as they were after the last step."""
        self._order, self.nonfinite = {}, None
        self.steps.rollback()
        self._means.clear()

    def loaded(self) -> None:
        """The buckets' state was loaded: make them as they were when it was saved. Collective."""
        self._means.clear()
        self._end()
        self.gradients.to(State.EMPTY)
        if self.buckets.order:
            self.make_buckets(set(self.buckets.order))
