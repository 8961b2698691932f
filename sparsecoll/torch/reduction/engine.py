"""When gradients are reduced, and what step(), zero_grad() and join() of DistributedOptimizer do with the means."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from sparsecoll.errors import NonFiniteError, is_known, on_all_ranks
from sparsecoll.torch.compressors import Compressor
from sparsecoll.torch.reduction import hooks
from sparsecoll.torch.reduction.grad_scaler import Scaling
from sparsecoll.torch.reduction.hooks import Hooks, Owner, enlist, others_of, synchronize_all, take_over
from sparsecoll.torch.reduction.reducer import Reducer
from sparsecoll.torch.reduction.state import STATE, part_of, renamed_state
from sparsecoll.torch.reduction.steps import State
from sparsecoll.torch.replica import guards
from sparsecoll.torch.replica.calls import NO_OUTCOME, Options, agreeing, mean_of_loss
from sparsecoll.torch.replica.replica import Members, Replica, changes, check_added
from sparsecoll.torch.tensors.model import Named, Watch, momenta_of, names_in_groups, options_of
from sparsecoll.torch.tensors.private import at_end_of_backward
from sparsecoll.transport import Transport

logger = logging.getLogger(__name__)


def _shared_options(optimizer: Any, scaling: Scaling, buckets: Callable[[], Any]) -> dict[str, Any]:
    """Return what must be the same on all ranks in a reduction."""
    scaled = scaling.scaler is not None and not all(compressor.unscales for _, compressor in buckets())
    return options_of(optimizer) | ({"scale of gradients": scaling.scale} if scaled else {})


class Engine(Reducer):
    """Reduces the gradients of named parameters; `optimizer` is what steps on them.

    Attributes:
        members: tells which of them were added to the optimizer, or removed from it and the model.
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
        super().__init__(Replica(transport, model, options), compressor, scaling)
        self.closed = False
        self._compressor, self._optimizer, self._options = compressor, optimizer, options
        self.members = Members(optimizer, self.params, None if model is None else model.named_parameters)
        self.replica.changed = self.members.changed
        self.replica.context.momenta = partial(momenta_of, optimizer, self.params)
        self.replica.shared_options = partial(_shared_options, optimizer, scaling, weakref.ref(self.buckets))
        hooked = None if isinstance(model, torch.jit.ScriptModule) else model  # ScriptModules do not support hooks
        self._hooks = Hooks(self, self.accumulating)
        self._guard = None if hooked is None else hooked.register_forward_pre_hook(guards.refuse_ddp)
        if transport.rank == 0:
            guards.warn_of_adam(optimizer, compressor)
            guards.warn_of_momentum(optimizer, compressor, self.replica.sparse_weights)
        has_momentum, watched = getattr(compressor, "momentum", 0.0) != 0, transport.rank == 0 and transport.size > 1
        cure = guards.NO_MEAN if has_momentum else "To clip the mean, call synchronize() first"
        who = "momentum before the compression" if has_momentum else "overlap=False"
        self._watch = Watch(who, cure) if watched and not options.overlap else None
        self._skipped = False  # whether means were thrown away since the last step
        self._watches_means = watched and options.overlap and has_momentum and scaling.scaler is None
        self._synchronizing, self.asked = True, False
        before = getattr(optimizer, "register_step_pre_hook", None)
        self._step_guard = None if before is None else before(partial(hooks.before_wrapped_step, weakref.ref(self)))
        self._outcome, self.number = NO_OUTCOME, -1  # of the last reduction; see above

    # -- parameters

    @agreeing("replica.agreed")
    def regroup(self, params: Named | None = None) -> None:
        """Add and remove parameters; collective. All ranks must have the same ones; values are taken from rank 0.

        Args:
            params: name -> parameter: those that are new, and perhaps others; None for those new in the optimizer.
        """
        params = self.members.added(self.members.named()) if params is None else params
        own, others = params, dict[str, Any]()
        try:
            with self.replica.all_or_none(self.release, vars(self.buckets), self.params) as begin:
                stay, new = self.members.kept(), self.members.added(params)
                compared = ("bucket_bytes", "dense_below", "overlap", "verify")
                signature = {
                    **changes(new if self.params else (), self.params.keys() - stay.keys()),
                    **self._compressor.signature(),
                    **{name: getattr(self._options, name) for name in compared},
                    "grad_scaler": self._scaling.scaler is not None,
                    **names_in_groups(self._optimizer, {**self.params, **params}),
                    guards.STATES: 0 if self.params else guards.checksum_of_state(self._optimizer),
                }
                with self.steps.passing_over():
                    self.replica.introduce(params, signature, lambda: check_added(new, stay))
                if self.number < 0:
                    self.number = enlist(self)
                others, stepped = others_of(self, new), self.members.stepped()
                own = {name: p for name, p in new.items() if name not in others or id(p) in stepped}
                begin()
                if self.gradients.are(State.MEANS):
                    self._leave_to_next_step(own)
                self._let_stay(stay)
                self.params.update(own)
                if self.replica.transport.virtual:
                    # Virtual ranks are threads: their back-propagation stays in them. Otherwise autograd executes what
                    # is on a GPU, and so our hooks, in one thread for all ranks, and the first that waits stops others.
                    torch.autograd.set_multithreading_enabled(False)
                self._hooks.attach(self.params)
                if new:
                    self.buckets.order = []
        except Exception:
            self._hooks.remove(own)
            self._hooks.attach(self.params)
            raise
        take_over(self, others, own)

    def _leave_to_next_step(self, params: Named) -> None:
        """Drop the gradients of parameters that came after the reduction: they are this rank's own."""
        for p in (params[name] for name in params.keys() - others_of(self, params).keys()):
            p.grad = None

    def hand_over(self, name: str, p: torch.Tensor, to: Owner) -> None:
        """Leave a parameter to the owner whose optimizer steps it.

        If both step it, the later one replaces this one, as when a cell of a notebook is run again.
        """
        if not self.closed and id(p) not in self.members.stepped():
            self.discard()
            self._let_stay({own: own for own, other in self.params.items() if other is not p})
        elif not self.closed and to.replaces:
            self.close(replaced=name)

    def _let_stay(self, names: Mapping[str, str]) -> None:
        """Rename parameters, old name -> new name, and drop the others with their state; buckets are made again."""
        self._hooks.remove({name: p for name, p in self.params.items() if names.get(name) != name})
        self.release()
        self.means.rename(names)
        self.buckets.rename(names)
        stay = {new: self.params[old] for old, new in names.items()}
        self.params.clear()
        self.params.update(stay)

    def close(self, replaced: str = "") -> None:
        """Remove the hooks; a further step raises if an optimizer made later updates the parameter `replaced`."""
        self._hooks.remove(self.params)
        for guard in filter(None, (self._guard, self._step_guard)):
            guard.remove()
        self.closed, self.replaced = True, replaced

    @agreeing("replica.agreed")
    def move(self, transport: Transport) -> None:
        """Go on over another communicator, with rank 0's parameters, buffers and optimizer state; collective on it."""
        self.replica.transport = transport
        self.release()
        self.replica.follow("move", self._optimizer)
        self.buckets.share_state("move")
        self.replica.call("move", lambda _: self._scaling.follow(transport, 0))
        self.replica.warmed = False  # the first reduction compares gradients, as it does on ranks that are new
        self.steps.pass_over()
        self.number = enlist(self)
        self.gradients.to(State.EMPTY)  # gradients are reduced again, unless zero_grad() skips the step
        self.asked, self._outcome = False, NO_OUTCOME

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of back-propagations inside only accumulate; they are sent with those of the next one outside."""
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    # -- back-propagation

    def accumulating(self, name: str) -> None:
        """Called before autograd adds to a gradient."""
        self.means.accumulating(name)
        self.steps.settle({name})

    @agreeing("failing")
    def accumulated(self, name: str) -> None:
        """Called when a parameter's gradient is complete, on the thread that back-propagates."""
        self.means.accumulated(name)
        if not self._is_open:
            self._open()
        elif self.means.is_replaced(name):
            self._rollback({name})
        if self._watch is not None:
            self._watch.record(self.params[name])
        if not self._synchronizing:
            return
        if self._options.overlap:
            self.asked = True
            at_end_of_backward(self.replica.transport, partial(synchronize_all, self.replica.transport))
        self.send(name, self._hooks.comes_last(name))

    @agreeing("failing")
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
        self._compare_if_due()
        try:
            self._outcome = self.reduce(f"end of reduction of optimizer {self.number}", self.regroup)
        except NonFiniteError:
            self._outcome = NO_OUTCOME
        if self.replica.warmed and self._guard is not None:
            self._guard.remove()

    # -- the optimizer's step

    @property
    def has_means(self) -> bool:
        """Whether gradients are the means, or are not reduced any more."""
        return self.closed or self.gradients.are(State.MEANS, State.NAN)

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
        if (error := self.nonfinite) is not None and self.gradients.are(State.NAN):
            self.discard()
            raise error
        if self.gradients.are(State.MEANS) and self.members.changed():
            self._leave_to_next_step(self.members.added(self.members.named()))
        self._rollback({name for name in self.means if self.params[name].grad is None})  # thrown away
        if self._skipped and any(self.params[name].grad is not None for name in self.means.replaced()):
            guards.warn_of_combined(self.replica.transport.rank)
        self._skipped = False
        if self._watches_means and self.means.changed() is not None:
            self._watches_means = False
            guards.warn_of_clipping(self._compressor)

    @contextlib.contextmanager
    def stepping(self, evaluates: bool = False) -> Iterator[None]:
        """Context manager in which the wrapped optimizer steps, and `evaluates` a closure."""
        self.steps.enter(self, evaluates)
        try:
            yield
        finally:
            self.steps.leave(self)

    def trial_step(self) -> Any:
        """Take a step in which torch only creates the optimizer's state: parameters keep their values."""
        self.commit_if_updated()
        with self.stepping():
            result = self._optimizer.step()
        self.steps.pass_over()
        return result

    @agreeing("replica.agreed")
    def after_step(self) -> None:
        """Called when the optimizer has stepped."""
        if self.closed:
            return
        stepped = self.members.stepped()
        self.steps.leave_out({name for name in self.means if id(self.params[name]) not in stepped})
        self.commit()
        self._compare_if_due()

    def _compare_if_due(self) -> None:
        """After a step, or before the reduction that follows one that the loop has taken by itself. Collective.

        Ranks that have left `join` do not step, so that nothing is compared then.
        """
        unverified, self.steps.unverified = self.steps.unverified, False
        if unverified and not self._outcome.joined:
            self.replica.compare_if_due()

    def failed_step(self, error: Exception) -> None:
        """The optimizer has raised on this rank: tell the others, who may have stepped, in their next reduction."""
        if not is_known(error, self.replica.transport):
            self.replica.suspect = True
            logger.error("rank %d: the wrapped optimizer's step failed: %s", self.replica.transport.rank, error)

    def skip(self, updated: bool = False) -> None:
        """Skip this step, because gradients are set to zero, unless the loop has updated parameters by itself.

        With `updated`, skip it also if parameters have changed, and throw gradients away. It cannot be skipped once a
        rank has left `join`, which has committed the reduction.
        """
        if not self.closed:
            self._hooks.attach(self.params)  # some may have been unfrozen
        if not updated and self.commit_if_updated():
            self.asked = False
            return
        if self.buckets.pending and self._outcome.joined and self.buckets.has_residuals and not self.closed:
            raise RuntimeError(
                "zero_grad() and discard() cannot skip this step, because a rank has left join() and would take it:"
                " decide before backward()"
            )
        for p in self.params.values() if updated and not self.closed else ():
            p.grad = None  # perhaps a mean, of which a residual has sent a part
        self.discard()

    def discard(self) -> None:
        """Skip this step: gradients are about to be thrown away, and residuals are as they were before it."""
        self._skipped = self._skipped or (self.buckets.pending and self.buckets.has_residuals)
        self._order, self.nonfinite, self.asked = {}, None, False
        self._invalid = self._invalid if self._jobs else None
        self.steps.rollback()
        self.means.clear()

    @agreeing("replica.agreed")
    def mean_loss(self, loss: Any) -> Any:
        """The mean of a closure's loss over the ranks, of its own type; raise where a rank has left `join`."""
        if self._outcome.joined and not self.closed:
            text = (
                "step() takes no closure once a rank has left join(), because the mean of the losses is that of all"
                " ranks: call step() without it (the gradients are means by now), and evaluate the loss yourself later"
            )
            raise on_all_ranks(RuntimeError(text))
        return loss if self.closed else mean_of_loss(self.replica.transport, loss, self._options.timeout)

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """See DistributedOptimizer."""
        if self.closed:
            yield
            return
        with self.replica.reporting():
            yield
        self.commit_if_updated()
        self.discard()
        self._outcome = NO_OUTCOME
        with self.replica.leaving():
            while not self._outcome.over:
                self.buckets.commit()
                for p in self.params.values():
                    p.grad = None
                self.asked = True
                synchronize_all(self.replica.transport)
                self.replica.follow_step(self._outcome)
            self.discard()
            root = self._outcome.furthest
            self.replica.follow("join", self._optimizer, root=root)
            self.replica.call("join", lambda _: self._scaling.follow(self.replica.transport, root))

    # -- saved state

    def state_dict(self) -> dict[str, Any]:
        """Return the library's part of a state_dict."""
        if self.gradients.are(State.SENDING, State.STALE):
            raise RuntimeError(
                "call state_dict() after back-propagation, not while gradients are reduced; after an exception or"
                " Ctrl-C in backward(), call zero_grad() first"
            )
        self.commit_if_updated()
        return {STATE: renamed_state(self.buckets.state_dict(self.steps.unstepped), self.members.kept())}

    @agreeing("replica.agreed")
    def load_state_dict(self, state: Mapping[str, Any], load: Callable[[], Any]) -> None:
        """Load a state, on all ranks or on none, as `Buckets.load_state_dict` does. Collective."""
        if self.members.changed():
            self.discard()
            self.regroup()
        self.buckets.load_state_dict(lambda: part_of(state, local=False), load, same=[self._optimizer])
        self.means.clear()
        self._end()
        self.gradients.to(State.EMPTY)
        if self.buckets.order:
            self.make_buckets(set(self.buckets.order))
        self.discard()
