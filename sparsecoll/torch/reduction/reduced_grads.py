"""Gradients that hold the mean over the ranks, and whether they were replaced or changed since."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from sparsecoll.torch.tensors.model import Named
from sparsecoll.torch.tensors.private import version


class ReducedGrads:
    """The parameters whose gradients have been reduced since the last step; iterates over their names.

    Args:
        params: name -> parameter; may grow.
    """

    def __init__(self, params: Named) -> None:
        self._params = params
        self._means: dict[str, tuple[torch.Tensor, int]] = {}  # the gradient, and its version
        self._whole: set[str] = set()  # whose gradient was the mean when it was last looked at

    def __iter__(self) -> Iterator[str]:
        return iter(self._means)

    def __len__(self) -> int:
        return len(self._means)

    def add(self, name: str) -> None:
        """A parameter's gradient has been reduced."""
        gradient = self._params[name].grad
        assert gradient is not None
        self._means[name] = gradient, version(gradient)

    def discard(self, names: set[str]) -> None:
        """Gradients of these parameters are local ones again, or None."""
        self._means = {name: mean for name, mean in self._means.items() if name not in names}

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename parameters, old name -> new name, and forget the others."""
        self._means = {names[name]: mean for name, mean in self._means.items() if name in names}

    def clear(self) -> None:
        """No gradient is a mean any more."""
        self._means = {}

    def look(self, name: str) -> None:
        """Note whether a parameter's gradient is still the mean, before autograd may add to it."""
        if self.is_replaced(name):
            self._whole.discard(name)
        else:
            self._whole.add(name)

    def accumulated(self, name: str) -> None:
        """Autograd has added to a gradient. If it was the mean, the sum counts as the mean, also as another tensor.

        It is another tensor with create_graph, and if a dense gradient is added to rows.
        """
        if name not in self._means:
            return
        (mean, seen), gradient = self._means[name], self._params[name].grad
        assert gradient is not None
        if gradient is mean:
            self._means[name] = mean, seen + 1
        elif name in self._whole:
            self._means[name] = gradient, version(gradient) - (version(mean) - seen)

    def is_replaced(self, name: str) -> bool:
        """Return whether the gradient of a parameter was a mean, and is another tensor now, or None."""
        return name in self._means and self._params[name].grad is not self._means[name][0]

    def replaced(self) -> set[str]:
        """Return the parameters whose gradient is another tensor now, or None: their means were thrown away."""
        return set(filter(self.is_replaced, self._means))

    def changed(self) -> str | None:
        """Return the last of the parameters whose means were changed in place."""
        gone, found = self.replaced(), None
        for name, (gradient, seen) in self._means.items():
            if name not in gone and version(gradient) > seen:
                found = name
        return found
