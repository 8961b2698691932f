"""Gradients that are means over the ranks, and what has been done to them since."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sparsecoll.torch.replicas import Named


class Means:
    """The parameters whose gradients are means since the last step; iterates over their names.

    Args:
        params: name -> parameter; may grow.
    """

    def __init__(self, params: Named) -> None:
        self._params = params
        self._given: dict[str, tuple[torch.Tensor, int]] = {}  # the gradient, and its version

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    def note(self, name: str) -> None:
        """A parameter's gradient is a mean now."""
        gradient = self._params[name].grad
        assert gradient is not None
        self._given[name] = gradient, gradient._version

    def discard(self, names: set[str]) -> None:
        """Gradients of these parameters are no means any more."""
        self._given = {name: given for name, given in self._given.items() if name not in names}

    def clear(self) -> None:
        """No gradient is a mean."""
        self._given = {}

    def accumulated(self, name: str) -> bool:
        """Autograd has added to a gradient; whether it was a mean and the sum has taken its place."""
        if name not in self._given:
            return False
        gradient, version = self._given[name]
        self._given[name] = gradient, version + 1
        return not _same(self._params[name].grad, gradient)

    def replaced(self) -> set[str]:
        """Parameters whose means were thrown away: their gradient is another tensor now, or None."""
        return {name for name, (gradient, _) in self._given.items() if not _same(self._params[name].grad, gradient)}

    def changed(self, first: str) -> str | None:
        """The last of the parameters whose means were changed in place.

        Args:
            first: the parameter to whose gradient a new back-propagation has added already.
        """
        gone, found = self.replaced(), None
        for name, (gradient, version) in self._given.items():
            if name not in gone and gradient._version > version + (name == first):
                found = name
        return found


def _same(grad: torch.Tensor | None, given: torch.Tensor) -> bool:
    """Whether a gradient is the one that was given, or (with create_graph) a sum that it is a part of."""
    return grad is given or (grad is not None and grad.grad_fn is not None)
