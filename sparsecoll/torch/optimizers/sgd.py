"""SparseSGD: torch.optim.SGD whose gradients are summed over the ranks by a sparse allreduce with error feedback."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from sparsecoll.algorithms import Algorithm
from sparsecoll.errors import NonFiniteError
from sparsecoll.formats import Format
from sparsecoll.telemetry.traffic import Traffic
from sparsecoll.torch.compressors.schedule import Density, Schedule
from sparsecoll.torch.optimizers.sgd_rules import check_group, common, compressor_of, names_of, take_step, tell, updates
from sparsecoll.torch.reduction.accumulator import Accumulator, SparseSum, Sums
from sparsecoll.torch.reduction.grad_scaler import Scaling
from sparsecoll.torch.reduction.state import STATE, without_numpy
from sparsecoll.torch.replica.calls import Options, Outcome, agreed, agreeing, collective, communicator, mean_of_loss
from sparsecoll.torch.replica.guards import NO_MEAN, fingerprint, refuse_wrapped, warn_of_momentum
from sparsecoll.torch.replica.replica import Replica, restoring_groups
from sparsecoll.torch.tensors.layout import takes_part
from sparsecoll.torch.tensors.model import Watch, model_of, momenta_of
from sparsecoll.torch.tensors.private import is_called_by_scaler, is_trial_step, untraced
from sparsecoll.transport import as_transport
from sparsecoll.transport.call import CollectiveCall

logger = logging.getLogger(__name__)


class SparseSGD(torch.optim.Optimizer):
    """Drop-in for torch.optim.SGD in data-parallel training, with the same values of lr, momentum and weight_decay.

        optimizer = SparseSGD(model.parameters(), lr=0.1, momentum=0.9)

    By default, each rank sends 1 % of the entries in 4 bits, and more in the first 100 steps (`compressors.sgdtopk`).
    Momentum m acts on a gradient before it enters the residual, where waiting acts like momentum, too. So each `step`
    s = 1, 2, ..., with learning rate a, P ranks, and m' = max(0, 1 - 3 (1 - m)), is

        1. u = m' (u + gradient);  acc = residual + gradient + u
        2. sum, contributed = sparse allreduce of acc
        3. residual = acc - contributed;  u = 0 where this rank sent an entry
        4. w = w - b (sum / P + weight_decay / (1 - m') w),  b = a (1 - m') / (1 - m) * (1 - m^s) / (1 - m'^(s+1))

    so that a gradient moves w by a / (1 - m) in all, as in SGD, and the first steps are as long. `dampening` scales b,
    and `nesterov` changes nothing. Parameters with sparse gradients take SGD's own steps.

    With `algo`, it is Ok-Topk SGD (Li and Hoefler 2022, Algorithm 2), with velocity v:

        1. acc = residual + a * gradient                    (line 4; with momentum: residual + gradient)
        2. u, contributed = sparse allreduce of acc         (line 5)
        3. residual = acc - contributed                     (line 6)
        4. w = w - u / P                                    (line 7; with momentum: v = m v + u / P, w = w - a v)

    Without momentum, gradients in that residual keep the learning rate at which they were computed; otherwise they get
    that of the step in which they are applied, as in torch's velocity. With density=1 or algo="dense" the steps are
    those of torch.optim.SGD on the mean gradient, under every schedule.

    A step is taken on all ranks or on none: an exception on one rank is raised on all ranks and changes nothing, and
    training may continue. Parameters and, if the model is known, buffers are broadcast from rank 0 at the start;
    buffers that a forward pass has changed (BatchNorm's running statistics) are set to rank 0's in `step`. A parameter
    without a gradient on some ranks counts as zero there. One without a gradient on any rank does not change, as in
    torch, unless residuals contribute something. The residual of a parameter that is frozen, or without momentum has a
    learning rate of 0, is kept; with momentum, what is sent at that rate is lost.

    Sparse gradients, as of torch.nn.Embedding(sparse=True), are summed as rows: all of them and without a residual, or
    with `row_density` those of largest norm.

    Gradients are local to each rank until `step`, so accumulating them needs no `no_sync`. `zero_grad` instead of
    `step` skips a step; all ranks must take the same number of steps (see `join`). Clipping before `step` clips each
    rank's own gradients, and rank 0 logs a warning. With `grad_scaler`, all ranks skip a step with an overflow.

    Args:
        params: parameters or groups of them, as in torch, the same in the same order on every rank. Those that require
            gradients must be of floating point, on the CPU or (with CuPy) a CUDA device.
        lr: learning rate, as in torch.optim.SGD (default: 1e-3); the same on every rank, as are the next five.
        momentum: as in torch.optim.SGD (default: 0).
        dampening: as in torch.optim.SGD (default: 0).
        weight_decay: as in torch.optim.SGD (default: 0).
        nesterov: as in torch.optim.SGD (default: False).
        maximize: as in torch.optim.SGD (default: False).
        comm: communicator, as in `sparsecoll.allreduce`; None, the default, for the default process group of
            torch.distributed, otherwise MPI.COMM_WORLD. Several optimizers may share it.
        algo: name in `sparsecoll.ALGORITHMS`, or an Algorithm object, which is copied; None, the default, as above.
        density: fraction of all parameters that each rank selects, in (0, 1], or a Schedule (default: None, for 0.01,
            and without `algo` for `WarmUp(0.01)`). Ignored by algo="dense", which sends all.
        format: wire format, a name or a Format (default: "auto", which is 4 bits without `algo` and `value_dtype`).
        value_dtype: dtype of the values on the wire, "float16", "bfloat16" or "float32"; None, the default, for that of
            the gradients.
        row_density: as in `sparsecoll.torch.compressors.TopKCompressor`: which rows of sparse gradients are sent
            (default: None, all of them, without a residual).
        model: the model, whose buffers are kept the same and whose parameter names are used; required for this if
            `params` is not `model.parameters()`.
        grad_scaler: as in `DistributedOptimizer`.
        verify: as in `DistributedOptimizer`.
        timeout: as in `DistributedOptimizer`.

    Raises:
        ValueError, TypeError: an option or a parameter is invalid on some rank; the same on every rank.
        CommunicationError: ranks disagree on parameters or options; the same on every rank.
        RuntimeError: `comm` is None, and a launcher that MPI does not recognize has started several processes.

    Volume of a step: the algorithm's, and one message of a few bits for each parameter, to all ranks. Memory: the
    residual twice (n values each; float32 for half-precision parameters), and the velocity, without `algo` twice.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | torch.Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        comm: Any = None,
        algo: str | Algorithm | None = None,
        density: float | Schedule | None = None,
        format: str | Format = "auto",
        value_dtype: str | None = None,
        row_density: Density | None = None,
        model: torch.nn.Module | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        verify: bool | int = 0,
        timeout: float | None = None,
    ) -> None:
        if hasattr(momentum, "rank"):
            raise TypeError("momentum: expected a number, got a communicator: pass it by name, comm=...")
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        defaults |= {"nesterov": nesterov, "maximize": maximize}
        transport, known = communicator(comm, timeout), model_of(params) if model is None else model
        self._built = False

        def build(_: CollectiveCall) -> tuple[SparseSum, Options, Scaling]:
            compressor = compressor_of(algo, density, format, value_dtype, row_density)
            options = Options(verify=verify, timeout=timeout)
            refuse_wrapped(known, "params")
            super(SparseSGD, self).__init__(params, defaults)
            for group in self.param_groups:
                check_group(group, compressor)
            return compressor, options, Scaling(self, grad_scaler)

        self._compressor, options, self._scaling = collective(transport, "SparseSGD", timeout, build)
        cure = NO_MEAN if self._compressor.momentum is None else "DistributedOptimizer clips the mean"
        self._watch = Watch("SparseSGD", cure) if transport.rank == 0 and transport.size > 1 else None
        with agreed(transport, timeout):
            self._replica = Replica(transport, known, options)
            self._replica.context.momenta = partial(momenta_of, self, self._replica.params)
            self._replica.shared_options = lambda: common(self.param_groups)
            self._replica.changed = lambda: self._flat.differs(self.param_groups)
            self._flat = Accumulator(self._compressor, self._replica)
            self._model, self._built = known, True
            self._introduce()
        if transport.rank == 0 and self._flat.keeps_momentum:
            tell("SparseSGD", self.param_groups, self._compressor)
        elif transport.rank == 0:
            warn_of_momentum(self, self._compressor)

    @property
    def traffic(self) -> Traffic:
        """Traffic of this rank, which later calls update."""
        return self._replica.transport.traffic

    # -- parameters

    def _agreed(self) -> contextlib.AbstractContextManager[None]:
        return self._replica.agreed() if self._built else contextlib.nullcontext()

    @agreeing("_agreed")
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as in torch, on all ranks or on none; collective: its values are broadcast from rank 0."""
        if not self._built:
            super().add_param_group(param_group)
            return
        with restoring_groups(self.param_groups, self._flat.release):
            super().add_param_group(param_group)
            check_group(self.param_groups[-1], self._compressor)
            self._introduce()

    @agreeing("_replica.agreed")
    def _introduce(self) -> None:
        """Name the parameters that the groups have now, and broadcast those that are new from rank 0. Collective."""
        with self._flat.all_or_none() as begin:
            names = names_of(self.param_groups, self._model)
            new, signature = self._flat.compared(names)
            signature |= {**common(self.param_groups), "verify": self._replica.options.verify}
            signature |= {"grad_scaler": self._scaling.scaler is not None}
            self._replica.introduce(new, signature)
            begin()
            self._flat.rename(names)
        self._flat.take_over()

    # -- a step

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether GradScaler.step() leaves unscaling and the decision to `step`."""
        return self._scaling.asks_for_steps(True)

    @untraced
    @agreeing("_replica.agreed")
    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on all ranks; collective.

        Args:
            closure: function that computes this rank's loss and gradients again and returns the loss.

        Returns:
            The mean over the ranks of what the closures return; None without closure.

        Raises:
            NonFiniteError: On every rank, if a gradient contains NaN or infinity on some rank; the message names it.
            CommunicationError: On every rank, if the reduction failed, a closure raised on some rank, or learning
                rates, steps or (with `verify`) bits differ.
        """
        if is_trial_step(self):
            return self._make_state()
        has_scaler = self._scaling.scaler is not None or is_called_by_scaler(self)
        scaling = self._scaling if has_scaler and self._scaling.check(self) else None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            loss = mean_of_loss(self._replica.transport, loss, self._replica.options.timeout)
        if self._watch is not None:
            self._watch.check(self._flat.names)
        try:
            outcome, sums = self._reduced(scaling)
        except NonFiniteError:
            if scaling is None:
                raise
            scaling.report(True)
            return loss
        if scaling is not None:
            scaling.report(False)
        self._update(outcome, sums)
        return loss

    def _make_state(self) -> None:
        """Make the momentum that torch.distributed.checkpoint fills when it loads; zero, as if there were none."""
        sparse = self._replica.sparse_weights  # whose momentum is sparse, too
        for group in self.param_groups:
            for p in group["params"]:
                if group["momentum"] and p.grad is not None and id(p) not in sparse and not self._flat.keeps_momentum:
                    self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))

    def _reduced(self, scaling: Scaling | None = None) -> tuple[Outcome, Sums]:
        """Sum acc over the ranks. No state changes yet, and all ranks know that all have succeeded."""
        if self._watch is not None:
            self._watch.over(self._flat.names)
        while True:
            sums = self._flat.sums(self.param_groups, scaling)
            outcome = self._round()
            if outcome.members:
                self._introduce()
                continue
            if not outcome.trainable:
                return outcome, []
            if self._flat.fits(outcome):
                return outcome, sums
            self._flat.lay_out(outcome.trainable)

    def _round(self) -> Outcome:
        """Agree on whether the sums succeeded, and on which parameters have gradients. Collective."""
        groups, names = self.param_groups, self._flat.names
        live = {p for group in groups for p in group["params"] if group["lr"] != 0 or group["momentum"] != 0}
        here = self._replica.stopped_at is None
        row = self._replica.row(0, [here and takes_part(p) and p in live for p in names])

        def digest(outcome: Outcome) -> int | None:
            first = not outcome.most and outcome.trainable == self._flat.laid_out
            return fingerprint(names) if first and self._replica.transport.size > 1 else None

        return self._replica.agree("end of step", row, digest)

    def _update(self, outcome: Outcome, sums: Sums) -> None:
        """Update parameters, residuals and buffers by sums that are the same on all ranks."""
        self._replica.broadcast_buffers(outcome)
        left = self._flat.commit(self.param_groups, outcome.used) if sums else set()
        self._replica.context.step += 1
        groups, unrated = {p: group for group in self.param_groups for p in group["params"]}, self._flat.unrated
        size, steps = self._replica.transport.size, self._replica.context.step * self._flat.keeps_momentum
        try:
            for bucket, value in sums:
                with bucket.layout.device.stream_context():
                    for name, update in updates(bucket.layout, value):
                        p = bucket.params[name]
                        if name in outcome.used or (update and name not in left):
                            take_step(p, update, self.state, groups[p], size, steps, name not in unrated)
        except Exception as error:
            self._replica.suspect = True
            logger.error("rank %d: the step failed: %s", self._replica.transport.rank, error)
            raise
        if not outcome.joined:  # ranks that have left `join` do not step
            self._replica.compare_if_due()

    # -- other ranks

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Context manager around a loop that allows different numbers of batches on the ranks; collective.

        A rank that leaves the block early contributes values from its residual to the others' steps. When all have
        left, parameters, buffers and optimizer state are those of the rank that took the most steps. Means are always
        divided by the number of all ranks. If an exception leaves the block on one rank, the others raise
        CommunicationError in their next step.
        """
        with self._replica.reporting():
            yield
        with self._replica.leaving():
            while True:
                for p in self._flat.names:
                    p.grad = None
                try:
                    outcome, sums = self._reduced()
                except NonFiniteError:  # those who have data skip the step
                    continue
                if outcome.over:
                    break
                self._replica.broadcast_buffers(outcome)
                if sums:
                    self._flat.commit(self.param_groups, outcome.used)
                self._replica.follow_step(outcome)
            self._replica.follow("join", self, root=outcome.furthest)

    @agreeing("_replica.agreed")
    def move(self, comm: Any) -> None:
        """Continue on another communicator, as that of `sparsecoll.shrink` after a rank was lost; collective on it.

        Each rank keeps its residuals; those of lost ranks are lost. Parameters, buffers and momentum are set to those
        of the new rank 0, since only some ranks may have taken the step that failed.

        Args:
            comm: communicator, as in `sparsecoll.allreduce`.
        """
        self._replica.transport = as_transport(comm, self._replica.options.timeout)
        self._flat.move()
        self._replica.follow("move", self)

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """Return torch.optim.SGD's state_dict, with the residuals and the algorithm's state under "sparsecoll".

        Residuals differ between ranks, so save one file per rank. It can be loaded with torch.load(weights_only=True).
        A plain torch.optim.SGD can also load it and ignores the residuals.
        """
        state: dict[str, Any] = super().state_dict()
        without_numpy(state["param_groups"])
        state[STATE] = self._flat.state_dict(names_of(self.param_groups, self._model))
        return state

    @agreeing("_replica.agreed")
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, to continue with the same bits on as many ranks; collective.

        The state_dict of a plain torch.optim.SGD is accepted, too; residuals are then empty, and rank 0 warns
        if they were not. Without `algo`, its velocities are not used: the first steps are short again.

        Args:
            state_dict: a state that this rank saved.

        Raises:
            CommunicationError: The state was saved by another rank, or with another number of ranks (see
                `redistribute`).
            ValueError, TypeError: The state is of another model or optimizer.
        """
        if self._replica.changed():
            self._introduce()
        plain = {name: value for name, value in state_dict.items() if name != STATE}
        self._flat.load_state_dict(state_dict, self, lambda: super(SparseSGD, self).load_state_dict(plain))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("SparseSGD cannot be pickled or copied: save its state_dict()")
