"""From gradients to their means: hooks fill buckets during back-propagation, the progress thread reduces them.

A reduction is all or nothing: every bucket is reduced on trial, then one round of all ranks tells whether all went well
everywhere, and only then gradients become means. What error feedback keeps of it becomes the state of the next step
when the optimizer steps; until then it can be taken back.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from sparsecoll.errors import NonFiniteError
from sparsecoll.torch.backward import at_end_of_backward
from sparsecoll.torch.buckets import Buckets
from sparsecoll.torch.compressors import Compressor
from sparsecoll.torch.device import device_of
from sparsecoll.torch.gradients import LossScale
from sparsecoll.torch.guards import fingerprint, refuse_ddp
from sparsecoll.torch.hooks import Hooks, enlist, is_shared, synchronize_all
from sparsecoll.torch.layout import residual_dtype
from sparsecoll.torch.means import Means
from sparsecoll.torch.options import Options
from sparsecoll.torch.profiler import Profiler
from sparsecoll.torch.replica import Replica
from sparsecoll.torch.replicas import mean_of, mean_of_loss
from sparsecoll.torch.rounds import CHANGED, JOINED, NOTHING, SUSPECT, Round, Row
from sparsecoll.torch.sender import Sender
from sparsecoll.transport import Transport

logger = logging.getLogger(__name__)


class Engine:
    """Reduces the gradients of named parameters; `optimizer` is what steps on them.

    Attributes:
        params: all named parameters; those that want gradients are in buckets.
        seconds: of this rank by kind of work (see `telemetry.trace`), and "exposed": waited for in `synchronize`.
        asked: whether `synchronize` is to be called at the end of the back-propagation that is under way.
    """

    def __init__(
        self,
        transport: Transport,
        compressor: Compressor,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module | None,
        options: Options,
    ) -> None:
        self.transport = transport
        self.closed = False
        self._compressor, self._optimizer, self._options = compressor, optimizer, options
        self._replica = Replica(transport, model, options.verify, options.timeout)
        self.params = self._replica.params
        self._buckets = Buckets(compressor, self._replica.context)
        self._scale = LossScale()
        self._sender = Sender(self._replica, self._buckets, self._scale, compressor, options.timeline)
        self.seconds = self._sender.seconds
        self._hooks = Hooks(self)
        self._means = Means(self.params)
        self._profiler = Profiler(model, self._replica.context, compressor.wants_profile)
        self._guard = None if model is None else model.register_forward_pre_hook(refuse_ddp)
        self._synchronizing = True
        self._joined = False  # whether this rank has no more data
        self._outcome = NOTHING  # of the last reduction
        self._early = options.overlap  # whether buckets are sent before back-propagation ends
        self._unusable: NonFiniteError | None = None  # what the next step raises: gradients that are not finite
        self._end_reduction()
        self.discard()
        self.number = -1

    @property
    def patience(self) -> float | None:
        """The timeout of a call in seconds."""
        return self._replica.patience

    # -- parameters

    def add(self, params: Mapping[str, torch.Tensor]) -> None:
        """More parameters; collective. All ranks must have the same ones; values are taken from rank 0."""
        new = {name: p for name, p in params.items() if name not in self.params}

        def check() -> None:
            taken = set(params) - set(new)
            if taken:
                raise ValueError(f"named_parameters: expected every name once, got {min(taken)!r} again")
            for p in new.values():
                if p.requires_grad:
                    residual_dtype(p.dtype)
                    device_of(p)

        signature = {
            name: getattr(self._options, name) for name in ("bucket_bytes", "dense_below", "overlap", "verify")
        }
        self._replica.introduce(new, {"compressor": self._compressor.describe(), **signature}, check)
        if self.number < 0:
            self.number = enlist(self)
        self._buckets.release()
        self._end_reduction()
        self.params.update(new)
        self._hooks.attach(self.params)
        self._buckets.order = []

    def _add_unknown(self) -> None:
        """Add parameters that were put into the optimizer and are not known here yet. Collective if there are any."""
        known, groups = {id(p) for p in self.params.values()}, self._optimizer.param_groups
        all_params = {f"group{i}.{j}": p for i, group in enumerate(groups) for j, p in enumerate(group["params"])}
        added = {name: p for name, p in all_params.items() if id(p) not in known}
        if added:
            self.add(added)

    def close(self) -> None:
        """Take the hooks off the parameters; nothing is reduced any more."""
        self._hooks.remove()
        self._profiler.close()
        if self._guard is not None:
            self._guard.remove()
        self.closed = True

    def move(self, transport: Transport) -> None:
        """Go on over another communicator, with rank 0's parameters, buffers and optimizer state; collective on it."""
        self.transport = self._replica.transport = transport
        self._buckets.release()
        self._end_reduction()
        self._replica.follow("move", self._optimizer)
        self.number = enlist(self)
        self.discard()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of back-propagations inside only accumulate; they are sent with those of the next one outside."""
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    # -- during back-propagation

    def _end_reduction(self) -> None:
        """Nothing of a reduction is under way."""
        self._sender.begin()
        self._changed = self._again = self._broken_off = self._opened = False

    def accumulated(self, name: str) -> None:
        """A parameter's gradient is complete (on the thread that back-propagates)."""
        if not self._opened:
            self._open(name)
        if self._means.accumulated(name):
            self._take_back({name})
        self._dirty = True
        if not self._synchronizing:
            return
        self._sender.came()
        if self._options.overlap:
            self.asked = True
            at_end_of_backward(self.transport, partial(synchronize_all, self.transport))
        if not self._buckets:
            if name not in self._buckets.order:
                self._buckets.order.append(name)
            return
        wait = not self._early or self._profiler.active or self._broken_off or is_shared(self.transport)
        if wait or name not in self._buckets.index_of:
            return
        if name in self._sender.taken:  # once more in this back-propagation, or after one that was broken off
            self._changed = self._again = True
        else:
            self._sender.take(name)

    def _open(self, first: str = "") -> None:
        """A reduction begins (`first` has a gradient already): take back what was kept of gradients thrown away."""
        self._opened = True
        changed = self._means.changed(first)
        if changed is not None:
            self._sender.failed = RuntimeError(
                f"gradient of {changed!r}: expected step() or zero_grad() of the optimizer before the next"
                " back-propagation, got a gradient that was changed in place after it had been reduced"
            )
        self._take_back(self._means.replaced())
        self._scale.begin(unscaled=not first and self._scale.unscaled)

    def _take_back(self, gone: set[str]) -> None:
        """Gradients of these parameters were thrown away after they had been reduced: residuals are as before."""
        if gone:
            self._buckets.rollback(None if len(gone) == len(self._means) else gone)
            self._means.discard(gone)

    # -- at its end

    def synchronize(self) -> None:
        """Send what was not sent, wait for all, and let gradients be the means. Collective.

        Raises:
            CommunicationError, RuntimeError: the reduction failed on some rank; gradients are as they were. A gradient
                that is not finite raises later, in `before_step`: until then all gradients are NaN.
        """
        self.asked = False
        if self.closed:
            return
        self._add_unknown()
        self._hooks.attach(self.params)
        while (outcome := self._attempt(JOINED * self._joined)) is None:
            pass
        self._outcome = outcome

    def _attempt(self, flags: int) -> Round | None:
        """One reduction of all buckets; None if it has to be made again."""
        if self._opened:
            self._take_back(self._means.replaced())
        else:
            self._open()
        if not self._buckets:
            self._make_buckets()
        self._sender.send_rest()
        flags |= CHANGED * self._changed | SUSPECT * self._replica.suspect
        row = Row.of(self._replica.context.step, flags, [*self.params.values()], self._replica.buffers.changed())
        digest = None if self._replica.warmed or self.transport.size == 1 else fingerprint(self.params.values())
        seconds, outcome, error = self._sender.wait(lambda: self._round(row, digest))
        if error is not None:
            self._drop()
            self._fail(error)
            return NOTHING
        assert isinstance(outcome, Round)
        changed, stale = outcome.flags & CHANGED, outcome.trainable != set(self._buckets.index_of)
        if not (changed or stale or outcome.over):
            self._accept(outcome, seconds)
            return outcome
        if self._again:
            self._send_at_the_end()
        self._drop()
        if stale:  # parameters were frozen or unfrozen
            self._buckets.release()
            self._make_buckets(outcome.trainable)
        return None if changed or stale else outcome

    def _make_buckets(self, trainable: set[str] | None = None) -> None:
        """Lay the parameters out in the order in which rank 0's gradients came. Collective."""
        self._buckets.make(self.transport, self.params, self._replica.patience, self._options, trainable)
        self._sender.laid_out()

    def _drop(self) -> None:
        """Leave everything as it was before the reduction."""
        self._buckets.drop()
        self._end_reduction()
        self._opened = True

    def _fail(self, error: Exception) -> None:
        """Raise what failed; gradients that are not finite are passed on, for whoever looks at them before the step."""
        self._opened = False
        if not isinstance(error, NonFiniteError):
            raise error
        self._unusable, self._reduced, self._dirty = error, True, False
        for p in (self.params[name] for name in self._buckets.index_of):
            p.grad = torch.full_like(p, float("nan"), requires_grad=False)

    def _send_at_the_end(self) -> None:
        """Send gradients when back-propagation has ended, from now on."""
        self._early = False
        logger.warning(
            "rank %d: gradients came more than once before a back-propagation ended (reentrant checkpointing does so;"
            " use_reentrant=False does not): they are sent at its end from now on",
            self.transport.rank,
        )

    def _accept(self, outcome: Round, seconds: list[float]) -> None:
        """The reduction is good on all ranks: gradients become means."""
        self._buckets.keep()
        if not self._replica.warmed:
            self._replica.warmed = True
            for _, compressor in self._buckets:
                compressor.timeout = self._options.timeout
            if self._guard is not None:
                self._guard.remove()
        self._means.clear()
        for name, index in self._buckets.index_of.items():
            bucket, compressor = self._buckets[index]
            if name in outcome.used or (self.params[name].requires_grad and bucket.part_of_mean(name).any()):
                bucket.assign_grad(name, name in outcome.sparse, self._scale.of(compressor))
                self._means.note(name)
        self._replica.share_buffers(outcome)
        self._profiler.note(self.transport, self._sender.last, seconds, self._options.timeout)
        self._end_reduction()
        self._reduced, self._dirty, self._unusable = True, False, None

    def _round(self, row: Row, digest: int | None) -> Round:
        """Tell all ranks how it went here; `digest` is of this rank's own gradients, in the first reduction."""
        failed = self._sender.failed
        if getattr(failed, "on_all_ranks", False):
            return NOTHING  # all ranks know
        name, names = f"end of reduction of optimizer {self.number}", list(self.params)
        return self._replica.agree(name, row, names, lambda _: digest, failed)

    # -- the optimizer's step

    def ensure_means(self) -> None:
        """Make gradients the means. Collective where they are not yet."""
        if not self.closed and (self._dirty or not self._reduced):
            self.asked = True
            synchronize_all(self.transport)

    def before_step(self) -> None:
        """Make sure that gradients are the means. Collective where they are not.

        Raises:
            NonFiniteError: a gradient holds NaN or infinity on some rank; on every rank.
        """
        self.ensure_means()
        if self._unusable is not None:
            error = self._unusable
            self.discard()
            raise error
        self._take_back({name for name in self._means if self.params[name].grad is None})

    def before_scalers_step(self, scaler: Any, found: dict[torch.device, torch.Tensor], unscaled: bool) -> None:
        """A torch.amp.GradScaler is about to look for gradients that are not finite. Collective unless they are means.

        Args:
            scaler: which divides gradients by its scale.
            found: by device, whether it has found such gradients on this rank: on some rank, afterwards.
            unscaled: whether it has divided them already.
        """
        self._scale.scaler = scaler
        if self.closed or (self._reduced and not self._dirty):
            return
        if not unscaled:
            self.ensure_means()
            return
        self._scale.begin(unscaled=True)
        local = float(sum(value.item() for value in found.values()))
        anywhere = mean_of(self.transport, local, self._replica.patience)
        found[torch.device("cpu")] = torch.tensor(float(anywhere > 0))

    def after_step(self) -> None:
        """The optimizer has stepped: what the reductions since the last step have kept is the state of the next one."""
        if self.closed:
            return
        if self._scale.was_unknown:
            for _, compressor in self._buckets:
                compressor.rescale(1 / self._scale.now)
        self._buckets.commit()
        self._means.clear()
        self._opened = self._reduced = self._dirty = self._scale.unscaled = False
        self._profiler.stepped()
        self._replica.context.step += 1
        self._replica.compare_if_due()

    def failed_step(self, error: Exception) -> None:
        """The optimizer has raised on this rank: tell the others, who may have stepped, in their next reduction."""
        self._replica.suspect = True
        logger.error("rank %d: the wrapped optimizer's step failed: %s", self.transport.rank, error)

    def discard(self) -> None:
        """Give this step up: gradients are about to be thrown away, and residuals are as they were before it."""
        if self._sender.begun:
            self._changed = self._broken_off = True  # what was sent is sent again with the next back-propagation
        self._buckets.rollback()
        self._means.clear()
        self._opened = self._reduced = self._dirty = self._scale.unscaled = self.asked = False
        self._unusable = None

    def mean_loss(self, loss: Any) -> Any:
        """The mean of a closure's loss over the ranks, of its own type."""
        given = loss is None or self.closed
        return loss if given else mean_of_loss(self.transport, loss, self._options.timeout)

    def join(self) -> None:
        """Take part in the others' reductions, adding nothing, until no rank has data; then follow the last one."""
        if self.closed:
            return
        self.discard()
        self._joined, self._outcome = True, NOTHING
        try:
            while not self._outcome.over:
                self._buckets.commit()
                for name in self._buckets.index_of:
                    self.params[name].grad = None
                self.asked = True
                synchronize_all(self.transport)
        finally:
            self._joined = False
        self.discard()
        self._replica.follow("join", self._optimizer, self._outcome.furthest)

    # -- saved state

    def state_dict(self) -> dict[str, Any]:
        """See `Buckets.state_dict`; refused while gradients are sent."""
        if self._sender.begun and not self._broken_off:
            raise RuntimeError("state_dict: expected a call after back-propagation, got one while gradients are sent")
        return self._buckets.state_dict(self.transport)

    def load_state_dict(self, state: Mapping[str, Any] | None, load: Callable[[], None]) -> None:
        """See `Buckets.load_state_dict`. Collective."""
        self._buckets.load_state_dict(self.transport, lambda: state, self.params, self._replica.patience, load)
        self._means.clear()
        self._end_reduction()
        self.discard()
        self._replica.suspect = False
        if self._buckets.order:
            self._make_buckets(set(self._buckets.order))
