"""The state of a rank's gradients between two steps, and which of them hold means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum, auto
from typing import NamedTuple

import torch

from sparsecoll.torch.tensors.model import Named
from sparsecoll.torch.tensors.private import version


class State(Enum):
    """What has become of the gradients of an optimizer since its last step; docs/architecture.md has the table."""

    EMPTY = auto()
    LOCAL = auto()
    SENDING = auto()
    STALE = auto()
    DISCARDED = auto()
    MEANS = auto()
    NAN = auto()
    STEPPED = auto()


TRANSITIONS = {
    State.EMPTY: {State.LOCAL, State.SENDING, State.MEANS},
    State.LOCAL: {State.SENDING, State.NAN, State.EMPTY},
    State.SENDING: {State.STALE, State.DISCARDED, State.MEANS, State.NAN, State.LOCAL, State.EMPTY},
    State.STALE: {State.DISCARDED, State.LOCAL, State.NAN, State.EMPTY},
    State.DISCARDED: {State.STALE, State.EMPTY},
    State.MEANS: {State.LOCAL, State.SENDING, State.STEPPED, State.EMPTY},
    State.NAN: {State.LOCAL, State.EMPTY},
    State.STEPPED: {State.SENDING, State.MEANS, State.EMPTY},
}


class Gradients:
    """The state of the gradients of an optimizer."""

    def __init__(self) -> None:
        self.state = State.EMPTY

    def to(self, state: State) -> None:
        """Enter a state, or stay in it."""
        assert state is self.state or state in TRANSITIONS[self.state], f"{self.state.name} to {state.name}"
        self.state = state

    def throw_away(self) -> None:
        """Gradients are thrown away or were used: what was sent is sent again with the next ones."""
        self.to(State.DISCARDED if self.are(State.SENDING, State.STALE, State.DISCARDED) else State.EMPTY)

    def are(self, *states: State) -> bool:
        """Return whether the state is one of these."""
        return self.state in states


class Seen(NamedTuple):
    """The gradient of a parameter as it was at some moment: the tensor, and how often it had been changed in place."""

    gradient: torch.Tensor | None
    version: int

    @classmethod
    def of(cls, p: torch.Tensor) -> Seen:
        """Return the gradient of a parameter as it is now."""
        return cls(p.grad, -1 if p.grad is None else version(p.grad))

    def has_changed(self, p: torch.Tensor) -> bool:
        """Return whether the gradient is another tensor now, or was changed in place."""
        return p.grad is not self.gradient or (p.grad is not None and version(p.grad) != self.version)


class Means:
    """The parameters whose gradients have been reduced since the last step; iterates over their names.

    Args:
        params: name -> parameter; may grow.
    """

    def __init__(self, params: Named) -> None:
        self._params = params
        self._seen: dict[str, Seen] = {}
        self._whole: set[str] = set()  # whose gradient was the mean before autograd began to add to it

    def __iter__(self) -> Iterator[str]:
        return iter(self._seen)

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, name: str) -> None:
        """A parameter's gradient has been reduced."""
        self._seen[name] = Seen.of(self._params[name])

    def discard(self, names: set[str]) -> None:
        """Gradients of these parameters are local ones again, or None."""
        self._seen = {name: mean for name, mean in self._seen.items() if name not in names}

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename parameters, old name -> new name, and forget the others."""
        self._seen = {names[name]: mean for name, mean in self._seen.items() if name in names}

    def clear(self) -> None:
        """No gradient is a mean any more."""
        self._seen = {}

    def accumulating(self, name: str) -> None:
        """Autograd is about to add to a gradient."""
        (self._whole.discard if self.is_replaced(name) else self._whole.add)(name)

    def accumulated(self, name: str) -> None:
        """Autograd has added to a gradient. If it was the mean, the sum counts as the mean, also as another tensor.

        It is another tensor with create_graph, and if a dense gradient is added to rows.
        """
        if name not in self._seen:
            return
        (mean, seen), gradient = self._seen[name], self._params[name].grad
        assert mean is not None and gradient is not None
        if gradient is mean:
            self._seen[name] = Seen(mean, seen + 1)
        elif name in self._whole:
            self._seen[name] = Seen(gradient, version(gradient) - (version(mean) - seen))

    def is_replaced(self, name: str) -> bool:
        """Return whether the gradient of a parameter was a mean, and is another tensor now, or None."""
        return name in self._seen and self._params[name].grad is not self._seen[name].gradient

    def replaced(self) -> set[str]:
        """Return the parameters whose gradient is another tensor now, or None: their means were thrown away."""
        return set(filter(self.is_replaced, self._seen))

    def changed(self) -> str | None:
        """Return the last of the parameters whose means were changed in place."""
        kept = [(name, *mean) for name, mean in self._seen.items() if not self.is_replaced(name)]
        changed = [name for name, mean, seen in kept if mean is not None and version(mean) > seen]
        return changed[-1] if changed else None
