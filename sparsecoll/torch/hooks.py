"""Hooks on parameters: each one tells one engine when its gradient is complete; and which engines share a transport."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, Protocol

import torch

from sparsecoll.torch.replicas import Named
from sparsecoll.transport import Transport

OWNER = "_sparsecoll_engine"  # attribute of a parameter: a weak reference to the owner of its hook


class Owner(Protocol):
    """What is told of gradients."""

    transport: Transport
    closed: bool
    asked: bool

    def close(self) -> None:
        """Another owner has taken a parameter over."""

    def accumulated(self, name: str) -> None:
        """A parameter's gradient is complete."""

    def synchronize(self) -> None:
        """The back-propagation in which `asked` was set has ended."""


class Hooks:
    """The hooks of one owner."""

    def __init__(self, owner: Owner) -> None:
        self._owner = weakref.ref(owner)
        self._handles: dict[str, tuple[torch.Tensor, Any]] = {}

    def attach(self, params: Named) -> None:
        """Hook the parameters that want gradients; one that another owner has is taken over."""
        for name, p in params.items():
            if p.requires_grad and name not in self._handles:
                other = getattr(p, OWNER, lambda: None)()
                if other is not None and other is not self._owner():
                    other.close()  # of an optimizer that this one replaces: a notebook's cell was run again
                setattr(p, OWNER, self._owner)
                hook = partial(_call, self._owner, name)
                self._handles[name] = p, p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Take all hooks off."""
        for p, handle in self._handles.values():
            handle.remove()
            if getattr(p, OWNER, lambda: None)() is self._owner():
                delattr(p, OWNER)
        self._handles = {}


def _call(owner: weakref.ref[Owner], name: str, _: torch.Tensor) -> None:
    alive = owner()
    if alive is not None:
        alive.accumulated(name)


def sharers(transport: Transport) -> list[Owner]:
    """The owners that use a transport, in the same order on all ranks."""
    owners = [reference() for reference in transport.sharers]
    return [owner for owner in owners if owner is not None and not owner.closed and owner.transport is transport]


def synchronize_all(transport: Transport) -> None:
    """At the end of a back-propagation: of all owners that it has met, whichever it has met first on this rank."""
    for owner in sharers(transport):
        if owner.asked:
            owner.synchronize()
