"""EF-SignSGD (Karimireddy, Rebjock, Stich, Jaggi, "Error Feedback Fixes SignSGD", ICML 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from sparsecoll.kernels import kernels_of
from sparsecoll.kernels.memory import asarray_like
from sparsecoll.torch.compressors.base import ErrorFeedback
from sparsecoll.torch.device import Array
from sparsecoll.transport import Transport
from sparsecoll.vector import DenseVector


@dataclass
class EFSignSGD(ErrorFeedback):
    """Each rank sends the signs of acc, one bit per value, and the mean of |acc| of each parameter (Algorithm 1).

    acc = residual + gradient, sent = mean(|acc|) * sign(acc), residual = acc - sent. Since a sum of signs is not a
    sign, all ranks receive all messages. Volume: (P-1)n/32 words.
    """

    name = "efsignsgd"

    def compress(self, acc: DenseVector) -> Array:
        values, edges = acc.values, self.layout.offsets
        sizes = np.maximum(np.diff(edges), 1)
        sums = [np.abs(values[a:b]).sum(dtype=np.float64).reshape(1) for a, b in pairwise(edges)]
        scales = (np.concatenate(sums) / asarray_like(sizes, values)).astype(np.float32)
        if not np.isfinite(scales).all():
            self.check_finite(acc)
        return np.concatenate([scales.view(np.uint8), np.packbits(values >= 0)])

    def communicate(self, transport: Transport, message: Array) -> list[Array]:
        return self._gather(transport, message)

    def update(self, out: Array, message: Array, reduced: list[Array]) -> None:
        self._add(self.acc.values, message, -1.0)
        out.fill(0)
        for block in reduced:
            self._add(out, block, 1.0)
        np.divide(out, self.size, out=out)

    def _add(self, out: Array, message: Array, factor: float) -> None:
        """out += factor * what a message says."""
        count, edges = 4 * len(self.layout.names), self.layout.offsets
        scales, signs = message[:count].view(np.float32), message[count:]
        for scale, a, b in zip(scales.tolist(), edges[:-1], edges[1:], strict=True):
            kernels_of(out).add_signs(out[a:b], signs, a, scale * factor)
