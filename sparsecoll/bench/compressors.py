"""The mean of a gradient through a compressor, as a training loop computes it."""

from __future__ import annotations

import math
from typing import Any

import torch
from numpy.typing import NDArray

from sparsecoll.telemetry.trace import KINDS
from sparsecoll.torch.compressors import Compressor
from sparsecoll.torch.optimizers.distributed import DistributedOptimizer


class Mean:
    """Takes one step of training with a gradient, which is nearly square for low ranks.

    A call returns bytes sent and received, messages sent, and NaN for the entries, which are not counted.
    """

    def __init__(self, comm: Any, compressor: Compressor) -> None:
        self._comm, self._compressor = comm, compressor
        self._trained: tuple[torch.nn.Parameter, DistributedOptimizer] | None = None
        self.seconds: dict[str, float] = {}  # of the last call by kind of work, most of it on the progress thread

    def __call__(self, vector: NDArray[Any]) -> tuple[float, float, float, float]:
        gradient = torch.tensor(vector, device="cpu")
        if self._trained is None:
            columns = max(d for d in range(1, math.isqrt(vector.size) + 1) if vector.size % d == 0)
            p = torch.nn.Parameter(torch.zeros(vector.size // columns, columns, dtype=gradient.dtype, device="cpu"))
            inner = torch.optim.SGD([p], lr=1e-9)
            self._trained = p, DistributedOptimizer(inner, [("gradient", p)], self._comm, self._compressor)
        p, optimizer = self._trained
        before, spent = optimizer.traffic.copy(), optimizer.seconds.copy()
        optimizer.zero_grad()
        p.backward(gradient.view_as(p))  # type: ignore[no-untyped-call]
        optimizer.step()
        self.seconds = {kind: optimizer.seconds[kind] - spent[kind] for kind in KINDS}
        moved = optimizer.traffic.since(before).total
        return moved.bytes_sent, moved.bytes_received, moved.messages_sent, math.nan
