"""The arguments of SparseSGD, and their checks."""

from __future__ import annotations

import copy
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from sparsecoll import formats
from sparsecoll.algorithms import resolve
from sparsecoll.collectives.options import CallOptions
from sparsecoll.formats import Format
from sparsecoll.torch.compressors.schedule import Schedule
from sparsecoll.torch.reduction.accumulator import SparseSum
from sparsecoll.torch.tensors.device import device_of
from sparsecoll.torch.tensors.layout import residual_dtype
from sparsecoll.torch.tensors.model import check_whole

NUMBERS = ("lr", "momentum", "dampening", "weight_decay")
FLAGS = ("nesterov", "maximize")


def compressor_of(
    algo: Any, density: Any, k: Any, format: str | Format, value_dtype: str | None, row_density: Any
) -> SparseSum:
    """Return the compressor for these arguments of SparseSGD."""
    if k is None and isinstance(density, Mapping):
        raise TypeError("density: expected a number or a Schedule with SparseSGD, got a mapping")
    chosen: dict[str, Any] = {"density": density}
    if k == 0 and not isinstance(k, bool):
        raise ValueError(f"k: expected at least 1, got {k}, with which no gradient would ever be sent")
    if k is not None or not isinstance(density, Schedule):
        CallOptions(k=k, density=density if k is None else None).resolve_k(1)
        chosen = {"density": float(density)} if k is None else {"k": int(k)}
    formats.resolve(format)
    common = {"format": format, "value_dtype": value_dtype, "row_density": row_density}
    return SparseSum(algo=copy.deepcopy(resolve(algo)), **common, **chosen)


def _check_parameter(p: torch.Tensor, compressor: SparseSum) -> None:
    """Raise unless the gradients of a parameter can be summed by a compressor."""
    device_of(p)
    algorithm = resolve(compressor.algo)
    sums = f"algo={algorithm.name!r}" if algorithm.sends_sums else None
    options = CallOptions(format=compressor.format, value_dtype=compressor.value_dtype)
    options.check_dtype(residual_dtype(p.dtype), sums)


def check_group(group: Mapping[str, Any], compressor: SparseSum) -> None:
    """Raise unless the options and parameters of a group are valid."""
    for name in NUMBERS:
        _check_number(name, group[name], -np.inf if name == "dampening" else 0)
    for name in FLAGS:
        if not isinstance(group[name], bool):
            raise TypeError(f"{name}: expected True or False, got {group[name]!r}")
    if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
        raise ValueError(
            f"nesterov: expected momentum > 0 and dampening 0, got {group['momentum']} and {group['dampening']}"
        )
    check_whole(group["params"])
    for p in group["params"]:
        if p.requires_grad:
            _check_parameter(p, compressor)


def common(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the options of groups that must be the same on all ranks."""
    return {
        f"param_groups[{i}]": {name: float(group[name]) for name in (*NUMBERS, *FLAGS)}
        for i, group in enumerate(groups)
    }


def _check_number(name: str, value: Any, least: float) -> None:
    """Raise unless an option is a number of at least `least`."""
    if torch.is_tensor(value) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    if not float(value) >= least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")


def names_of(groups: Iterable[dict[str, Any]], model: torch.nn.Module | None) -> dict[torch.Tensor, str]:
    """Return the parameters of groups with their names: the model's, those in the groups, or their numbers."""
    groups = list(groups)
    known: dict[torch.Tensor, str] = {}
    for group in groups:
        known.update(zip(group["params"], group.get("param_names", ()), strict=False))
    if model is not None:
        known |= {p: name for name, p in model.named_parameters()}
    names: dict[str, torch.Tensor] = {}
    for number, p in enumerate(dict.fromkeys(p for group in groups for p in group["params"])):
        name = known.get(p, str(number))
        while name in names:
            name += "'"
        names[name] = p
    return {p: name for name, p in names.items()}
