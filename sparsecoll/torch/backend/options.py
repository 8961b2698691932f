"""Options: how a process group sums dense tensors."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from sparsecoll.errors import check_choice, check_integer

DENSE = "SPARSECOLL_DENSE"  # environment variable: `dense` of the default group, unless it is given
BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a process group, passed as `pg_options` of `init_process_group` and `new_group`.

    Args:
        dense: "exact" (the default), or "int8" or "int4" to sum dense floats in 8 or 4 bits a value with error feedback
            (`sparsecoll.LowBit`): what rounding takes from a tensor enters the next sum in the same memory. This is for
            gradients, as in DDP's buckets. Sums of other dtypes, other operations than SUM and AVG, tensors that are
            not on the CPU, and those with NaN, infinity or values near float32's largest on some rank remain exact.
        dense_below: number of values below which sums are exact in any case, such as losses (default: 1024).

    Raises:
        ValueError, TypeError: An option is invalid.

    See Also:
        `sparsecoll.torch.HookState`: compression for the gradients of a DDP model alone, with saved residuals.
    """

    dense: str = "exact"
    dense_below: int = 1024

    def __post_init__(self) -> None:
        check_choice("dense", self.dense, ("exact", *BITS))
        check_integer("dense_below", self.dense_below, 0)


def resolve(given: Any, default_group: bool) -> Options:
    """Return the options of a group: those given, or those of the environment if it is the default group."""
    if given is None:
        name = os.environ.get(DENSE, "") if default_group else ""
        check_choice(DENSE, name or "exact", ("exact", *BITS))
        return Options(dense=name or "exact")
    if not isinstance(given, Options):
        raise TypeError(f"pg_options: expected sparsecoll.torch.backend.Options or None, got {type(given).__name__}")
    return given
