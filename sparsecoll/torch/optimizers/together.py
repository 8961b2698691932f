"""Several torch optimizers as one: Muon takes matrices only, and leaves the other parameters to AdamW."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

REFUSED = "add_param_group", "state_dict", "load_state_dict"  # what acts on the state or the groups of all


class Together(torch.optim.Optimizer):
    """Optimizers of different parameters that step together, with one state and all of their groups.

    Args:
        optimizers: which keep their groups, so that schedules of theirs act, and give up their states to this one.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for own in optimizers:
            if not isinstance(own, torch.optim.Optimizer):
                raise TypeError(f"optimizer: expected torch optimizers, got {type(own).__name__}")
        params = [p for own in optimizers for group in own.param_groups for p in group["params"]]
        if len(set(params)) < len(params):
            raise ValueError("optimizer: expected every parameter in one of the optimizers, got one in two of them")
        super().__init__(params, {})
        self._optimizers = list(optimizers)
        self.param_groups = [group for own in optimizers for group in own.param_groups]
        for own in optimizers:
            self.state.update(own.state)
            for name in REFUSED:
                setattr(own, name, partial(_refuse, name))
        self._share()

    def _share(self) -> None:
        start = 0
        for own in self._optimizers:
            end = start + len(own.param_groups)
            own.param_groups, own.state, start = self.param_groups[start:end], self.state, end

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Evaluate the closure, if any, and step all."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for own in self._optimizers:
            own.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all, also after `release`."""
        for own in self._optimizers:
            self.state.update(own.state)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` has returned."""
        super().load_state_dict(state_dict)
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after the start, for these optimizers, too: the group would belong to one of them or to all."""
        if hasattr(self, "_optimizers"):
            _refuse("add_param_group")
        super().add_param_group(param_group)

    def release(self) -> None:
        """Let these optimizers be used by themselves."""
        for own in self._optimizers:
            params = {p for group in own.param_groups for p in group["params"]}
            own.state = defaultdict(dict, {p: entries for p, entries in self.state.items() if p in params})
            for name in REFUSED:
                vars(own).pop(name, None)


def _refuse(name: str, *_: Any, **__: Any) -> None:
    cure = "make this one anew" if name == "add_param_group" else "use that of the optimizer that wraps them"
    raise RuntimeError(f"{name}: expected one inner optimizer, got several: {cure}")
