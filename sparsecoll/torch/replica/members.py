"""Which parameters a wrapper has: they come with the optimizer's groups, and leave when a model's layer is replaced."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from sparsecoll.torch.tensors.device import device_of
from sparsecoll.torch.tensors.layout import residual_dtype
from sparsecoll.torch.tensors.model import NUMBERED, Named, named_in_groups

CURE = "(change the model and the optimizer on all ranks alike, between the same steps)"  # if ranks have other changes


class Members:
    """The parameters that a wrapper knows, compared with the optimizer's groups and with the model as they are now.

    A parameter in the groups that is not known has come. One that is neither in the groups nor in the model any more
    has left. One that is still in the model stays: it is frozen, or another optimizer's.

    Args:
        optimizer: whose groups are compared.
        params: name -> parameter, those that are known; may change.
        others: returns pairs (name, parameter) of the model; None if it is not known, so that nobody leaves.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: Named,
        others: Callable[[], Iterable[tuple[str, torch.Tensor]]] | None,
    ) -> None:
        self._optimizer, self._params, self._others = optimizer, params, others
        self._seen: list[torch.Tensor] = []  # those in the groups when nobody had come or left
        self._outside = True  # whether known parameters were in no group then

    def changed(self) -> bool:
        """Return whether any have come or left; one comparison of ids while all that are known are in the groups."""
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        ids = [*map(id, params)]
        if ids == [*map(id, self._seen)] and not self._outside:
            return False
        known = {id(p) for p in self._params.values()}
        if not known.issuperset(ids) or self.left():
            return True
        self._seen, self._outside = params, self._others is not None and not known.issubset(ids)
        return False

    def stepped(self) -> set[int]:
        """Return the ids of the parameters that the optimizer steps."""
        return {id(p) for group in self._optimizer.param_groups for p in group["params"]}

    def left(self) -> list[str]:
        """Return the names of those that have left."""
        here = self.stepped()
        outside = [name for name, p in self._params.items() if id(p) not in here]
        if self._others is None or not outside:
            return []
        present = {id(p) for _, p in self._others()}
        return [name for name in outside if id(self._params[name]) not in present]

    def came(self, params: Named) -> Named:
        """Return those of `params` that are not known."""
        known = {id(p) for p in self._params.values()}
        return {name: p for name, p in params.items() if id(p) not in known}

    def staying(self) -> dict[str, str]:
        """Return the names of those that stay, old -> new: group<i>.<j> becomes the model's once that is free."""
        left = set(self.left())
        stay = {name: p for name, p in self._params.items() if name not in left}
        free = {id(p): name for name, p in self._of_model() if name not in stay}
        return {name: free.get(id(p), name) if NUMBERED.fullmatch(name) else name for name, p in stay.items()}

    def named(self, first: int = 0, given: Iterable[tuple[str, torch.Tensor]] = ()) -> Named:
        """Return the parameters of the groups from number `first` on by name.

        That is the name under which one stays, else that of `given`, else the model's unless one that stays has it,
        else group<i>.<j>.
        """
        stay = {new: self._params[old] for old, new in self.staying().items()}
        free = [(name, p) for name, p in self._of_model() if name not in stay]
        groups = self._optimizer.param_groups[first:]
        return named_in_groups(groups, first, [*free, *given, *stay.items()])

    def _of_model(self) -> Iterable[tuple[str, torch.Tensor]]:
        return () if self._others is None else self._others()


def changes(came: Collection[str], left: Collection[str]) -> dict[str, Any]:
    """Return which parameters have come and left, for ranks to compare; an error shows the cure."""
    return {f"parameters that came {CURE}": sorted(came), f"parameters that left {CURE}": sorted(left)}


def check_added(params: Named, stay: Mapping[str, str]) -> None:
    """Raise unless parameters can be added to those that stay, old name -> new."""
    taken = params.keys() & set(stay.values())
    if taken:
        raise ValueError(f"named_parameters: expected every name once, got {min(taken)!r} again")
    for p in params.values():
        if p.requires_grad:
            residual_dtype(p.dtype)
            device_of(p)
