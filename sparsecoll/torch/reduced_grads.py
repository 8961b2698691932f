"""Gradients that hold the mean over the ranks, and whether they were replaced or changed since."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sparsecoll.torch.tensors import Named


class ReducedGrads:
    """The parameters whose gradients have been reduced since the last step; iterates over their names.

    Args:
        params: name -> parameter; may grow.
    """

    def __init__(self, params: Named) -> None:
        self._params = params
        self._means: dict[str, tuple[torch.Tensor, int]] = {}  # the gradient, and its version

    def __iter__(self) -> Iterator[str]:
        return iter(self._means)

    def __len__(self) -> int:
        return len(self._means)

    def add(self, name: str) -> None:
        """A parameter's gradient has been reduced."""
        gradient = self._params[name].grad
        assert gradient is not None
        self._means[name] = gradient, gradient._version

    def discard(self, names: set[str]) -> None:
        """Gradients of these parameters are local ones again, or None."""
        self._means = {name: mean for name, mean in self._means.items() if name not in names}

    def clear(self) -> None:
        """No gradient is a mean any more."""
        self._means = {}

    def accumulated(self, name: str) -> bool:
        """Autograd has added to a gradient; return whether it was a mean, which the sum has replaced as a tensor."""
        if name not in self._means:
            return False
        gradient, version = self._means[name]
        self._means[name] = gradient, version + 1
        return not _same(self._params[name].grad, gradient)

    def replaced(self) -> set[str]:
        """Return the parameters whose gradient is another tensor now, or None: their means were thrown away."""
        return {name for name, (gradient, _) in self._means.items() if not _same(self._params[name].grad, gradient)}

    def changed(self, first: str) -> str | None:
        """Return the last of the parameters whose means were changed in place.

        Args:
            first: the parameter to whose gradient a new back-propagation has added already.
        """
        gone, found = self.replaced(), None
        for name, (gradient, version) in self._means.items():
            if name not in gone and gradient._version > version + (name == first):
                found = name
        return found


def _same(grad: torch.Tensor | None, mean: torch.Tensor) -> bool:
    """Whether a gradient is still this tensor, or (with create_graph) a sum that contains it."""
    return grad is mean or (grad is not None and grad.grad_fn is not None)
