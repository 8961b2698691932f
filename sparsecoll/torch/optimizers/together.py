"""Several torch optimizers as one: Muon takes matrices only, and leaves the other parameters to AdamW."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


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
            own.add_param_group = self.add_param_group  # type: ignore[method-assign]
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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` has returned."""
        super().load_state_dict(state_dict)
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after the start, for these optimizers, too: the group would belong to one of them or to all."""
        if hasattr(self, "_optimizers"):
            raise RuntimeError("add_param_group: expected one inner optimizer, got several: make this one anew")
        super().add_param_group(param_group)
