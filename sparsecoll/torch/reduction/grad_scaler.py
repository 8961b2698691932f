"""torch.amp.GradScaler: the scale of gradients, and agreement of all ranks on the steps that it skips."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.amp.grad_scaler import OptState

from sparsecoll.torch.compressors import Compressor
from sparsecoll.torch.tensors import private
from sparsecoll.transport import Transport
from sparsecoll.transport.all_ranks import broadcast


def enabled(scaler: Any) -> torch.amp.GradScaler | None:
    """Return the argument `grad_scaler`, after a check, or None for a scaler that does not scale."""
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"grad_scaler: expected a torch.amp.GradScaler or None, got {scaler!r}")
    return scaler if scaler is not None and scaler.is_enabled() else None


def refuse_unknown(known: Any, compressor: Compressor, owner: str) -> None:
    """In a step, raise if a GradScaler calls it by whose scale the gradients in a residual were not divided.

    Args:
        known: the scaler by which they were, or None.
        owner: of the argument `grad_scaler`.
    """
    scaler = private.calling_scaler() if compressor.unscales else None
    if scaler not in (None, known) and scaler.get_scale() != 1:
        raise RuntimeError(
            f"{owner} has to know the GradScaler that calls step(), since residuals would keep scaled gradients: pass"
            f" grad_scaler=scaler to {owner}"
        )


def forget(optimizer: torch.optim.Optimizer) -> None:
    """Remove the attributes that a GradScaler would remove only after a step that succeeds."""
    for name in ("grad_scale", "found_inf"):
        vars(optimizer).pop(name, None)


class Scaling:
    """The GradScaler that a loop uses with an optimizer, if any; one that is disabled says that there is none.

    Attributes:
        scaler: the scaler, or None.
        scale: of the gradients of the reduction under way.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        self.scaler, self.scale = enabled(scaler), 1.0
        self._known = scaler is not None
        self._name, self._key = type(optimizer).__name__, id(optimizer)

    def asks_for_steps(self, local: bool) -> bool:
        """Return `_step_supports_amp_scaling`: true for `local` gradients, or to refuse a scaler not passed."""
        return local if self.scaler is not None else not self._known

    def begin(self) -> None:
        """Get the scale of the gradients of a new reduction."""
        self.scale = 1.0 if self.scaler is None or self.unscaled else float(self.scaler.get_scale())

    def follow(self, transport: Transport, root: int) -> None:
        """Take the scale, and the steps since it grew, of the rank that has made the most steps. Collective."""
        state = {} if self.scaler is None else self.scaler.state_dict()
        own = np.array([state.get("scale", 1.0), state.get("_growth_tracker", 0)])
        scale, steps = broadcast(transport, own, root).tolist()
        if self.scaler is not None:
            self.scaler.load_state_dict({**state, "scale": scale, "_growth_tracker": int(steps)})

    @property
    def _state(self) -> dict[str, Any]:
        """The scaler's record of the optimizer since its last update()."""
        return {} if self.scaler is None else private.scaler_state(self.scaler, self._key)

    @property
    def unscaled(self) -> bool:
        """Whether unscale_() has divided the gradients by the scale."""
        return self._state.get("stage") is OptState.UNSCALED

    @property
    def found(self) -> bool:
        """Whether the scaler has found a gradient of this rank that is not finite."""
        return any(float(mark) > 0 for mark in self._state.get("found_inf_per_device", {}).values())

    def check(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return `is_called_by_scaler` for a step; raise if that scaler is not the one that was passed."""
        called, name, cure = private.is_called_by_scaler(optimizer), self._name, ""
        if self.scaler is None and called:
            cure = f"{name} has to know the GradScaler that calls its step(): pass grad_scaler=scaler to {name}"
        elif self.scaler is not None and not self._state:
            cure = (
                f"{name} was given a grad_scaler, by whose scale gradients were divided, but it does not take this"
                " step: call its step(optimizer), or leave grad_scaler= out"
            )
        if cure:
            forget(optimizer)
            raise RuntimeError(cure)
        return called

    def overflows(self, optimizer: torch.optim.Optimizer) -> bool:
        """Unscale means, unless their gradients were; return whether one is not finite, the same on all ranks."""
        assert self.scaler is not None
        if self.unscaled:
            private.check_overflow(self.scaler, optimizer)
        else:
            self.scaler.unscale_(optimizer)
        return self.found

    def report(self, found: bool) -> None:
        """Tell the scaler whether any rank has found an overflow, so that the scale changes on all ranks."""
        if not (marks := self._state["found_inf_per_device"]):  # no gradients on this rank
            assert self.scaler is not None
            where = private.scale_device(self.scaler)
            marks[where] = torch.zeros((), device=where)
        if found:
            for mark in marks.values():
                mark.fill_(1.0)
