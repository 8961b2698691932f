"""The mean of a parameter's gradient that stays sparse until the step: what `p.grad` is meanwhile."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from sparsecoll.torch.compressors import Compressor, TopK

CURE = "to read, clip or change means before step(), as for GradScaler, use sparse_step=False"
KNOWN = {"shape", "dtype", "device", "layout", "is_sparse", "requires_grad", "_version", "size", "dim", "numel", "ndim"}


class SparseMean(torch.Tensor):
    """Stands for a mean that is not in memory as a tensor: whatever reads it or writes to it raises RuntimeError."""

    @classmethod
    def of(cls, p: torch.Tensor) -> SparseMean:
        """Return the one that is the gradient of a parameter. It has the memory of one value, NaN."""
        value = torch.full((), torch.nan, dtype=p.dtype, device=p.device)
        return torch.Tensor._make_subclass(cls, value.expand(p.shape))  # type: ignore[return-value]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        getter = getattr(func, "__name__", "") == "__get__"
        name = getattr(getattr(func, "__self__", None), "__name__", "") if getter else getattr(func, "__name__", "")
        if name not in KNOWN:
            refuse(f"a call of {name or func}")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SparseMean(shape={tuple(self.shape)})"


def refuse(got: str) -> NoReturn:
    """Raise because of what somebody does with a gradient whose mean is sparse."""
    raise RuntimeError(f"p.grad: expected nobody to use it, since the mean stays sparse, got {got}: {CURE}")


def check_sparse_step(optimizer: torch.optim.Optimizer, compressor: Compressor) -> None:
    """Raise unless steps of this optimizer can be taken by the sparse sums of this compressor.

    Raises:
        TypeError: The optimizer is something else than torch.optim.SGD, whose step is known.
        ValueError: Its steps are to be differentiable, or the compressor does not send entries.
    """
    if type(optimizer) is not torch.optim.SGD:
        raise TypeError(
            f"sparse_step: expected False with {type(optimizer).__name__}, got True: it is for torch.optim.SGD"
        )
    if optimizer.defaults["differentiable"]:
        raise ValueError("sparse_step: expected False with differentiable=True, got True")
    if not (isinstance(compressor, TopK) and compressor.sums_sparsely):
        raise ValueError(
            f"sparse_step: expected False with {compressor.describe()}, got True: it is for TopK and its presets, with"
            " an algorithm that does not send all values"
        )


def check_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Raise if a hook before the optimizer's step, besides this library's own, may want to see gradients."""
    if len(optimizer._optimizer_step_pre_hooks) > 1:
        refuse(f"a hook of register_step_pre_hook on {type(optimizer).__name__}")
