"""Adagrad with one sum of squares for each row, for embedding tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sparsecoll.torch.tensors.layout import has_rows


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad that keeps one number for each row of a table: the sum of the mean squares of the row's gradients.

        optimizer = RowWiseAdagrad(embedding.parameters(), lr=0.05)
        optimizer = DistributedOptimizer(optimizer, embedding.named_parameters())

    For each row r that has a gradient g of d values:

        s[r] = s[r] + (g[0]^2 + ... + g[d - 1]^2) / d
        w[r] = w[r] - lr * g / (sqrt(s[r]) + eps)

    The state of a table of n rows and d columns is n values, where those of torch.optim.Adagrad and SparseAdam are n d
    and 2 n d. A step reads and writes only the rows that have a gradient.

    Args:
        params: parameters or groups of them, as in torch, each with one dimension or more. Gradients may be sparse, as
            of torch.nn.Embedding(sparse=True), or dense.
        lr: learning rate (default: 1e-2).
        initial_accumulator_value: with which s begins (default: 0).
        eps: added to the denominator (default: 1e-10).

    Raises:
        ValueError: An option is negative, or a parameter is a scalar.

    See Also:
        `sparsecoll.torch.DistributedOptimizer`, torch.optim.Adagrad.
    """

    def __init__(
        self, params: Any, lr: float = 1e-2, *, initial_accumulator_value: float = 0.0, eps: float = 1e-10
    ) -> None:
        options = {"lr": lr, "initial_accumulator_value": initial_accumulator_value, "eps": eps}
        for name, value in options.items():
            if not value >= 0:
                raise ValueError(f"{name}: expected at least 0, got {value}")
        super().__init__(params, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for p in group["params"]:
            if p.dim() == 0:
                raise ValueError("params: expected tables of rows, got a scalar")
            start = float(group["initial_accumulator_value"])
            dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
            self.state[p]["sum"] = torch.full((p.shape[0],), start, dtype=dtype, device=p.device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step.

        Args:
            closure: function that computes the gradients again and returns the loss.

        Returns:
            What the closure returns; None without closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, float(group["lr"]), float(group["eps"]))
        return loss

    def _update(self, p: torch.Tensor, gradient: torch.Tensor, lr: float, eps: float) -> None:
        total = self.state[p]["sum"]
        if gradient.is_sparse and not has_rows(gradient):
            gradient = gradient.to_dense()
        if not gradient.is_sparse:
            values = gradient.to(total.dtype)
            total += _mean_squares(values)
            p.sub_((values / _column(total.sqrt() + eps, values)).to(p.dtype), alpha=lr)
            return
        gradient = gradient.coalesce()
        rows, values = gradient.indices()[0], gradient.values().to(total.dtype)
        sums = total[rows] + _mean_squares(values)
        total[rows] = sums
        p.index_add_(0, rows, (values / _column(sums.sqrt() + eps, values)).to(p.dtype), alpha=-lr)


def _mean_squares(values: torch.Tensor) -> torch.Tensor:
    """Return the mean square of each row."""
    return values.square() if values.dim() == 1 else values.flatten(1).square().mean(1)


def _column(numbers: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return one number for each row in a shape that fits the values."""
    return numbers.view(-1, *[1] * (values.dim() - 1))
