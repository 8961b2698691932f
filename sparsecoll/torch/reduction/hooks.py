"""Hooks on parameters, which tell an engine of gradients; which gradients are means; the engines of a transport."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.weak import WeakTensorKeyDictionary

from sparsecoll.errors import CommunicationError
from sparsecoll.torch.replica.calls import agreed, collective
from sparsecoll.torch.tensors.model import Named, Seen
from sparsecoll.torch.tensors.private import hooks_after, version
from sparsecoll.transport import Transport
from sparsecoll.transport.all_ranks import allgather
from sparsecoll.transport.call import CollectiveCall


class MeanGradients:
    """The parameters of `params`, which may grow, that have been reduced since the last step; iterates over names."""

    def __init__(self, params: Named) -> None:
        self._params = params
        self._seen: dict[str, Seen] = {}
        self._whole: set[str] = set()  # whose gradient was the mean before autograd began to add to it

    def __iter__(self) -> Iterator[str]:
        return iter(self._seen)

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, name: str) -> None:
        """Add a parameter, whose gradient has been reduced."""
        self._seen[name] = Seen.of(self._params[name])

    def discard(self, names: set[str]) -> None:
        """Remove parameters, whose gradients are local again, or None."""
        self._seen = {name: mean for name, mean in self._seen.items() if name not in names}

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename parameters, old name -> new name, and forget the others."""
        self._seen = {names[name]: mean for name, mean in self._seen.items() if name in names}

    def clear(self) -> None:
        """Remove all parameters."""
        self._seen = {}

    def accumulating(self, name: str) -> None:
        """Called before autograd adds to a gradient, or `torch.autograd.grad` computes one."""
        (self._whole.discard if self.is_replaced(name) else self._whole.add)(name)

    def accumulated(self, name: str) -> None:
        """Called after autograd has added to a gradient; mean + gradient counts as the mean, also as a new tensor."""
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


class Owner:
    """Base of the objects that combine the ranks' gradients, or changes, of parameters; a parameter has one at most.

    Attributes:
        replaces: whether a parameter that this one steps may have no other owner.
        replaced: the name of a parameter that a later owner steps, too.
    """

    replaces = True
    replaced = ""

    def hand_over(self, name: str, p: torch.Tensor, to: Owner) -> None:
        """Called when another owner takes a parameter over."""

    def refuse_replaced(self, kind: str) -> None:
        """Raise if a later owner steps one of the parameters."""
        if self.replaced:
            raise RuntimeError(
                f"{kind}: {self.replaced!r} is also updated by a DistributedOptimizer or SparseSGD created later,"
                " which reduces its gradients now: give one optimizer the parameters of both models (those without"
                " gradients are skipped), or let only one optimizer update it"
            )


_owners: MutableMapping[torch.Tensor, weakref.ref[Owner]] = WeakTensorKeyDictionary()  # by parameter


def owner_of(p: torch.Tensor) -> Owner | None:
    """Return the owner that combines a parameter's gradients, unless it is closed or gone."""
    reference = _owners.get(p)
    return None if reference is None else reference()


def is_alike(owner: weakref.ref[Owner], p: torch.Tensor) -> bool:
    """Return whether a parameter is the same on all ranks after each step: no LocalOptimizer has it."""
    other = owner_of(p)
    return other is None or other is owner() or other.replaces


class Hooks:
    """The hooks of one engine, the owner of its parameters."""

    def __init__(self, owner: Any, accumulating: Callable[[str], None]) -> None:
        self._owner = weakref.ref(owner)
        self._before, self._after = (weakref.WeakMethod(m) for m in (accumulating, owner.accumulated))
        self._handles: dict[str, tuple[torch.Tensor, tuple[Any, Any]]] = {}

    def attach(self, params: Named) -> None:
        """Own these parameters, and hook those that require gradients. Not for use in a hook.

        Hooks on a complete gradient are called in the order of registration. Ours becomes the last one, so that it sees
        changes by the others, also those that do not change the version.
        """
        for name, p in params.items():
            _owners[p] = self._owner
            if name in self._handles:
                if p.requires_grad and not self.comes_last(name):
                    before, after = self._handles[name][1]
                    after.remove()
                    self._handles[name] = p, (before, self._hook_after(name, p))
            elif p.requires_grad:
                before = p.register_hook(partial(_call, self._before, name))  # type: ignore[no-untyped-call]
                self._handles[name] = p, (before, self._hook_after(name, p))

    def _hook_after(self, name: str, p: torch.Tensor) -> Any:
        return p.register_post_accumulate_grad_hook(partial(_call, self._after, name))  # type: ignore[no-untyped-call]

    def comes_last(self, name: str) -> bool:
        """Return whether our hook is the last one on a parameter's complete gradient."""
        p, (_, after) = self._handles[name]
        return hooks_after(p)[-1:] == [after.id]

    def remove(self, params: Named) -> None:
        """Own these parameters no more."""
        for name, p in params.items():
            for handle in self._handles.pop(name)[1] if name in self._handles else ():
                handle.remove()
            if owner_of(p) is self._owner():
                _owners.pop(p, None)


def _call(method: weakref.WeakMethod[Any], name: str, _: torch.Tensor) -> None:
    if (alive := method()) is not None:
        alive(name)


def others_of(owner: Owner, params: Named) -> dict[str, Owner]:
    """Return the other owners of some of these parameters, by name of the parameter."""
    engines = {name: owner_of(p) for name, p in params.items()}
    return {name: other for name, other in engines.items() if other is not None and other is not owner}


def take_over(owner: Owner, others: Mapping[str, Owner], params: Named) -> None:
    """Make `owner` the owner of these parameters in place of `others`, the result of `others_of`."""
    for name, p in params.items():
        if name in others:
            others[name].hand_over(name, p, owner)
        _owners[p] = weakref.ref(owner)


def enlist(owner: Any) -> int:
    """Add an engine to those that use its transport, and return its number; collective.

    Those that are closed or gone on all ranks are forgotten, so that all ranks know the same ones.
    """
    transport = owner.replica.transport
    transport.sharers = {n: other for n, other in transport.sharers.items() if other() is not owner}  # it has moved
    if _alive(transport):
        gc.collect()  # one that is in a cycle of references counts as alive
    if transport.sharers and transport.size > 1:
        alive = _alive(transport)
        mine = np.array([number in alive for number in transport.sharers], np.uint8)
        anywhere = owner.replica.call("optimizers", lambda _: allgather(transport, mine).max(axis=0), "agree")
        kept = [number for number, is_alive in zip(transport.sharers, anywhere, strict=True) if is_alive]
    else:
        kept = list(_alive(transport))
    transport.sharers = {number: transport.sharers[number] for number in kept}
    number = 1 + max(kept, default=-1)
    transport.sharers[number] = weakref.ref(owner)
    return number


def _alive(transport: Transport) -> dict[int, Any]:
    owners = {number: reference() for number, reference in transport.sharers.items()}
    return {n: own for n, own in owners.items() if own and not own.closed and own.replica.transport is transport}


def synchronize_all(transport: Transport) -> None:
    """Reduce the gradients of all owners that are `asked` to, in the order of their creation; collective.

    If several share the transport, ranks first tell each other whom they ask, in a byte per owner.

    Raises:
        CommunicationError: on every rank, if an owner that is asked on some rank is gone on another.
    """
    with agreed(transport, None):
        owners, numbers = _alive(transport), list(transport.sharers)
        asked = np.array([n in owners and owners[n].asked for n in numbers], np.uint8)
        if len(transport.sharers) > 1 and transport.size > 1:
            timeouts = [owners[n].replica.options.timeout for n, due in zip(numbers, asked, strict=True) if due]
            timeout = min(filter(None, timeouts), default=None)

            def agree(_: CollectiveCall) -> NDArray[Any]:
                anywhere: NDArray[Any] = allgather(transport, asked).max(axis=0)
                if gone := [n for n, is_asked in zip(numbers, anywhere, strict=True) if is_asked and n not in owners]:
                    raise CommunicationError(f"optimizer {gone[0]} is closed or deleted on some rank, but not on all")
                return anywhere

            asked = collective(transport, "start of reduction", timeout, agree, "agree")
        for number, is_asked in zip(numbers, asked, strict=True):
            if is_asked:
                owners[number].synchronize()


def before_wrapped_step(engine: weakref.ref[Any], optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """A hook of the wrapped optimizer: raise unless DistributedOptimizer has called its step."""
    if (alive := engine()) is None:
        owners = (owner_of(p) for group in optimizer.param_groups for p in group["params"])
        if not any(owner is not None for owner in owners):  # one that was made later has a hook of its own
            raise RuntimeError(
                "step() of a wrapped optimizer, whose DistributedOptimizer is gone, would use this rank's own"
                " gradients: keep the DistributedOptimizer and call its step() and zero_grad(), or close() it to train"
                " on one rank"
            )
    elif not (alive.closed or alive.steps.stepping):
        raise RuntimeError(
            "step() of a wrapped optimizer loses residuals, and may step before gradients are means: call step() and"
            " zero_grad() of the DistributedOptimizer only, or close() it first"
        )
