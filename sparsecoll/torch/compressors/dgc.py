"""Deep Gradient Compression (Lin, Han, Mao, Wang, Dally, ICLR 2018)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sparsecoll import select
from sparsecoll.algorithms import Algorithm, Reduction
from sparsecoll.select import Selector
from sparsecoll.torch.compressors.base import Array, Shared
from sparsecoll.torch.compressors.topk import TopK
from sparsecoll.torch.layout import Layout
from sparsecoll.transport import Transport
from sparsecoll.vector import DenseVector


@dataclass
class DGC(TopK):
    """Top-k by a sampled threshold, with momentum correction, factor masking, local clipping and warm-up.

    1. Clip each parameter's gradient to a norm of `clip` / sqrt(P) (section 3.2).
    2. u = momentum * u + gradient; v = v + u (momentum correction, Algorithm 4).
    3. Send about the k largest entries of v; set v and u to zero there (momentum factor masking, section 3.3).

    The momentum is in here: use it with an optimizer without one. Warm-up of the density (section 3.4):
    `density=WarmUp(0.001, steps)`. The paper uses density 0.001.

    Args:
        momentum: 0 for none.
        clip: norm, None for no clipping.
    """

    name = "dgc"

    algo: str | Algorithm = "allgather"
    selector: Selector | None = field(default_factory=select.SampledThreshold)
    momentum: float = 0.9
    clip: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum: expected in [0, 1), got {self.momentum}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip: expected above 0, got {self.clip}")

    def bind(self, layout: Layout, transport: Transport, shared: Shared, timeout: float | None = None) -> None:
        super().bind(layout, transport, shared, timeout)
        self._velocity = np.zeros(layout.length, layout.dtype)

    def compensate(self, gradient: Array) -> DenseVector:
        if self.clip is not None:
            most = self.clip / self.size**0.5
            for view in self.layout.views(gradient):
                norm = float(torch.linalg.vector_norm(view))
                if norm > most:
                    view.mul_(most / norm)
        np.multiply(self._velocity, self.momentum, out=self._velocity)
        np.add(self._velocity, gradient, out=self._velocity)
        return self.residual.compensate(self._velocity)

    def update(self, gradient: Array, message: Any, reduced: Reduction) -> None:
        super().update(gradient, message, reduced)
        self._velocity[message.indices] = 0

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        return super().state() | {"velocity": self.layout.by_name(self._velocity)}
