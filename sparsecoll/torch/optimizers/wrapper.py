"""What DistributedOptimizer and LocalOptimizer have in common: they are optimizers that wrap another one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from sparsecoll.telemetry.traffic import Traffic
from sparsecoll.torch.reduction.state import LOCAL, STATE
from sparsecoll.torch.replica.calls import agreeing
from sparsecoll.torch.tensors.private import state_dict_hooks
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
        traffic: Traffic = self._engine.replica.transport.traffic
        return traffic

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
        state = {**self.optimizer.state_dict(), **self._engine.state_dict()}
        for after in state_dict_hooks(self, "state_dict_post"):
            state = _replaced(state, after(self, state))
        return state

    @agreeing("_engine.replica.agreed")
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, to continue with the same bits on as many ranks; collective.

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

        def hooked(_: CollectiveCall) -> dict[str, Any]:
            state = dict(state_dict)
            for before in state_dict_hooks(self, "load_state_dict_pre"):
                state = _replaced(state, before(self, state))
            return state

        state = self._engine.replica.call("hooks of load_state_dict", hooked)
        inner = {name: value for name, value in state.items() if name not in (STATE, LOCAL)}
        self._engine.load_state_dict(state, lambda: self.optimizer.load_state_dict(inner))
        for after in state_dict_hooks(self, "load_state_dict_post"):
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"{type(self).__name__} cannot be pickled: save its state_dict()")


@contextlib.contextmanager
def restoring_groups(groups: list[Any], release: Callable[[], None]) -> Iterator[int]:
    """Context manager that yields the number of groups; if it raises, those that were added in it are removed.

    All ranks raise then, and discard the buckets by `release`, which some may have done already.
    """
    count = len(groups)
    try:
        yield count
    except Exception:
        del groups[count:]
        release()
        raise


def _replaced(state: dict[str, Any], result: Any) -> dict[str, Any]:
    """Return what a hook has returned, or the state, which it may have changed in place, if that is None."""
    return state if result is None else result  # type: ignore[no-any-return]
