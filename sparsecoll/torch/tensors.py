"""The parameters and buffers of a model by name, and which of them can be trained on several ranks."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

Named = dict[str, torch.Tensor]


def model_of(given: Any) -> torch.nn.Module | None:
    """Return the model, given itself or a generator of its `parameters()` or `named_parameters()`; else None."""
    if isinstance(given, torch.nn.Module):
        return given
    if inspect.isgenerator(given) and given.gi_frame is not None:
        owner = inspect.getgeneratorlocals(given).get("self")
        return owner if isinstance(owner, torch.nn.Module) else None
    return None


def named(given: Any) -> Named:
    """Return parameters by name, from a Module or from (name, parameter) pairs.

    Raises:
        TypeError: neither.
        ValueError: a name comes twice.
    """
    pairs = given.named_parameters() if isinstance(given, torch.nn.Module) else given
    result: Named = {}
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(
                "named_parameters: expected (name, parameter) pairs, as of model.named_parameters(), or the model,"
                f" got {type(pair).__name__} in it"
            )
        name, p = pair
        if name in result and result[name] is not p:
            raise ValueError(f"named_parameters: expected every name once, got {name!r} again")
        result[name] = p
    return result


def sparse_weights(model: torch.nn.Module | None) -> set[int]:
    """Return the ids of the parameters of modules with `sparse=True`, whose gradients are rows."""
    tables = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    modules = () if model is None else model.modules()
    return {id(module.weight) for module in modules if isinstance(module, tables) and module.sparse}


class Buffers:
    """A model's buffers, such as BatchNorm's running statistics, and which of them have changed."""

    def __init__(self, model: torch.nn.Module | None) -> None:
        self.tensors: Named = {}
        self._modules: list[list[str]] = []
        if model is not None:
            for prefix, module in model.named_modules():
                own = {f"{prefix}.{name}".lstrip("."): b for name, b in module.named_buffers(recurse=False)}
                own = {name: b for name, b in own.items() if not any(b is other for other in self.tensors.values())}
                if own:
                    self.tensors |= own
                    self._modules.append(list(own))
        self.mark()

    def _counts(self) -> list[int]:
        return [sum(self.tensors[name]._version for name in names) for names in self._modules]

    def mark(self) -> None:
        """Let `changed` report changes from now on."""
        self._marked = self._counts()

    def changed(self) -> list[bool]:
        """Return for each module with buffers whether one of them was changed in place since `mark`.

        A forward pass changes a running mean without raising its version counter, but raises that of the number of
        batches.
        """
        return [now != then for now, then in zip(self._counts(), self._marked, strict=True)]

    def of(self, modules: Iterable[bool]) -> list[torch.Tensor]:
        """Return the buffers of the modules for which `modules` is True."""
        return [self.tensors[name] for names, is_ in zip(self._modules, modules, strict=True) if is_ for name in names]


def describe(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return name, shape and dtype of each tensor, for ranks to compare; an error shows only those that differ."""
    return {
        f"parameter {i}": f"{name!r}, {tuple(t.shape)}, {str(t.dtype).removeprefix('torch.')}"
        for i, (name, t) in enumerate(tensors.items())
    }


def check_whole(params: Iterable[torch.Tensor]) -> None:
    """Raise unless every rank holds all values of these parameters.

    Raises:
        TypeError: one is a DTensor or ShardedTensor, or FSDP's flat parameter, or it has no values yet.
    """
    for p in params:
        if p.is_meta or torch.nn.parameter.is_lazy(p):
            cure = "to_empty() and initialize it" if p.is_meta else "call it once on a batch"
            raise TypeError(
                f"params: expected tensors with values, got one {'on meta' if p.is_meta else 'of a lazy module'}: give"
                f" the model its values first ({cure})"
            )
        kinds = {base.__name__ for base in type(p).__mro__}
        if kinds & {"DTensor", "ShardedTensor"} or getattr(p, "_is_flat_param", False):
            raise TypeError(
                f"params: expected whole tensors on every rank, got a {type(p).__name__} as FSDP and tensor parallelism"
                " make: use sparsecoll.torch.fsdp.attach and a plain optimizer for a model of fully_shard"
            )


def rates_of(optimizer: torch.optim.Optimizer, params: Named, names: Sequence[str]) -> list[float]:
    """Return the learning rates of named parameters, 1 where the optimizer has none."""
    rates = {id(p): float(group.get("lr", 1.0)) for group in optimizer.param_groups for p in group["params"]}
    return [rates.get(id(params[name]), 1.0) for name in names]
