"""What DistributedOptimizer and LocalOptimizer have in common: they are optimizers that wrap another one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from sparsecoll.torch.replica.calls import collective
from sparsecoll.torch.replica.replica import Members
from sparsecoll.torch.tensors.model import Named
from sparsecoll.torch.tensors.private import state_dict_hooks
from sparsecoll.transport import Transport
from sparsecoll.transport.call import CollectiveCall


def forwarded(name: str) -> property:
    """An attribute of the wrapped optimizer."""
    return property(
        lambda self: getattr(self.optimizer, name), lambda self, value: setattr(self.optimizer, name, value)
    )


class Wrapper(torch.optim.Optimizer):
    """A torch optimizer that wraps another one, whose groups and state are its own, too."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        super().__setstate__({})  # the hooks of a torch optimizer

    param_groups: Any = forwarded("param_groups")
    state: Any = forwarded("state")
    defaults: Any = forwarded("defaults")

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped optimizer, such as train() and eval() of schedule-free ones."""
        if name == "optimizer" or any(name in vars(kind) for kind in Wrapper.__subclasses__()):  # the library's own
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.optimizer, name)

    def _with_hooks(self, own: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the wrapped optimizer's state_dict and `own()`, as the hooks on `state_dict` leave them."""
        for before in state_dict_hooks(self, "state_dict_pre"):
            before(self)
        state = {**self.optimizer.state_dict(), **own()}
        for after in state_dict_hooks(self, "state_dict_post"):
            state = _replaced(state, after(self, state))
        return state

    def _load_with_hooks(
        self,
        transport: Transport,
        timeout: float | None,
        state_dict: Mapping[str, Any],
        load: Callable[[dict[str, Any]], None],
    ) -> None:
        """Load a state_dict as the hooks on `load_state_dict` leave it. Collective."""

        def hooked(_: CollectiveCall) -> dict[str, Any]:
            state = dict(state_dict)
            for before in state_dict_hooks(self, "load_state_dict_pre"):
                state = _replaced(state, before(self, state))
            return state

        load(collective(transport, "hooks of load_state_dict", timeout, hooked))
        for after in state_dict_hooks(self, "load_state_dict_post"):
            after(self)

    def _add_group(
        self,
        param_group: dict[str, Any],
        members: Members,
        given: Iterable[tuple[str, torch.Tensor]],
        introduce: Callable[[Named], None],
        release: Callable[[], None],
    ) -> None:
        """Add a group to the wrapped optimizer and introduce its parameters, see `Members.named`. Collective."""
        with restoring_groups(self.optimizer.param_groups, release) as number:
            self.optimizer.add_param_group(param_group)
            introduce(members.named(number, given))


@contextlib.contextmanager
def restoring_groups(groups: list[Any], release: Callable[[], None]) -> Iterator[int]:
    """Context manager: if it raises, as it does on all ranks, the groups that were added in it are taken back.

    Args:
        groups: of an optimizer, whose number it returns.
        release: discards the buckets, which some ranks may have done already.
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
