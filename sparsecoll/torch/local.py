"""LocalOptimizer: every rank takes some steps by itself, then all ranks move by the mean of their changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from sparsecoll.algorithms import Algorithm
from sparsecoll.telemetry.traffic import Traffic
from sparsecoll.torch.broadcasts import broadcast_optimizer, broadcast_tensors
from sparsecoll.torch.calls import collective, communicator
from sparsecoll.torch.compressors import Compressor
from sparsecoll.torch.grad_scaler import forget, is_called_by_scaler
from sparsecoll.torch.guards import refuse_wrapped, warn_of_state
from sparsecoll.torch.layout import takes_part
from sparsecoll.torch.members import Members
from sparsecoll.torch.optimizer import DistributedOptimizer, Wrapper, of_optimizer
from sparsecoll.torch.options import check_integer
from sparsecoll.torch.state import STATE, is_trial_step
from sparsecoll.torch.tensors import Named, check_buffers, check_whole, describe, model_of, named
from sparsecoll.torch.timeline import Timeline
from sparsecoll.transport import as_transport
from sparsecoll.transport.call import CollectiveCall

LOCAL = "sparsecoll_local"  # key of this optimizer's own part of a state_dict


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
       mean, and every rank continues from them. Buffers (BatchNorm) are set to those of rank 0.

    After every `every`-th step, and after `synchronize`, parameters have the same bits on all ranks; in between they
    differ. All ranks must take the same number of steps: call `synchronize()` after the last one. The state of the
    wrapped optimizer stays local to each rank.

    Parameters that are frozen, or that the wrapped optimizer does not have, are set to those of rank 0 at the start and
    not averaged later. A parameter that is frozen between two means is part of the next one. If you change frozen
    parameters yourself, such as those of a teacher that follows its student, do so right after a mean, when all ranks
    have the same student, or call `sparsecoll.torch.broadcast(teacher)` before you evaluate, save or unfreeze them.

    Args:
        optimizer: torch optimizer of floating-point parameters.
        named_parameters: `model.named_parameters()`, the model itself, or pairs (name, parameter) that include all of
            the optimizer's parameters; the same on every rank. With a list of pairs, the model's buffers are not known.
            Several optimizers may be given one model if each parameter is updated by at most one of them.
        comm: communicator, as in `sparsecoll.allreduce`; None, the default, for the default process group of
            torch.distributed, otherwise MPI.COMM_WORLD.
        compressor: as in `DistributedOptimizer`, of the changes (default: "none").
        every: number of steps from one mean to the next (default: 10).
        outer_lr: learning rate of the step by the mean change (default: 1, which takes the mean of the parameters).
        outer_momentum: its Nesterov momentum, in [0, 1) (default: 0, none; DiLoCo uses 0.9 with a rate of 0.7).
        bucket_bytes: as in `DistributedOptimizer`.
        dense_below: as in `DistributedOptimizer`.
        verify: number of means after which the bits of all parameters are compared between ranks; 0, the default, for
            never, and True for 100.
        timeout: as in `DistributedOptimizer`.
        timeline: as in `DistributedOptimizer`.

    Raises:
        ValueError, TypeError: On every rank, if an option or a parameter is invalid on some rank.
        CommunicationError: On every rank, if ranks have different parameters, compressors or options.

    Volume: that of the compressor, divided by `every`. Memory: the shared parameters, their mean change, and what
    `DistributedOptimizer` and the compressor need.

    See Also:
        `sparsecoll.torch.DistributedOptimizer`, which averages gradients in every step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: torch.nn.Module | Iterable[tuple[str, torch.Tensor]],
        comm: Any = None,
        compressor: str | Compressor | Algorithm = "none",
        *,
        every: int = 10,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        bucket_bytes: int | None = 25 << 20,
        dense_below: int = 1024,
        verify: bool | int = 0,
        timeout: float | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        super().__init__(optimizer)
        self._every, self._since = every, 0  # steps from one mean to the next, and since the last one
        self._moved: set[str] = set()  # parameters that took part in these steps; a mean of their changes is due
        transport, model = communicator(comm), model_of(named_parameters)

        def made(call: CollectiveCall) -> tuple[Named, Named, Named, torch.optim.Optimizer]:
            check_integer("every", every, 1)
            refuse_wrapped(model, "named_parameters")
            given = of_optimizer(optimizer, named(named_parameters))
            check_whole(given.values())
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            params = {name: p for name, p in given.items() if id(p) in own}
            others = {name: p for name, p in given.items() if id(p) not in own}
            shared = {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in params.items()}
            outer = torch.optim.SGD(shared.values(), outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0)
            call.signature |= {"every": every, "outer_lr": outer_lr, "outer_momentum": outer_momentum}
            call.signature |= describe(others, "other parameter")
            call.agree(entries=0)
            broadcast_tensors(transport, others.values())
            return given, params, shared, outer

        given, self._params, self._shared, outer = collective(transport, "LocalOptimizer", None, made)
        self._model, self._named = model, given.items if model is None else model.named_parameters
        self._members = Members(optimizer, self._params, self._named)
        self._outer = DistributedOptimizer(
            outer,
            self._shared.items(),
            comm,
            compressor,
            bucket_bytes=bucket_bytes,
            dense_below=dense_below,
            overlap=False,
            verify=verify,
            timeout=timeout,
            timeline=timeline,
        )
        self._follow(self._params)
        warn_of_state(optimizer, transport)

    _step_supports_amp_scaling = True  # GradScaler.step() calls `step` always, which refuses it

    @property
    def traffic(self) -> Traffic:
        """Traffic of this rank, which later calls update."""
        return self._outer.traffic

    @torch.no_grad()
    def _follow(self, names: Iterable[str]) -> None:
        """Set the named parameters to the shared ones, and the buffers to rank 0's. Collective."""
        for name in names:
            self._params[name].copy_(self._shared[name])
        if self._model is None:
            return
        buffers, transport = dict(self._model.named_buffers()), self._outer._engine.transport

        def broadcast(call: CollectiveCall) -> None:
            check_buffers(buffers)
            call.signature |= describe(buffers, "buffer")
            call.agree(entries=0)
            broadcast_tensors(transport, buffers.values())

        if buffers:
            collective(transport, "buffers", None, broadcast)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step of the wrapped optimizer on this rank; every `every`-th call also is a `synchronize`.

        Args:
            closure: function that computes this rank's loss and gradients again and returns the loss.

        Returns:
            What the wrapped optimizer returns.

        Raises:
            NonFiniteError: On every rank, if a parameter has become NaN or infinity on some rank. "none" and "fp16" do
                not look, which would take another pass over memory: the parameter is then so on all ranks.
            CommunicationError: The mean failed on some rank; the shared parameters and residuals are as before.
        """
        if is_trial_step(self):
            return self.optimizer.step()
        if is_called_by_scaler(self):
            forget(self)
            raise RuntimeError("LocalOptimizer takes no GradScaler, which skips steps on single ranks: use bfloat16")
        self._begin()
        result = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        self._since += 1
        if self._since >= self._every:
            self.synchronize()
        return result

    @torch.no_grad()
    def _begin(self) -> None:
        """Before a step: note where parameters start that it may move, and that did not take part since the last mean.

        All ranks start from the same values, which the user may have loaded since then.
        """
        if not self._since:
            self._follow_groups()
            self._moved.clear()
        for name in self._params.keys() - self._moved:
            if takes_part(self._params[name]):
                self._moved.add(name)
                self._shared[name].copy_(self._params[name])

    def synchronize(self) -> None:
        """Take the mean of the changes now, unless it was taken after the last step; collective.

        Call it before you evaluate, save or export the model, after the same number of steps on every rank. The next
        mean is taken `every` steps later. If this raises, `step` and `synchronize` take the mean once more.

        Raises:
            NonFiniteError: On every rank, if a parameter has become NaN or infinity on some rank. "none" and "fp16" do
                not look, which would take another pass over memory: the parameter is then so on all ranks.
            CommunicationError: The mean failed on some rank; the shared parameters and residuals are as before.
        """
        if not self._since:
            return
        self._follow_groups()
        with torch.no_grad():
            for name, shared in self._shared.items():
                moved = name in self._moved  # which tells also of one that was frozen since then
                shared.requires_grad_(moved)
                shared.grad = shared - self._params[name] if moved else None
        self._outer.step()
        self._moved = {name for name, shared in self._shared.items() if shared.grad is not None}  # on some rank
        self._outer.zero_grad()
        self._since = 0
        self._follow(self._moved)

    def add_param_group(
        self, param_group: dict[str, Any], named_parameters: Iterable[tuple[str, torch.Tensor]] = ()
    ) -> None:
        """Add a group as in torch; collective. All ranks start from rank 0's values of these parameters.

        Args:
            param_group: as in torch; its options are those of the wrapped optimizer.
            named_parameters: pairs (name, parameter). Parameters without a name have the one under which the model has
                them, otherwise they are called group<i>.<j>.
        """
        self._regroup(self._add_to_wrapped(param_group, self._members, named_parameters))

    def _follow_groups(self) -> None:
        """Share parameters that were put into the wrapped optimizer itself, and drop those that have left.

        Collective if there are any.
        """
        if self._members.changed():
            self._regroup(self._members.named())

    def _regroup(self, params: Named) -> None:
        """Share parameters that are not shared yet, with rank 0's values, and drop those that have left. Collective."""
        added, stay, outer = self._members.came(params), self._members.staying(), self._outer.optimizer
        shared = {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in added.items()}
        self._outer._engine.add(shared, stay)  # if this raises, nothing has changed
        for name in self._shared.keys() - stay.keys():
            outer.state.pop(self._shared[name], None)
        self._moved = {stay[name] for name in self._moved if name in stay}
        for own, new in ((self._params, added), (self._shared, shared)):
            all_now = {**{stay[name]: p for name, p in own.items() if name in stay}, **new}
            own.clear()
            own.update(all_now)
        order = [name for name, _ in self._named() if name in self._shared]  # as if they had been there from the start
        outer.param_groups[0]["params"] = [self._shared[name] for name in dict.fromkeys([*order, *self._shared])]
        with torch.no_grad():
            for name, p in added.items():
                p.copy_(shared[name])

    def move(self, comm: Any) -> None:
        """Continue on another communicator, such as that of `sparsecoll.shrink` after a rank was lost; collective on
        it.

        Parameters and the wrapped optimizer's state are set to those of the new rank 0 after the last mean; each rank
        keeps its residuals, and the steps since that mean are dropped.

        Args:
            comm: communicator, as in `sparsecoll.allreduce`.
        """
        transport = as_transport(comm)
        self._outer.move(comm)
        self._since = 0
        collective(transport, "move", None, lambda _: broadcast_optimizer(transport, self.optimizer))
        self._follow(self._moved)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state_dict, with the shared parameters and the state of the compressor.

        Save one file per rank, with the model's own state_dict if steps were taken since the last mean.
        """
        outer = self._outer.state_dict()
        shared = {name: p.detach().clone() for name, p in self._shared.items()}
        own = {"since": self._since, "moved": sorted(self._moved), "shared": shared}
        inner: dict[str, Any] = self.optimizer.state_dict()
        return {**inner, STATE: outer.pop(STATE), LOCAL: {**own, "outer": outer}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; collective. Load the model's state as well.

        The state of a plain optimizer is accepted, too; the ranks then start from the model's parameters.

        Args:
            state_dict: a state that this rank saved, or that `redistribute` made.

        Raises:
            CommunicationError: The state was saved by another rank, or with another number of ranks, or ranks load
                states of different steps.
            ValueError: The state is of another model or compressor, or lacks what cannot be known without it.
        """

        def read(call: CollectiveCall) -> dict[str, Any] | None:
            own = self._own(state_dict)
            since = None if own is None else own["since"]
            call.signature |= {"steps since the last mean": since}
            call.agree(entries=0)
            return own

        self._follow_groups()
        own = collective(self._outer._engine.transport, "LocalOptimizer.load_state_dict", None, read)
        inner = {name: value for name, value in state_dict.items() if name not in (STATE, LOCAL)}
        if own is None:
            self._since, self._moved = 0, set()
            self._outer.load_state_dict(self._outer.optimizer.state_dict())
        else:
            self._outer.load_state_dict({**own["outer"], STATE: state_dict[STATE]})
            self._since, self._moved = own["since"], set(own["moved"])
            with torch.no_grad():
                for name, p in own["shared"].items():
                    self._shared[name].copy_(p)
        self.optimizer.load_state_dict(inner)

    def _own(self, state_dict: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return this optimizer's own part of a state, or None for that of a plain optimizer.

        Raises:
            ValueError: It lacks something, or is of other parameters.
        """
        own = state_dict.get(LOCAL)
        if own is None:
            return None
        missing = {"since", "moved", "shared", "outer"}.difference(own) | {STATE}.difference(state_dict)
        if missing:
            raise ValueError(f"state_dict: expected that of LocalOptimizer, got one without {min(missing)!r}")
        unknown = own["shared"].keys() - self._shared.keys()
        if unknown:
            raise ValueError(f"state_dict: expected names of parameters, got {min(unknown)!r}")
        return dict(own)

    def close(self) -> None:
        """Take no more means: each rank continues by itself."""
        self._outer.close()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Call the wrapped optimizer's zero_grad."""
        self.optimizer.zero_grad(set_to_none)

    def __repr__(self) -> str:
        return f"LocalOptimizer({self.optimizer!r}, every={self._every})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("LocalOptimizer cannot be pickled: save its state_dict()")
