"""The mean of a gradient through a compressor, as a training loop computes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray

from sparsecoll.torch.compressors import Compressor
from sparsecoll.torch.optimizers.distributed import DistributedOptimizer


def mean_of(comm: Any, compressor: Compressor) -> Callable[[NDArray[Any]], tuple[float, float, float, float]]:
    """Return a function that takes one step of training with a gradient, which is nearly square for low ranks.

    The function returns bytes sent and received, messages sent, and NaN for the entries, which are not counted.
    """
    trained: list[tuple[torch.nn.Parameter, DistributedOptimizer]] = []

    def step(vector: NDArray[Any]) -> tuple[float, float, float, float]:
        if not trained:
            columns = max(d for d in range(1, math.isqrt(vector.size) + 1) if vector.size % d == 0)
            p = torch.nn.Parameter(torch.zeros(vector.size // columns, columns, device="cpu"))
            inner = torch.optim.SGD([p], lr=1e-9)
            trained.append((p, DistributedOptimizer(inner, [("gradient", p)], comm, compressor)))
        p, optimizer = trained[0]
        before = optimizer.traffic.copy()
        optimizer.zero_grad()
        p.backward(torch.tensor(vector, device="cpu").view_as(p))  # type: ignore[no-untyped-call]
        optimizer.step()
        moved = optimizer.traffic.since(before).total
        return moved.bytes_sent, moved.bytes_received, moved.messages_sent, math.nan

    return step
