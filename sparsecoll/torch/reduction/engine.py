"""When gradients are reduced, and what step(), zero_grad() and join() of DistributedOptimizer do with the means."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from sparsecoll.errors import NonFiniteError
from sparsecoll.torch.compressors import Compressor
from sparsecoll.torch.reduction.grad_scaler import Scaling
from sparsecoll.torch.reduction.hooks import (
    Hooks,
    Owner,
    before_wrapped_step,
    enlist,
    others_of,
    synchronize_all,
    take_over,
)
from sparsecoll.torch.reduction.reducer import Reducer
from sparsecoll.torch.reduction.state import STATE, renamed_state
from sparsecoll.torch.reduction.steps import State
from sparsecoll.torch.replica.calls import NOTHING, Options, agreeing, mean_of_loss
from sparsecoll.torch.replica.guards import NO_MEAN, refuse_ddp, warn_of_adam, warn_of_clipping, warn_of_momentum
from sparsecoll.torch.replica.replica import Members, Replica, changes, check_added
from sparsecoll.torch.tensors.model import Named, Watch, momenta_of, options_of
from sparsecoll.torch.tensors.private import at_end_of_backward
from sparsecoll.transport import Transport

logger = logging.getLogger(__name__)


class Engine(Owner):
    """Reduces the gradients of named parameters; `optimizer` is what steps on them.

    Attributes:
        params: all named parameters; those that want gradients are in buckets.
        members: tells which of them were added to the optimizer, or removed from it and the model.
        seconds: of this rank by kind of work (see `telemetry.trace`), and "exposed": waited for in `synchronize`.
        number: by which ranks know this engine, the same on all of them.
        asked: whether `synchronize` is to be called at the end of the back-propagation that is under way.
    """

    def __init__(
        self,
        transport: Transport,
        compressor: Compressor,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module | None,
        options: Options,
        scaling: Scaling,
    ) -> None:
        self.closed = False
        self._compressor, self._optimizer, self._options = compressor, optimizer, options
        self.replica = Replica(transport, model, options)
        self.params = self.replica.params
        self.members = Members(optimizer, self.params, None if model is None else model.named_parameters)
        self.replica.changed = self.members.changed
        self.replica.context.momenta = partial(momenta_of, optimizer, self.params)
        self.replica.shared_options = partial(options_of, optimizer)
        hooked = None if isinstance(model, torch.jit.ScriptModule) else model  # ScriptModules do not support hooks
        self._scaling, self._reducer = scaling, Reducer(self.replica, compressor, scaling)
        self.seconds = self._reducer.seconds
        self._hooks = Hooks(self, self._reducer.means.accumulating)
        self._guard = None if hooked is None else hooked.register_forward_pre_hook(refuse_ddp)
        if transport.rank == 0:
            warn_of_adam(optimizer, compressor)
            warn_of_momentum(optimizer, compressor, self.replica.sparse_weights)
        has_momentum, watched = getattr(compressor, "momentum", 0.0) != 0, transport.rank == 0 and transport.size > 1
        cure = NO_MEAN if has_momentum else "To clip the mean, call synchronize() first"
        self._watch = Watch("overlap=False", cure) if watched and not options.overlap else None
        self._watches_means = watched and options.overlap and has_momentum and scaling.scaler is None
        self._synchronizing = True
        self.asked = False
        before = getattr(optimizer, "register_step_pre_hook", None)
        self._step_guard = None if before is None else before(partial(before_wrapped_step, weakref.ref(self)))
        self._outcome = NOTHING  # of the last reduction
        self.number = -1

    @property
    def is_stepping(self) -> bool:
        """Whether the wrapped optimizer steps, called by `stepping`."""
        return self._reducer.steps.stepping

    # -- parameters

    @agreeing("replica.agreed")
    def regroup(self, params: Named | None = None) -> None:
        """More parameters, and fewer; collective. All ranks must have the same ones; values are taken from rank 0.

        Args:
            params: name -> parameter: those that are new, and perhaps others; None for those new in the optimizer.
        """
        params = self.members.added(self.members.named()) if params is None else params
        own, others = params, dict[str, Any]()
        try:
            with self.replica.all_or_none(self.release, vars(self._reducer.buckets), self.params) as begin:
                stay, new = self.members.kept(), self.members.added(params)
                compared = ("bucket_bytes", "dense_below", "overlap", "verify")
                signature = {
                    **changes(new if self.params else (), self.params.keys() - stay.keys()),
                    **self._compressor.signature(),
                    **{name: getattr(self._options, name) for name in compared},
                    "grad_scaler": self._scaling.scaler is not None,
                }
                self.replica.introduce(params, signature, lambda: check_added(new, stay))
                if self.number < 0:
                    self.number = enlist(self)
                others, stepped = others_of(self, new), self.members.stepped()
                own = {name: p for name, p in new.items() if name not in others or id(p) in stepped}
                begin()
                self._let_stay(stay)
                self.params.update(own)
                if self.replica.transport.virtual:
                    # Virtual ranks are threads: their back-propagation stays in them. Otherwise autograd executes what
                    # is on a GPU, and so our hooks, in one thread for all ranks, and the first that waits stops others.
                    torch.autograd.set_multithreading_enabled(False)
                self._hooks.attach(self.params)
                if new:
                    self._reducer.buckets.order = []
        except Exception:
            self._hooks.remove(own)
            self._hooks.attach(self.params)
            raise
        take_over(self, others, own)

    def hand_over(self, name: str, p: torch.Tensor, to: Owner) -> None:
        """Leave a parameter to the owner whose optimizer steps it; where both step it, the later one replaces this one.

        That is so when a cell of a notebook is run again.
        """
        if not self.closed and id(p) not in self.members.stepped():
            self.discard()
            self._let_stay({own: own for own, other in self.params.items() if other is not p})
        elif not self.closed and to.replaces:
            self.close(replaced=name)

    def _let_stay(self, names: Mapping[str, str]) -> None:
        """Rename parameters, old name -> new name, and drop the others with their state; buckets are made again."""
        self._hooks.remove({name: p for name, p in self.params.items() if names.get(name) != name})
        self._reducer.rename(names)
        stay = {new: self.params[old] for old, new in names.items()}
        self.params.clear()
        self.params.update(stay)

    def release(self) -> None:
        """Give up the reduction that is under way and the buckets; residuals are kept."""
        self._reducer.release()

    def close(self, replaced: str = "") -> None:
        """Remove the hooks; a further step raises if an optimizer made later updates the parameter `replaced`."""
        self._hooks.remove(self.params)
        for guard in (self._guard, self._step_guard):
            if guard is not None:
                guard.remove()
        self.closed, self.replaced = True, replaced

    @agreeing("replica.agreed")
    def move(self, transport: Transport) -> None:
        """Go on over another communicator, with rank 0's parameters, buffers and optimizer state; collective on it."""
        self.replica.transport = transport
        self._reducer.release()
        self.replica.follow("move", self._optimizer)
        self.replica.warmed = False  # the first reduction compares gradients, as it does on ranks that are new
        self._reducer.steps.pass_over()
        self.number = enlist(self)
        self._reducer.gradients.to(State.EMPTY)  # gradients are reduced again, unless zero_grad() skips the step
        self.asked, self._outcome = False, NOTHING

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of back-propagations inside only accumulate; they are sent with those of the next one outside."""
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    # -- back-propagation

    @agreeing("_reducer.failing")
    def accumulated(self, name: str) -> None:
        """A parameter's gradient is complete (on the thread that back-propagates)."""
        self._reducer.accumulated(name)
        if self._watch is not None:
            self._watch.record(self.params[name])
        if not self._synchronizing:
            return
        if self._options.overlap:
            self.asked = True
            at_end_of_backward(self.replica.transport, partial(synchronize_all, self.replica.transport))
        self._reducer.send(name, self._hooks.comes_last(name))

    @agreeing("_reducer.failing")
    @torch.inference_mode(False)  # in which step() may be called: gradients would have no versions
    def synchronize(self) -> None:
        """Reduce all gradients. Collective.

        Raises:
            CommunicationError, RuntimeError: the reduction failed on some rank; gradients are as they were. A gradient
                that is not finite raises later, in `before_step`: until then all gradients are NaN.
        """
        self.asked = False
        if self.closed:
            return
        if self._watch is not None:
            self._watch.check(self.params.values())
        self._hooks.attach(self.params)
        if not self._outcome.joined:
            self._compare_if_due()
        try:
            name = f"end of reduction of optimizer {self.number}"
            self._outcome = self._reducer.reduce(name, self.regroup)
        except NonFiniteError:
            self._outcome = NOTHING
        if self.replica.warmed and self._guard is not None:
            self._guard.remove()

    # -- the optimizer's step

    @property
    def has_means(self) -> bool:
        """Whether gradients are the means, or are not reduced any more."""
        return self.closed or self._reducer.gradients.are(State.MEANS, State.NAN)

    @agreeing("replica.agreed")
    def ensure_means(self) -> None:
        """Make gradients the means. Collective where they are not yet."""
        self.refuse_replaced("DistributedOptimizer")
        if not self.has_means:
            self.asked = True
            synchronize_all(self.replica.transport)

    @agreeing("replica.agreed")
    def before_step(self) -> None:
        """Make sure that gradients are the means. Collective where they are not."""
        self.ensure_means()
        error = self._reducer.nonfinite
        if error is not None and self._reducer.gradients.are(State.NAN):
            self.discard()
            raise error
        self._reducer.restore_missing()
        if self._watches_means and self._reducer.means.changed() is not None:
            self._watches_means = False
            warn_of_clipping(self._compressor)

    @contextlib.contextmanager
    def stepping(self, evaluates: bool = False) -> Iterator[None]:
        """Context manager in which the wrapped optimizer steps, and `evaluates` a closure."""
        self._reducer.steps.enter(self, evaluates)
        try:
            yield
        finally:
            self._reducer.steps.leave(self)

    def trial_step(self) -> Any:
        """Take a step in which torch only creates the optimizer's state: parameters keep their values."""
        self._reducer.commit_if_updated()
        with self.stepping():
            result = self._optimizer.step()
        self._reducer.steps.pass_over()
        return result

    @agreeing("replica.agreed")
    def after_step(self) -> None:
        """The optimizer has stepped."""
        if self.closed:
            return
        self._reducer.commit()
        self._compare_if_due()

    def _compare_if_due(self) -> None:
        """After a step, or before the reduction that follows one that the loop has taken by itself. Collective."""
        if self._reducer.steps.unverified:
            self._reducer.steps.unverified = False
            self.replica.compare_if_due()

    def failed_step(self, error: Exception) -> None:
        """The optimizer has raised on this rank: tell the others, who may have stepped, in their next reduction."""
        self.replica.suspect = True
        logger.error("rank %d: the wrapped optimizer's step failed: %s", self.replica.transport.rank, error)

    def skip(self) -> None:
        """Skip this step, because gradients are set to zero, unless the loop has updated parameters by itself.

        It cannot be skipped once a rank has left `join`, which has committed the reduction.
        """
        if self._reducer.commit_if_updated():
            self.asked = False
            return
        buckets = self._reducer.buckets
        if buckets.pending and self._outcome.joined and buckets.has_residuals and not self.closed:
            raise RuntimeError(
                "zero_grad: expected step() first, since a rank has left join() and would not skip this step:"
                " decide before backward(), or take the step with a learning rate of 0"
            )
        self.discard()

    def discard(self) -> None:
        """Skip this step: gradients are about to be thrown away, and residuals are as they were before it."""
        self._reducer.discard()
        self.asked = False

    @agreeing("replica.agreed")
    def mean_loss(self, loss: Any) -> Any:
        """The mean of a closure's loss over the ranks, of its own type; raise where a rank has left `join`."""
        if self._outcome.joined and not self.closed:
            error = RuntimeError(
                "step: expected no closure once a rank has left join(), since the mean of the"
                " losses is that of all ranks: call step() without it (the gradients are means by now), and evaluate"
                " the loss yourself in later steps"
            )
            error.on_all_ranks = True  # type: ignore[attr-defined]
            raise error
        given = loss is None or self.closed
        return loss if given else mean_of_loss(self.replica.transport, loss, self._options.timeout)

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """See DistributedOptimizer."""
        if self.closed:
            yield
            return
        with self.replica.reporting():
            yield
        self._reducer.commit_if_updated()
        self.discard()
        self._outcome, buckets = NOTHING, self._reducer.buckets
        with self.replica.leaving():
            while not self._outcome.over:
                buckets.commit()
                for name in buckets.index_of:
                    self.params[name].grad = None
                self.asked = True
                synchronize_all(self.replica.transport)
                self.replica.follow_step(self._outcome)
            self.discard()
            self.replica.follow("join", self._optimizer, self._outcome.furthest)

    # -- saved state

    def state_dict(self) -> dict[str, Any]:
        """Return the library's part of a state_dict."""
        if self._reducer.gradients.are(State.SENDING, State.STALE):
            raise RuntimeError("state_dict: expected a call after back-propagation, got one while gradients are sent")
        self._reducer.commit_if_updated()
        return {STATE: renamed_state(self._reducer.buckets.state_dict(), self.members.kept())}

    @agreeing("replica.agreed")
    def load_state_dict(self, state: Mapping[str, Any], load: Callable[[], None]) -> None:
        """Load a state, on all ranks or on none, as `Buckets.load_state_dict` does. Collective."""
        if self.members.changed():
            self.discard()
            self.regroup()
        self._reducer.buckets.load_state_dict(lambda: state.get(STATE), load)
        self._reducer.loaded()
        self.discard()
