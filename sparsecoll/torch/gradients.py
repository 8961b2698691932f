"""What happens to gradients between back-propagation and step(): GradScaler's scale, and changes by the user."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from sparsecoll.torch.compressors import Compressor

logger = logging.getLogger(__name__)


class LossScale:
    """The scale of gradients that DistributedOptimizer reduces.

    Attributes:
        scaler: the torch.amp.GradScaler that has scaled the loss, once it is known.
        unscaled: whether it has divided the gradients by its scale.
        scale: of the gradients of the reduction under way.
    """

    def __init__(self) -> None:
        self.scaler: torch.amp.GradScaler | None = None
        self.unscaled = False
        self.scale = 1.0

    @property
    def now(self) -> float:
        """The scaler's scale."""
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    def begin(self, unscaled: bool) -> None:
        """A reduction begins."""
        self.unscaled, self.scale = unscaled, 1.0 if unscaled else self.now

    def of(self, compressor: Compressor) -> float:
        """What gradients are divided by before they meet a residual, which outlives the scale."""
        return self.scale if compressor.keeps_gradient else 1.0

    @property
    def was_unknown(self) -> bool:
        """Whether gradients were reduced with the scale in them, since the scaler was found only at the step."""
        return self.scaler is not None and self.scale == 1.0 and not self.unscaled


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
        """Let the scaler know what all ranks have found, so that all scales change alike."""
        marks = self._scaler._per_optimizer_states[id(self._optimizer)]["found_inf_per_device"]
        if not marks:  # no gradients on this rank
            where = self._scaler._scale
            assert where is not None
            marks[where.device] = torch.zeros((), device=where.device)
        if found:
            for mark in marks.values():
                mark.fill_(1.0)

    def fail(self) -> None:
        """The step fails: take off what the scaler would only take off after a good one."""
        for name in ("grad_scale", "found_inf"):
            vars(self._optimizer).pop(name, None)


class Watch:
    """Notices gradients that have changed between the end of back-propagation and the step, and warns once."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int]] = {}
        self._handles: dict[int, Any] | None = {}

    def over(self, params: Iterable[torch.Tensor]) -> None:
        """Watch the gradients of these parameters, too."""
        for p in params:
            if self._handles is not None and p.requires_grad and id(p) not in self._handles:
                hook = partial(_note, weakref.ref(self))
                self._handles[id(p)] = p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def look(self, params: Iterable[torch.Tensor]) -> None:
        """Before the step."""
        seen, self._seen = self._seen, {}
        if any(p.grad is not None and seen.get(id(p), _mark(p)) != _mark(p) for p in params):
            self.close()
            logger.warning(
                "gradients were changed between backward() and step(), as clipping does: with SparseSGD that acts on"
                " each rank's own gradients before they are averaged, not on their mean as on one process."
                " DistributedOptimizer clips the mean"
            )

    def close(self) -> None:
        """Watch no more."""
        for handle in (self._handles or {}).values():
            handle.remove()
        self._handles = None


def _mark(p: torch.Tensor) -> tuple[int, int]:
    """Which tensor a gradient is, and how often it was changed in place."""
    assert p.grad is not None
    return p.grad._cdata, p.grad._version


def _note(watch: weakref.ref[Watch], p: torch.Tensor) -> None:
    alive = watch()
    if alive is not None and p.grad is not None:
        alive._seen[id(p)] = _mark(p)
