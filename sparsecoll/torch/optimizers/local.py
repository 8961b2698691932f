"""LocalOptimizer: every rank takes some steps by itself, then all ranks move by the mean of their changes."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparsecoll.algorithms import Algorithm
from sparsecoll.errors import check_number
from sparsecoll.torch.compressors import Compressor, as_compressor
from sparsecoll.torch.optimizers.distributed import Wrapper
from sparsecoll.torch.optimizers.together import Together
from sparsecoll.torch.reduction.elastic import ElasticMeans
from sparsecoll.torch.reduction.grad_scaler import forget
from sparsecoll.torch.reduction.means import Means
from sparsecoll.torch.reduction.pace import Outer, OuterOptimizers, Pace
from sparsecoll.torch.reduction.rounds import ElasticGroup
from sparsecoll.torch.replica import guards
from sparsecoll.torch.replica.broadcasts import broadcast_optimizer, broadcast_tensors
from sparsecoll.torch.replica.calls import Options, agreeing, collective, communicator
from sparsecoll.torch.tensors.model import (
    Named,
    check_whole,
    describe,
    is_finite,
    model_of,
    named,
    names_in_groups,
    of_optimizer,
    own_part,
)
from sparsecoll.torch.tensors.private import is_called_by_scaler, is_trial_step, untraced, values_of
from sparsecoll.transport import LocalTransport, as_transport
from sparsecoll.transport.all_ranks import allgather
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.group import GroupTransport


class LocalOptimizer(Wrapper):
    """Wraps an optimizer: every rank steps by itself, and every few steps all ranks move by the mean of their changes.

        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        optimizer = LocalOptimizer(optimizer, model, every=10, compressor=QSGD(4, feedback=True))

    This is DiLoCo (Douillard and others, 2023), with the sparse or low-bit changes and the error feedback of SparseLoCo
    (2025) if the compressor has them. Adam-type optimizers divide a gradient by its recent size, and so learn little
    with a compressor that delays entries. Here they get every gradient of their rank, and their updates are compressed.

    1. Every rank takes `every` steps of the wrapped optimizer on its own gradients. Nothing is sent.
    2. The compressor, which may keep a residual, averages the ranks' changes: shared parameters - own parameters.
    3. `torch.optim.SGD(outer_lr, outer_momentum)`, with Nesterov momentum if any, updates the shared parameters by the
       mean, and every rank continues from them. Buffers that have changed (BatchNorm) are set to those of rank 0.

    With `fragments`, one fragment after the other has its mean, each of them every `every` steps, so that the network
    is used more evenly; with `delay`, ranks take that many steps while it is formed, and then go on from alpha * their
    own parameters + (1 - alpha) * the shared ones (Streaming DiLoCo, Douillard and others, 2025).

    After every `every`-th step (without `fragments` and `delay`), and after `synchronize`, parameters have the same
    bits on all ranks; in between they differ. Call `synchronize()` after the last step, also where numbers of steps
    differ, and step by this wrapper only. The state of the wrapped optimizer stays local to each rank.

    Parameters that are frozen, or that the wrapped optimizer does not have, are set to those of rank 0 at the start and
    not averaged later. A parameter that is frozen between two means is part of the next one. If you change frozen
    parameters yourself, such as those of a teacher that follows its student, do so right after a mean, when all ranks
    have the same student, or call `sparsecoll.torch.broadcast(teacher)` before you evaluate, save or unfreeze them.
    Values that you load or change yourself between a mean and the next step must be the same on all ranks: the next
    mean without a delay (such as that of `synchronize`) raises CommunicationError otherwise.

    Args:
        optimizer: torch optimizer of floating-point parameters, or several that step together, as Muon and AdamW.
        named_parameters: as in `DistributedOptimizer`.
        comm: as in `DistributedOptimizer`. For a model of fully_shard, whose shards a worker's ranks share, the process
            group of the ranks of all workers that have the same shard, such as `mesh.get_group("worker")`; each rank
            compresses its own shard.
        compressor: as in `DistributedOptimizer`, of the changes (default: "none"); its schedules count the means of a
            fragment as steps.
        every: number of steps from one mean to the next (default: 10); slow workers of an ElasticGroup may take fewer.
        outer_lr: learning rate of the step by the mean change (default: 1, which takes the mean of the parameters).
        outer_momentum: its Nesterov momentum, in [0, 1) (default: 0, none; DiLoCo uses 0.9 with a rate of 0.7).
        outer: in place of both, a torch optimizer of the same parameters, or several that have them all. It moves the
            shared parameters; schedules may change its rates, on all ranks alike.
        fragments: number of fragments, made equal in bytes, or a list of modules or of lists of parameters; parameters
            that are in none join the smallest one (default: one, of all parameters).
        delay: number of steps while a mean is formed, fewer than `every` (default: 0); one more for some fragments if
            these do not divide `every`. Buffers are then the same only after `synchronize`.
        alpha: share of its own parameters that a rank keeps after them (default: 0, so that those steps are lost).
        weight: function that returns this rank's weight in the next mean, as its number of samples, at least 0
            (default: all ranks weigh the same); it may be called several times for a mean. Changes of weight 0 are
            given up.
        backup_device: device of the shared parameters, changes and residuals, as "cpu" (default: that of the model).
        bucket_bytes: as in `DistributedOptimizer`.
        dense_below: as in `DistributedOptimizer`.
        timeout: as in `DistributedOptimizer`.
        verify: number of means after which the bits of all parameters are compared between ranks; 0, the default, for
            never, and True for 100.

    Raises:
        ValueError, TypeError: On every rank, if an option or a parameter is invalid on some rank.
        CommunicationError: On every rank, if ranks have different parameters, compressors or options.

    Volume: that of the compressor, divided by `every`; buffers that have changed; a few hundred bytes. Memory: the
    shared parameters, their momentum if any, and the state of the compressor (three times the model with top-k); during
    a mean, the change and the mean of its fragment, or the change alone with `ChunkedTopK` and no outer momentum.

    See Also:
        `sparsecoll.torch.DiLoCo`, which has the papers' values; `sparsecoll.torch.DistributedOptimizer`, which averages
            gradients in every step.
    """

    _engine: Means

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        named_parameters: torch.nn.Module | Iterable[tuple[str, torch.Tensor]],
        comm: Any = None,
        compressor: str | Compressor | Algorithm = "none",
        *,
        every: int = 10,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        outer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        fragments: int | Sequence[torch.nn.Module | Iterable[torch.Tensor]] | None = None,
        delay: int = 0,
        alpha: float = 0.0,
        weight: Callable[[], float] | None = None,
        backup_device: torch.device | str | None = None,
        bucket_bytes: int | None = 25 << 20,
        dense_below: int | None = None,
        verify: bool | int = 0,
        timeout: float | None = None,
    ) -> None:
        optimizer = Together(optimizer) if isinstance(optimizer, Sequence) else optimizer
        super().__init__(optimizer)
        group = comm if isinstance(comm, ElasticGroup) else None
        transport = LocalTransport() if group else communicator(comm, timeout)
        model, signature = model_of(named_parameters), dict[str, Any]()

        def made(
            call: CollectiveCall,
        ) -> tuple[Named, Named, Compressor, Options, list[torch.optim.Optimizer], Pace, Any]:
            pace = Pace(every, fragments, delay, alpha, weight)
            guards.refuse_wrapped(model, "named_parameters", within=False)
            guards.refuse_renormalized(model if group or transport.size > 1 else None)
            own = as_compressor(compressor)
            self._best = own.best_bucket if bucket_bytes is None else lambda _: bucket_bytes
            below = own.dense_below if dense_below is None else dense_below
            options = Options(self._best(transport.size), below, False, False, verify, timeout)
            given = of_optimizer(optimizer, named(named_parameters))
            check_whole(given.values(), comm)
            stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
            params = {name: p for name, p in given.items() if id(p) in stepped}
            others = {name: own_part(p) for name, p in given.items() if id(p) not in stepped}
            outers = _outer_optimizers(outer, list(params.values()), outer_lr, outer_momentum)
            if pace.fragments > len(params):
                raise ValueError(f"fragments: expected at most one for each parameter, got {pace.fragments}")
            call.signature |= {"every": every, "outer_lr": outer_lr, "outer_momentum": outer_momentum}
            call.signature |= {"outer": [str(own) for own in outers], "fragments": pace.fragments, "delay": delay}
            call.signature |= {"alpha": alpha, "weight": "none" if weight is None else "given"}
            call.signature["fragments of"] = {n: pace.known[id(p)] for n, p in params.items() if id(p) in pace.known}
            call.signature |= names_in_groups(optimizer, params)
            call.signature |= {"bucket_bytes": bucket_bytes, "dense_below": below, "verify": options.verify}
            call.signature |= {**own.signature(), **describe(others, "other parameter")}
            call.agree(entries=0)
            signature.update(call.signature, **describe(params))
            signature.pop("every")
            if group is not None and not own.stands_alone:
                raise ValueError(f"compressor: expected 'none' or 'chunktopk' with an ElasticGroup, got {own.name!r}")
            device = None if backup_device is None else torch.empty(0, device=backup_device).device
            broadcast_tensors(transport, others.values())
            return given, params, own, options, outers, pace, device

        try:
            given, params, own, options, outers, pace, device = collective(transport, "LocalOptimizer", timeout, made)
        except Exception:
            if isinstance(optimizer, Together):
                optimizer.release()
            raise
        for one in outers if transport.rank == 0 else ():
            guards.warn_of_momentum(one, own)
        guards.warn_of_state(optimizer, transport)
        self._every, self._held, self._closed, self._steps_inside = every, False, False, False
        guards.refuse_steps_outside(self)
        names = given.items if model is None else model.named_parameters
        arguments: Any = transport, optimizer, OuterOptimizers(outers), own, model, names, options, pace, device
        self._engine = Means(*arguments) if group is None else ElasticMeans(group, signature, *arguments)
        self._engine.regroup(params)

    _step_supports_amp_scaling = True  # GradScaler.step() calls `step` always, which refuses it

    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the wrapped optimizer on this rank; every `every`-th call also takes a mean.

        Args:
            closure: function that computes this rank's loss and gradients again and returns the loss.

        Returns:
            What the wrapped optimizer returns.

        Raises:
            NonFiniteError, CommunicationError: As `synchronize`. What the wrapped optimizer raises in a call that takes
                a mean is raised on every rank, and otherwise on this one.
        """
        if is_trial_step(self):
            return self._step_inside(None)
        if is_called_by_scaler(self):
            forget(self)
            kind = type(self).__name__
            raise RuntimeError(f"{kind} takes no GradScaler, which skips steps on single ranks: use bfloat16")
        due = not (self._held or self._closed) and self._is_due()
        with self._engine.replica.agreed() if due else contextlib.nullcontext():
            if not self._closed:
                self._engine.begin_step()
            result = self._step_inside(closure)
            self._engine.end_step(due)
        return result

    def _step_inside(self, closure: Callable[[], Any] | None) -> Any:
        self._steps_inside = True
        try:
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)
        finally:
            self._steps_inside = False

    @agreeing("_engine.replica.agreed")
    def _is_due(self) -> bool:
        return self._engine.is_due()

    def synchronize(self) -> None:
        """Take the mean of the changes now, if any rank has taken steps since the last one; collective.

        Call it on all ranks before you evaluate, save or export the model. Ranks may have taken different numbers of
        steps, or none: one that calls it early takes part in the others' means until all have called it, first with its
        changes, then with zeros. The next mean is taken `every` steps later.

        Raises:
            NonFiniteError: On every rank, if a parameter has become NaN or infinity on some rank: see `discard`.
            CommunicationError: On every rank, if the mean failed on some rank: parameters and residuals are as before,
                and move in the next mean. One with `delay` raises in the step in which it was to be taken.
        """
        if not self._closed:
            with self._engine.replica.agreed():
                self._engine.finish()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager: steps inside take no mean; the first step after it does if one is due.

        Back-propagation never communicates, so that gradients accumulate with or without it.
        """
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Context manager around a loop that allows different numbers of steps on the ranks; collective.

        A rank that leaves the block early takes part in the others' means, first with its changes since the last one,
        then with zeros; means are always divided by the number of all ranks. When all have left, a last mean is taken.
        If an exception leaves the block on one rank, the others raise CommunicationError in their next mean.
        """
        with self._engine.replica.reporting():
            yield
            if not self._closed:
                self._engine.finish(leaves=True)

    @torch.inference_mode(False)
    @torch.no_grad()
    def discard(self) -> None:
        """Give up the steps of all ranks since the last mean; collective. The cure for a NaN on one rank.

        Parameters return to the values from which all ranks have started, and gradients are thrown away. Buffers are
        set to those of the lowest rank on which they are finite. On a rank where the state of the wrapped optimizer has
        NaN or infinity, it becomes that of the lowest rank where it is finite, or is cleared if there is none.
        """
        replica, state = self._engine.replica, self.optimizer.state

        def finite(_: CollectiveCall) -> NDArray[Any]:
            tensors = replica.buffers.tensors.values(), [t for entries in state.values() for t in entries.values()]
            return allgather(replica.transport, np.array([*map(_are_finite, tensors)], np.uint8)).astype(bool)

        with replica.agreed():
            buffers, moments = replica.call("discard", finite).T
            self._engine.start_anew("discard", int(buffers.argmax()))
            self.optimizer.zero_grad()
            members = [*np.flatnonzero(moments)[:1].tolist(), *np.flatnonzero(~moments).tolist()]
            if not moments[replica.transport.rank]:
                state.clear()

            def copy(_: CollectiveCall) -> None:
                if moments.any() and not moments.all() and replica.transport.rank in members:
                    broadcast_optimizer(GroupTransport(replica.transport, members), self.optimizer)

            replica.call("discard", copy)

    def _load(self, state: dict[str, Any]) -> None:
        super()._load(state)
        for p, entries in dict[Any, Any](self.optimizer.state).items():
            for key, t in entries.items():
                if hasattr(t, "to_local") and hasattr(p, "to_local"):  # a file's DTensor has a mesh of its own
                    about = {"run_check": False, "shape": t.shape, "stride": t.stride()}
                    entries[key] = t.from_local(t.to_local(), p.device_mesh, t.placements, **about)

    def read(self, checkpoint_id: Any, *, key: str = "optimizer", storage_reader: Any = None) -> dict[str, Any]:
        """Return the state in a checkpoint that dcp.save of torch.distributed.checkpoint has written for one worker.

            dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=folder, process_group=mesh.get_group("shard"))
            ...
            optimizer.load_state_dict(optimizer.read(folder))

        The worker that saves it and the one that reads it may have any numbers of shards, or whole parameters. For
        another number of workers, pass all of their states to `redistribute`. Thresholds and factors are found again.
        Collective over the ranks of a worker.

        Args:
            checkpoint_id: folder of the worker's checkpoint, as for dcp.load.
            key: of this state in the checkpoint (default: "optimizer").
            storage_reader: as for dcp.load (default: None, which reads files).

        Returns:
            State for `load_state_dict`, with DTensors of this worker's mesh.

        Raises:
            ValueError: There is no such checkpoint or key, or a tensor of the wrapped optimizer has another shape than
                its parameter, so that it cannot be cut for another number of shards.
        """
        return self._engine.read(self.state_dict(), checkpoint_id, storage_reader, key)

    def move(self, comm: Any) -> None:
        """Continue on another communicator, as that of `sparsecoll.shrink` after a rank was lost; collective on it.

        Parameters, buffers and the wrapped optimizer's state are set to those of the new rank 0 after the last mean;
        each rank keeps its residuals, and the steps since that mean are dropped.

        Args:
            comm: communicator, as in `sparsecoll.allreduce`.
        """
        transport = as_transport(comm, self._engine.replica.options.timeout)
        self._engine.replica.options.bucket_bytes = self._best(transport.size)
        self._engine.use(transport)
        self._engine.start_anew("move", 0, everything=True)
        others = self._engine.others()
        self._engine.replica.call("move", lambda _: broadcast_tensors(transport, others))
        self._engine.replica.call("move", lambda _: broadcast_optimizer(transport, self.optimizer))

    def close(self) -> None:
        """Take no more means: each rank continues by itself."""
        self._closed = True
        self._engine.close()
        if isinstance(self.optimizer, Together):
            self.optimizer.release()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Call the wrapped optimizer's zero_grad."""
        self.optimizer.zero_grad(set_to_none)

    def __repr__(self) -> str:
        return f"LocalOptimizer({self.optimizer!r}, every={self._every})"


def _outer_optimizers(
    given: Any, params: list[torch.Tensor], lr: float, momentum: float
) -> list[torch.optim.Optimizer]:
    """Return the optimizers of the shared parameters: those given, or SGD."""
    check_number("outer_lr", lr, "[0, inf)")
    check_number("outer_momentum", momentum, "[0, 1)")
    if given is None:
        return [Outer(params, lr, momentum, nesterov=momentum > 0)]
    outers = list(given) if isinstance(given, Sequence) else [given]
    for own in outers:
        if not isinstance(own, torch.optim.Optimizer):
            raise TypeError(f"outer: expected torch optimizers, got {type(own).__name__}")
        if own.state:
            raise ValueError("outer: expected an optimizer that has taken no step: load its state into this one")
    if (lr, momentum) != (1.0, 0.0):
        raise ValueError("outer_lr, outer_momentum: expected none beside outer, which has its own")
    counts = collections.Counter(id(p) for own in outers for group in own.param_groups for p in group["params"])
    expected = {id(p): 1 for p in params}
    if counts != expected:
        wrong = next(key for key in [*expected, *counts] if counts.get(key) != expected.get(key))
        shape = next((tuple(p.shape) for p in params if id(p) == wrong), None)
        found = f"{counts[wrong]} times the one of shape {shape}" if shape is not None else "another one"
        raise ValueError(f"outer: expected every parameter of the wrapped optimizer once, got {found}")
    return outers


def _are_finite(values: Iterable[Any]) -> bool:
    """Return whether no tensor among these values has NaN or infinity."""
    return all(is_finite(own_part(values_of(v))) for v in values if torch.is_tensor(v) and v.is_floating_point())
