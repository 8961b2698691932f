"""A warning for SparseSGD: gradients that were changed between back-propagation and the step."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

logger = logging.getLogger(__name__)


class Watch:
    """Notices gradients that have changed between the end of back-propagation and the step, and warns once."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int]] = {}
        self._handles: dict[int, Any] | None = {}

    def over(self, params: Iterable[torch.Tensor]) -> None:
        """Watch the gradients of these parameters as well."""
        for p in params:
            if self._handles is not None and p.requires_grad and id(p) not in self._handles:
                hook = partial(_note, weakref.ref(self))
                self._handles[id(p)] = p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def look(self, params: Iterable[torch.Tensor]) -> None:
        """Warn, before the step, if gradients have changed since back-propagation."""
        seen, self._seen = self._seen, {}
        if any(p.grad is not None and seen.get(id(p), _mark(p)) != _mark(p) for p in params):
            self.close()
            logger.warning(
                "gradients were changed between backward() and step(), as clipping does: with SparseSGD that acts on"
                " each rank's own gradients before they are averaged, not on their mean as on one process."
                " DistributedOptimizer clips the mean"
            )

    def close(self) -> None:
        """Stop watching."""
        for handle in (self._handles or {}).values():
            handle.remove()
        self._handles = None


def _mark(p: torch.Tensor) -> tuple[int, int]:
    """Return the identity of a gradient's tensor, and its version counter."""
    assert p.grad is not None
    return p.grad._cdata, p.grad._version


def _note(watch: weakref.ref[Watch], p: torch.Tensor) -> None:
    alive = watch()
    if alive is not None and p.grad is not None:
        alive._seen[id(p)] = _mark(p)
