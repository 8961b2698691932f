"""torch.amp.GradScaler: the scale of gradients, and agreement of all ranks on the steps that it skips."""

from __future__ import annotations

import sys

import torch

from sparsecoll.torch.compressors import Compressor


def calling_scaler() -> torch.amp.GradScaler | None:
    """Return the scaler of which a method reads the property that calls this function, from the method's frame."""
    scaler = sys._getframe(2).f_locals.get("self")
    return scaler if isinstance(scaler, torch.amp.GradScaler) else None


class LossScale:
    """The scale of gradients that DistributedOptimizer reduces.

    Attributes:
        scaler: the torch.amp.GradScaler that has scaled the loss, once it is known.
        saved: the scale with which a state was loaded, until the scaler is known; None before the first step, as long
            as residuals hold nothing.
        steps: whether the scaler takes the step with these gradients.
        scale: of the gradients of the reduction under way.
    """

    def __init__(self) -> None:
        self.scaler: torch.amp.GradScaler | None = None
        self.saved: float | None = None
        self.steps = False
        self.scale = 1.0

    @property
    def now(self) -> float:
        """The scaler's scale."""
        if self.scaler is not None:
            return float(self.scaler.get_scale())
        return 1.0 if self.saved is None else self.saved

    @property
    def known(self) -> float | None:
        """`now`, for states; None before the first step, whose loop may have a scaler or not."""
        return None if self.scaler is None and self.saved is None else self.now

    def begin(self) -> None:
        """Note the scale of the gradients of a new reduction."""
        self.steps, self.scale = False, self.now

    def fits(self, scaler: torch.amp.GradScaler | None) -> bool:
        """Return whether residuals got gradients without the scale of a scaler, or can still be divided by it.

        Args:
            scaler: that takes the step; None in a step that one may have taken already.
        """
        if scaler is None:
            return self.steps or self.scale == 1.0
        first = self.scaler is None and self.saved is None
        return first or scaler is self.scaler or self.scale == scaler.get_scale()

    def of(self, compressor: Compressor) -> float:
        """Return what gradients are divided by before they are clipped or added to a residual, which is unscaled."""
        return self.scale if compressor.unscales else 1.0

    @property
    def was_unknown(self) -> bool:
        """Whether gradients were reduced with the scale in them, since the scaler was found only at the step."""
        return self.saved is None and self.scaler is not None and self.scale == 1.0

    def stepped(self) -> None:
        """The optimizer has stepped."""
        self.end()
        self.saved = 1.0 if self.saved is None else self.saved

    def follow(self, scaler: torch.amp.GradScaler | None) -> None:
        """Take the scale of this scaler from the next reduction on; None: there is none."""
        self.scaler, self.saved = scaler, 1.0

    def end(self) -> None:
        """The step was taken or given up."""
        self.steps = False


class Scaling:
    """A step that a torch.amp.GradScaler takes.

    For optimizers with `_step_supports_amp_scaling` the scaler sets `grad_scale` and `found_inf` while it calls step().

    Attributes:
        scale: what gradients are to be divided by; 1 if the scaler has unscaled them.
        found: whether a gradient of this rank is not finite.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        scale = getattr(optimizer, "grad_scale", None)
        self.scale = 1.0 if scale is None else float(scale)
        self.found = float(getattr(optimizer, "found_inf", 0.0)) > 0
        self._optimizer, self._scaler = optimizer, scaler

    def settle(self, found: bool) -> None:
        """Tell the scaler whether any rank has found an overflow, so that all scales change alike."""
        marks = self._scaler._per_optimizer_states[id(self._optimizer)]["found_inf_per_device"]
        if not marks:  # no gradients on this rank
            where = self._scaler._scale
            assert where is not None
            marks[where.device] = torch.zeros((), device=where.device)
        if found:
            for mark in marks.values():
                mark.fill_(1.0)

    def fail(self) -> None:
        """Remove the attributes that the scaler would remove only after a step that succeeds."""
        for name in ("grad_scale", "found_inf"):
            vars(self._optimizer).pop(name, None)
