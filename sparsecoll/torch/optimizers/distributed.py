"""DistributedOptimizer: any torch optimizer, on the mean of all ranks' compressed gradients; and its base, Wrapper."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from sparsecoll.algorithms import Algorithm
from sparsecoll.telemetry.traffic import Traffic
from sparsecoll.torch.compressors import Compressor, TopKCompressor, as_compressor
from sparsecoll.torch.optimizers.sgd_rules import WithoutMomentum, check_momentum, tell
from sparsecoll.torch.reduction.engine import Engine
from sparsecoll.torch.reduction.grad_scaler import Scaling
from sparsecoll.torch.reduction.state import INNER, LOCAL, STATE, without_numpy
from sparsecoll.torch.replica.calls import Options, agreed, agreeing, collective, communicator
from sparsecoll.torch.replica.guards import refuse_wrapped, warn_of_state
from sparsecoll.torch.replica.replica import restoring_groups
from sparsecoll.torch.tensors.model import Named, model_of, named, of_optimizer
from sparsecoll.torch.tensors.private import is_called_by_scaler, is_trial_step, state_dict_hooks, untraced
from sparsecoll.transport import as_transport
from sparsecoll.transport.call import CollectiveCall


def forwarded(name: str) -> property:
    """An attribute of the wrapped optimizer."""
    return property(
        lambda self: getattr(self.optimizer, name), lambda self, value: setattr(self.optimizer, name, value)
    )


class Wrapper(torch.optim.Optimizer):
    """A torch optimizer that wraps another one, whose groups and state are its own, too.

    `_engine`, an Engine or a Window, has the parameters, the other ranks (`replica`) and the state.
    """

    _engine: Any

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        super().__setstate__({})  # the hooks of a torch optimizer

    param_groups: Any = forwarded("param_groups")
    state: Any = forwarded("state")
    defaults: Any = forwarded("defaults")

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped optimizer, such as train() and eval() of schedule-free ones."""
        if name in ("optimizer", "_engine") or any(name in vars(kind) for kind in Wrapper.__subclasses__()):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.optimizer, name)

    @property
    def traffic(self) -> Traffic:
        """Traffic of this rank, which later calls update."""
        return self._engine.replica.transport.traffic  # type: ignore[no-any-return]

    @agreeing("_engine.replica.agreed")
    def add_param_group(
        self, param_group: dict[str, Any], named_parameters: Iterable[tuple[str, torch.Tensor]] = ()
    ) -> None:
        """Add a group as in torch, on all ranks or, if one of them raises, on none; collective.

        Its values become those of rank 0. Parameters that are neither in the optimizer's groups nor in the model any
        more are dropped with their residuals, now or in the next step. To replace a layer, take the old parameters out
        of `param_groups` and `state`, then add the new ones.

        Args:
            param_group: as in torch; its options are those of the wrapped optimizer.
            named_parameters: pairs (name, parameter). Parameters keep the name that they have already. Others without
                one have the model's, if the model is known and no other parameter has it, or are called group<i>.<j>.
        """
        with restoring_groups(self.optimizer.param_groups, self._engine.release) as number:
            self.optimizer.add_param_group(param_group)
            self._engine.regroup(self._engine.members.named(number, named_parameters))

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state_dict, with the compressor's state by parameter name under "sparsecoll".

        Residuals differ between ranks, so save one file per rank. It can be loaded with torch.load(weights_only=True),
        also by a plain torch optimizer, which ignores the residuals. If a rank has taken steps since a LocalOptimizer's
        last mean, its file has its parameters, too, so that any rank's model may be loaded with it.
        """
        for before in state_dict_hooks(self, "state_dict_pre"):
            before(self)
        inner = self.optimizer.state_dict()
        state = {**inner, **self._engine.state_dict(), **({INNER: inner[STATE]} if STATE in inner else {})}
        without_numpy(state.get("param_groups", ()))
        return self._changed_by_hooks("state_dict_post", state)

    def _changed_by_hooks(self, moment: str, state: dict[str, Any]) -> dict[str, Any]:
        """Return what the hooks of `register_MOMENT_hook` make of a state."""
        for hook in state_dict_hooks(self, moment):
            changed = hook(self, state)
            state = state if changed is None else changed
        return state

    @agreeing("_engine.replica.agreed")
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, to continue with the same bits on as many ranks; collective.

        A LocalOptimizer that was saved while a delayed mean was formed continues without that mean.

        The state_dict of a plain optimizer is accepted, too; residuals are then empty, and rank 0 warns if they were
        not. If a framework loads rank 0's state on all ranks, register a hook that replaces the part "sparsecoll" by
        this rank's own (`register_load_state_dict_pre_hook`). With LocalOptimizer, load the model's state before, the
        same on all ranks: it starts from there, or from this rank's values if the state was saved between two means.

        Args:
            state_dict: a state that this rank saved, or that `redistribute` made.

        Raises:
            CommunicationError: The state was saved by another rank, or with another number of ranks (see
                `redistribute`), or ranks load states of different steps. The next mean of a LocalOptimizer raises it,
                too, if ranks have loaded different models, or one after a state that was saved between two means.
            ValueError: The state is of another model or compressor, or lacks something.
            TypeError: The state contains values of another type.
        """
        hooked = partial(self._changed_by_hooks, "load_state_dict_pre")
        self._load(self._engine.replica.call("hooks of load_state_dict", lambda _: hooked(dict(state_dict))))
        for after in state_dict_hooks(self, "load_state_dict_post"):
            after(self)

    def _load(self, state: dict[str, Any]) -> None:
        """Load a state, on all ranks or on none. Collective."""
        inner = {STATE if k == INNER else k: value for k, value in state.items() if k not in (STATE, LOCAL)}
        self._engine.load_state_dict(state, lambda: self.optimizer.load_state_dict(inner))

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"{type(self).__name__} cannot be pickled: save its state_dict()")


class DistributedOptimizer(Wrapper):
    """Wraps an optimizer, which then uses the mean of all ranks' gradients. Gradients are sent compressed.

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = DistributedOptimizer(optimizer, model)

    Write the training loop as for DistributedDataParallel. Gradients are collected in buckets, and a progress thread
    compresses and reduces each bucket while back-propagation continues. When `backward()` returns, every `p.grad` is
    the mean, with the same bits on all ranks. Clipping, GradScaler, checks of the norm, skipped steps (`zero_grad()`
    instead of `step()`) and closures therefore work as on one process with the global batch. Only with a compressor
    that has momentum, as the default with SGD, do means have another norm than the gradient, so that rank 0 warns of
    clipping: pass `overlap=False`. The first step does not overlap: it records the order of the gradients on rank 0,
    which all ranks use from then on.

    Parameters and buffers are broadcast from rank 0 at the start; buffers that a forward pass has changed (BatchNorm's
    running statistics) are set to rank 0's at the end of each back-propagation. A parameter that only some ranks use
    counts as zero on the others. The gradient of one that no rank uses stays None, so that the optimizer skips it,
    unless residuals contribute something.

    Sparse gradients, as of torch.nn.Embedding(sparse=True), are summed as rows and take no memory of the table's size;
    `p.grad` is then the mean as a coalesced sparse tensor. The sum is exact, unless the compressor has a `row_density`
    or a `value_dtype` (`TopKCompressor`, `FP16`).

    A step that fails or is skipped does not change the residuals.

    To accumulate gradients, run all back-propagations of a step except the last inside `no_sync()`, which saves
    communication. Without `no_sync()`, every back-propagation is reduced, which a compressor with momentum refuses (as
    the default does with SGD). With `overlap=False`, gradients are local to each rank until `step`, so that changes to
    them (local clipping, noise) take effect before they are sent. Rank 0 logs a warning of the first such change, in
    case you wanted to change the mean.

    Args:
        optimizer: torch optimizer of floating-point parameters, on the CPU or (with CuPy) a CUDA device. Half-precision
            gradients are reduced in float32.
        named_parameters: `model.named_parameters()`, the model itself, or pairs (name, parameter) that include all of
            the optimizer's parameters; the same on every rank. With a list of pairs, the model's buffers are not
            known: see `sparsecoll.torch.broadcast`. Two optimizers may be given one model if each parameter is updated
            by at most one of them, which then reduces its gradients.
        comm: communicator, as in `sparsecoll.allreduce`; None, the default, for the default process group of
            torch.distributed, otherwise MPI.COMM_WORLD. Several optimizers may share it.
        compressor: name in `sparsecoll.torch.COMPRESSORS`, a Compressor object, or an Algorithm, which sums the top k
            (default: None, for "sgdtopk" with torch.optim.SGD, whose learning rate and momentum remain those of dense
            training, see `SparseSGD`, and for "qsgd" with any other optimizer).
        bucket_bytes: bytes of gradient in a bucket (default: 25 MiB); None for one bucket with all that is compressed.
            Buckets are sent in the order in which they fill. A parameter that does not fit opens the next one.
        dense_below: number of values below which a parameter is not compressed (default: None, for 0 with "sgdtopk"
            and "chunktopk", and 1024 with other compressors).
        overlap: whether gradients are reduced during back-propagation (the default) or in `step`.
        gradient_as_bucket_view: as in DistributedDataParallel: whether every `p.grad` is a view of its bucket's flat
            vector as soon as autograd has computed it (default: False). See "Memory".
        grad_scaler: the torch.amp.GradScaler of the loop: residuals are kept without its scale, and all ranks skip the
            same steps. With None, the default, `scaler.step(optimizer)` raises RuntimeError. A scaler that is disabled
            says that there is none, which Lightning's clipping with "bf16-mixed" has to know.
        verify: number of steps after which the bits of all parameters, and of buffers that no forward pass changes,
            are compared between ranks; 0, the default, for never, and True for 100.
        timeout: seconds to wait for a message before CommunicationError is raised; None, the default, for no limit,
            with a warning once a minute. It holds from the first call on, so it should be longer than the kernels take
            to compile in their first run on a machine (about 10 s). If several optimizers share a communicator and a
            back-propagation has computed gradients of more than one, ranks wait for the shortest of their timeouts.

    Raises:
        ValueError: On every rank, if an option or a parameter is invalid on some rank.
        TypeError: On every rank, if one has a wrong type on some rank.
        CommunicationError: On every rank, if ranks have different parameters, compressors or options, or bits differ.
        RuntimeError: `comm` is None, and a launcher that MPI does not recognize has started several processes.

    Memory: with error feedback three flat vectors of the size of the gradients (residual, gradient, mean), otherwise
    one, and the state of the compressor; and autograd's own gradients until `backward()` returns. With
    `gradient_as_bucket_view` each of these is freed when it has been copied, and the copies take one more flat vector;
    where autograd adds to a gradient (accumulation, or after `zero_grad(set_to_none=False)`) nothing is copied. A large
    gradient that is alone in its bucket is never copied, with or without this option.

    See Also:
        `sparsecoll.torch.SparseSGD`, `sparsecoll.torch.comm_hook`.
    """

    _engine: Engine

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: torch.nn.Module | Iterable[tuple[str, torch.Tensor]],
        comm: Any = None,
        compressor: str | Compressor | Algorithm | None = None,
        *,
        bucket_bytes: int | None = 25 << 20,
        dense_below: int | None = None,
        overlap: bool = True,
        gradient_as_bucket_view: bool = False,
        grad_scaler: torch.amp.GradScaler | None = None,
        verify: bool | int = 0,
        timeout: float | None = None,
    ) -> None:
        super().__init__(optimizer)
        transport, model = communicator(comm, timeout), model_of(named_parameters)

        def checked(_: CollectiveCall) -> tuple[Named, Compressor, Options, Scaling]:
            chosen = "sgdtopk" if isinstance(optimizer, torch.optim.SGD) else "qsgd"
            own = as_compressor(chosen if compressor is None else compressor)
            below = own.dense_below if dense_below is None else dense_below
            options = Options(bucket_bytes, below, overlap, gradient_as_bucket_view, verify, timeout)
            refuse_wrapped(model, "named_parameters")
            self._keeps_momentum = isinstance(own, TopKCompressor) and own.momentum is None
            if self._keeps_momentum:
                check_momentum(optimizer)
            return of_optimizer(optimizer, named(named_parameters)), own, options, Scaling(self, grad_scaler)

        params, own, options, self._scaling = collective(transport, "DistributedOptimizer", timeout, checked)
        with agreed(transport, timeout):
            self._engine = Engine(transport, own, optimizer, model, options, self._scaling)
            self._engine.regroup(params)
        if own.keeps_gradient:
            warn_of_state(optimizer, transport)
        if isinstance(own, TopKCompressor) and self._keeps_momentum and transport.rank == 0:
            tell("DistributedOptimizer", self.param_groups, own)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether GradScaler.step() leaves the decision to `step`: gradients are not means, or it was not passed."""
        return not self._engine.closed and self._scaling.asks_for_steps(not self._engine.has_means)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of this rank by kind of work (see `telemetry.trace`), and "exposed", the time that `step` waited."""
        return self._engine.seconds

    def move(self, comm: Any) -> None:
        """Continue on another communicator, as that of `sparsecoll.shrink` after a rank was lost; collective on it.

        Each rank keeps its residuals; those of lost ranks are lost. Parameters, buffers and the wrapped optimizer's
        state are set to those of the new rank 0, since only some ranks may have taken the step that failed.

        Args:
            comm: communicator, as in `sparsecoll.allreduce`.
        """
        self._engine.move(as_transport(comm, self._engine.replica.options.timeout))

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Context manager: gradients of the enclosed back-propagations accumulate without communication."""
        return self._engine.no_sync()

    def join(self) -> contextlib.AbstractContextManager[None]:
        """Context manager that allows different numbers of batches on the ranks; collective.

            with optimizer.join():
                for batch in loader: ...

        A rank that leaves the block early takes part in the others' reductions with zeros, as in DDP's join; when all
        have left, parameters, buffers and optimizer state are those of the rank that took the most steps. Means are
        always divided by the number of all ranks. If an exception leaves the block on one rank, the others raise
        CommunicationError in their next reduction.
        """
        return self._engine.join()

    @agreeing("_engine.replica.agreed")
    def synchronize(self) -> None:
        """Reduce the gradients now, unless they are the means already; collective.

        Use it to work on the means before `step` if `overlap=False` or `no_sync()` has left gradients local.

        Raises:
            CommunicationError: The reduction failed on some rank; gradients and residuals are as before.
        """
        unscaled = self._scaling.unscaled and not self._engine.has_means
        self._engine.ensure_means()
        if unscaled:
            self._scaling.overflows(self)

    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on all ranks; collective.

        Args:
            closure: function that computes this rank's loss and gradients and returns the loss. The wrapped optimizer
                gets the mean loss of all ranks, so that line searches take the same decisions on all ranks.

        Returns:
            What the wrapped optimizer returns.

        Raises:
            NonFiniteError: On every rank, if a gradient contains NaN or infinity on some rank and the compressor cannot
                pass it on. The step is not taken.
            CommunicationError: A reduction failed, or an earlier step failed on another rank.
            RuntimeError: There is a closure, and a rank has left `join`, which takes no part in the mean of the losses.
        """
        if is_trial_step(self):
            with self._without_momentum() or contextlib.nullcontext():
                return self._engine.trial_step()
        if self._skips(closure):
            return None  # as a GradScaler does

        def evaluated() -> Any:
            assert closure is not None
            with self._engine.replica.agreed(), torch.enable_grad():
                loss = closure()
            self._engine.before_step()
            return self._engine.mean_loss(loss)

        return self._stepped(None if closure is None else evaluated)

    @agreeing("_engine.replica.agreed")
    def _skips(self, closure: Any) -> bool:
        """Make gradients the means, unless a closure does; return whether the GradScaler skips this step."""
        has_scaler = self._scaling.scaler is not None or is_called_by_scaler(self)
        if has_scaler and not self._engine.closed and self._scaling.check(self):
            self._engine.ensure_means()
            if self._scaling.overflows(self):
                return True
        if closure is None:
            self._engine.before_step()
        return False

    def _without_momentum(self) -> WithoutMomentum | None:
        """Return by what the wrapped optimizer leaves momentum to the compressor, if that has it."""
        if not self._keeps_momentum or self._engine.closed:
            return None
        return WithoutMomentum(self.optimizer, self._engine.replica.context.step + 1, self._engine.buckets.tables)

    def _stepped(self, closure: Callable[[], Any] | None) -> Any:
        try:
            with self._engine.stepping(evaluates=closure is not None):
                if without := self._without_momentum():
                    result = without.step(closure)
                else:
                    result = self.optimizer.step() if closure is None else self.optimizer.step(closure)
                self._engine.after_step()
        except Exception as error:
            self._engine.failed_step(error)
            raise
        return result

    def discard(self) -> None:
        """Skip the step after `backward()`, on all ranks: gradients become None, residuals what they were before it.

        `zero_grad` does this, too, but not if your loop has changed parameters before, as SAM does: call this first.
        Within `join`, RuntimeError is raised as by `zero_grad`.
        """
        self._engine.skip(updated=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Call the wrapped optimizer's zero_grad; between `backward()` and `step()` this skips the step.

        Residuals are then restored to their values before the step, unless your loop has changed parameters since
        `backward()`, which counts as a step that it takes by itself.

        Args:
            set_to_none: as in torch.

        Raises:
            RuntimeError: Within `join`, a rank has already left the block, and would not skip the step.
        """
        self._engine.skip()
        self.optimizer.zero_grad(set_to_none)

    def close(self) -> None:
        """Remove the hooks from the parameters; each rank's optimizer then steps on its own gradients."""
        self._engine.close()

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"
