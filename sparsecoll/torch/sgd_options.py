"""What SparseSGD's arguments say, checked."""

from __future__ import annotations

import copy
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sparsecoll import formats
from sparsecoll.algorithms import Algorithm, resolve
from sparsecoll.collectives.options import CallOptions
from sparsecoll.formats import Format
from sparsecoll.torch.device import device_of
from sparsecoll.torch.layout import residual_dtype
from sparsecoll.torch.options import check_integer
from sparsecoll.torch.replicas import refuse_sharded

NUMBERS = ("lr", "momentum", "dampening", "weight_decay")
FLAGS = ("nesterov", "maximize")


@dataclass(frozen=True)
class Choice:
    """How vectors are summed: an algorithm and the options of `sparsecoll.allreduce`."""

    algorithm: Algorithm
    options: dict[str, Any]

    @classmethod
    def of(cls, algo: Any, density: Any, k: Any, format: str | Format, value_dtype: str | None) -> Choice:
        """These arguments of SparseSGD.

        Raises:
            TypeError, ValueError: one is not what it should be.
        """
        if k is None:
            _check_number("density", density, 0)
            if not 0 < density <= 1:
                raise ValueError(f"density: expected in (0, 1], got {density}")
        else:
            check_integer("k", k, 0)
        algorithm = copy.deepcopy(resolve(algo))
        chosen = {} if algorithm.takes_dense else {"density": density} if k is None else {"k": k}
        return cls(algorithm, {"format": formats.resolve(format), "value_dtype": value_dtype, **chosen})

    def check(self, p: torch.Tensor) -> None:
        """Raise unless this parameter's gradients can be summed so."""
        device_of(p)
        sums = f"algo={self.algorithm.name!r}" if self.algorithm.sends_sums else None
        CallOptions(**self.options).check_dtype(residual_dtype(p.dtype), sums)


def check_group(group: Mapping[str, Any], choice: Choice) -> None:
    """Raise unless a group's options and parameters are what they should be.

    Raises:
        TypeError, ValueError: one is not.
    """
    for name in NUMBERS:
        _check_number(name, group[name], -np.inf if name == "dampening" else 0)
    for name in FLAGS:
        if not isinstance(group[name], bool):
            raise TypeError(f"{name}: expected True or False, got {group[name]!r}")
    if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
        raise ValueError(
            f"nesterov: expected momentum > 0 and dampening 0, got {group['momentum']} and {group['dampening']}"
        )
    for name in ("foreach", "fused"):
        if group[name] not in (None, False, True):
            raise TypeError(f"{name}: expected True, False or None, got {group[name]!r}")
    if group["differentiable"]:
        raise ValueError("differentiable: expected False, got True: a step over several ranks cannot be differentiated")
    refuse_sharded(group["params"])
    for p in group["params"]:
        if p.requires_grad:
            choice.check(p)


def common(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """The options of groups that all ranks must have alike."""
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
