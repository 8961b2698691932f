"""DistributedOptimizer: any torch optimizer, on the mean of all ranks' compressed gradients."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from sparsecoll.telemetry.traffic import Traffic
from sparsecoll.torch.compressors import Compressor, resolve
from sparsecoll.torch.engine import Engine
from sparsecoll.torch.guards import refuse_wrapped
from sparsecoll.torch.options import Options
from sparsecoll.torch.replicas import Named, communicator, model_of, named
from sparsecoll.torch.state import STATE
from sparsecoll.torch.timeline import Timeline
from sparsecoll.transport import as_transport
from sparsecoll.transport.call import CollectiveCall


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer: gradients become their means over all ranks before it steps.

        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        optimizer = DistributedOptimizer(optimizer, model.named_parameters(), compressor="topk")

    A training loop is written as for DistributedDataParallel: gradients are fused into buckets, each bucket is
    compressed and reduced in a progress thread while back-propagation goes on, and when `backward()` returns, every
    `p.grad` is the mean, the same bits on all ranks. Clipping, GradScaler, checks of the norm, skipped steps
    (`zero_grad()` instead of `step()`) and closures therefore do what they do on one process with the global batch. The
    buckets' order is learned in the first step, rank 0's for all, so nothing overlaps yet.

    Parameters and buffers are broadcast from rank 0 at the start; buffers that a forward pass has changed (BatchNorm's
    running statistics) become rank 0's at the end of each back-propagation. A parameter that took part on some ranks
    only counts as zero on the others. One that took part on none keeps its gradient None, so that the optimizer skips
    it, unless something of it had been waiting in the residuals and arrives now.

    A step that fails or is skipped leaves the residuals as they were before it.

    Gradient accumulation: all back-propagations of a step but the last inside `no_sync()`, which saves communication;
    without it every back-propagation is reduced, with the same result. With `overlap=False` gradients stay each rank's
    own until `step`, so that whatever is done to them before (local clipping, noise) is done before they are sent.

    Args:
        optimizer: of floating-point parameters, on the CPU or (with CuPy) a CUDA device. Half-precision gradients are
            reduced in float32.
        named_parameters: `model.named_parameters()` or the model itself; or (name, parameter) pairs of at least the
            optimizer's parameters, every rank the same ones. Of pairs in a list the model and so its buffers are not
            known: see `sparsecoll.torch.broadcast`.
        comm: mpi4py communicator (or the comm of sparsecoll.simulate). None: MPI.COMM_WORLD, or one rank without MPI.
            Optimizers may share it.
        compressor: a name of `sparsecoll.torch.COMPRESSORS`, or a Compressor object with options.
        bucket_bytes: of gradient in a bucket; None: the whole model in one bucket.
        dense_below: parameters of fewer values are not compressed.
        overlap: False reduces in `step`.
        verify: every so many steps compare the bits of all parameters and buffers over the ranks (True: 100; 0: never).
        timeout: seconds to wait for a peer; then CommunicationError. None: for ever, with a warning once a minute. In
            the first reduction, in which kernels are compiled, at least 300.
        timeline: records what happens when.

    Raises:
        ValueError, TypeError: an option or a parameter is invalid on some rank; the same on every rank.
        CommunicationError: ranks disagree (parameters, compressor, options), or bits differ; the same on every rank.
        RuntimeError: `comm` is None, and a launcher has started several processes of which MPI knows nothing.

    Memory: with error feedback three flat vectors of the gradients' size (residual, gradient, mean), else one; and what
    else the compressor keeps.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: torch.nn.Module | Iterable[tuple[str, torch.Tensor]],
        comm: Any = None,
        compressor: str | Compressor = "topk",
        *,
        bucket_bytes: int | None = 25 << 20,
        dense_below: int = 1024,
        overlap: bool = True,
        verify: bool | int = 0,
        timeout: float | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.optimizer = optimizer
        super().__setstate__({})  # the hooks of a torch optimizer; groups and state are the wrapped optimizer's
        transport = communicator(comm)
        model = model_of(named_parameters)

        def checked() -> tuple[Named, Compressor, Options]:
            with CollectiveCall(transport, "DistributedOptimizer"):
                options = Options(
                    bucket_bytes, dense_below, overlap, 100 if verify is True else verify, timeout, timeline
                )
                options.check()
                refuse_wrapped(model)
                return _of_optimizer(optimizer, named(named_parameters)), resolve(compressor), options

        params, own, options = transport.in_order(checked)
        self._engine = Engine(transport, own, optimizer, model, options)
        self._engine.add(params)

    @property
    def param_groups(self) -> Any:
        """The wrapped optimizer's."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> Any:
        """The wrapped optimizer's."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: Any) -> None:
        self.optimizer.defaults = defaults

    def __getattr__(self, name: str) -> Any:
        """Whatever else the wrapped optimizer has, as the train() and eval() of schedule-free ones."""
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by GradScaler.step, which is how the scaler, and with it the scale of gradients, is found."""
        scaler = sys._getframe(1).f_locals.get("self")
        if isinstance(scaler, torch.amp.GradScaler):
            own = scaler._per_optimizer_states[id(self)]
            unscaled = own["stage"] is torch.amp.grad_scaler.OptState.UNSCALED
            self._engine.before_scalers_step(scaler, own["found_inf_per_device"], unscaled)
        return False

    @property
    def traffic(self) -> Traffic:
        """Bytes, messages and seconds of this rank so far, per phase; live."""
        return self._engine.transport.traffic

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of this rank so far by kind of work (see `telemetry.trace`), and "exposed": waited for."""
        return self._engine.seconds

    def move(self, comm: Any) -> None:
        """Go on over another communicator, that of `sparsecoll.shrink` after a rank was lost, say; collective on it.

        Residuals are kept; what the lost ranks held in theirs is gone with them. Parameters, buffers and the wrapped
        optimizer's state become those of the new rank 0, since the step that failed may have been taken by some only.
        """
        self._engine.move(as_transport(comm))

    def no_sync(self) -> AbstractContextManager[None]:
        """Gradients of back-propagations inside only accumulate; nothing is sent."""
        return self._engine.no_sync()

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Let ranks have different numbers of batches; collective.

            with optimizer.join():
                for batch in loader: ...

        A rank that leaves the block early takes part in the others' reductions with zeros, as in DDP's join; when all
        have left, parameters, buffers and optimizer state are those of the rank that has taken the most steps. Means
        divide by all ranks throughout.
        """
        yield
        self._engine.join()

    def synchronize(self) -> None:
        """Make gradients the means now, unless they are; collective. To work on the means before `step` where
        `overlap=False` or `no_sync()` have left gradients local.

        Raises:
            CommunicationError: the reduction failed on some rank; gradients and residuals are as they were.
        """
        self._engine.ensure_means()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step on all ranks; collective.

        Args:
            closure: evaluates this rank's loss and gradients. The wrapped optimizer gets the mean loss of all ranks, so
                that line searches decide alike.

        Returns:
            What the wrapped optimizer returns.

        Raises:
            NonFiniteError: a gradient holds NaN or infinity on some rank and the compressor cannot pass that on; the
                same on every rank. The step is not taken.
            CommunicationError: a reduction failed, or an earlier step has failed on another rank.
        """
        if closure is None:
            self._engine.before_step()
            return self._stepped(None)

        def evaluated() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._engine.before_step()
            return self._engine.mean_loss(loss)

        return self._stepped(evaluated)

    def _stepped(self, closure: Callable[[], Any] | None) -> Any:
        try:
            result = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        except Exception as error:
            if not getattr(error, "on_all_ranks", False):
                self._engine.failed_step(error)
            raise
        self._engine.after_step()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's. Between `backward()` and `step()` it gives the step up: residuals go back."""
        self._engine.discard()
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(
        self, param_group: dict[str, Any], named_parameters: Iterable[tuple[str, torch.Tensor]] = ()
    ) -> None:
        """As in torch, collective. Parameters without a name here are called group<i>.<j>."""
        number = len(self.optimizer.param_groups)
        self.optimizer.add_param_group(param_group)
        names = {id(p): name for name, p in named_parameters}
        added = self.optimizer.param_groups[-1]["params"]
        self._engine.add({names.get(id(p), f"group{number}.{j}"): p for j, p in enumerate(added)})

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state_dict, with the compressor's state by parameter name under "sparsecoll".

        Residuals differ between ranks: save one file per rank. Safe for torch.load(weights_only=True). A plain torch
        optimizer loads it, too, and ignores the residuals.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = {**self.optimizer.state_dict(), STATE: self._engine.state_dict()}
        for after in self._optimizer_state_dict_post_hooks.values():
            state = _replaced(state, after(self, state))
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where a run on as many ranks stopped, with the same bits; collective.

        A plain optimizer's state_dict is taken, too; residuals are empty then. A framework that gives rank 0's to all
        ranks is helped by a hook that puts this rank's own part in (`register_load_state_dict_pre_hook`).

        Raises:
            CommunicationError: the state was saved by another rank or at another number of ranks (see `redistribute`).
            ValueError, TypeError: it is of another model or compressor.
        """
        transport = self._engine.transport

        def hooked() -> dict[str, Any]:
            state = dict(state_dict)
            with CollectiveCall(transport, "hooks of load_state_dict"):
                for before in self._optimizer_load_state_dict_pre_hooks.values():
                    state = _replaced(state, before(self, state))
            return state

        state_dict = transport.in_order(hooked)
        own = state_dict.get(STATE)
        inner = state_dict.get("optimizer") or {name: v for name, v in state_dict.items() if name != STATE}
        self._engine.load_state_dict(own, lambda: self.optimizer.load_state_dict(inner))
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def close(self) -> None:
        """Take the hooks off the parameters: from then on each rank's optimizer steps on its own gradients."""
        self._engine.close()

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("DistributedOptimizer cannot be pickled: save its state_dict()")


def _replaced(state: dict[str, Any], result: Any) -> dict[str, Any]:
    """What a hook has made of a state: what it returned, or the state that it may have changed in place."""
    return state if result is None else result  # type: ignore[no-any-return]


def _of_optimizer(optimizer: torch.optim.Optimizer, params: Named) -> Named:
    """All named parameters.

    Raises:
        ValueError: the optimizer has one that is not among them.
    """
    known = {id(p) for p in params.values()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) not in known:
                raise ValueError(
                    "named_parameters: expected all of the optimizer's parameters,"
                    f" one of shape {tuple(p.shape)} is missing"
                )
    return params
