"""No compression: the exact mean; and no communication at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsecoll.algorithms import Reduction
from sparsecoll.torch.compressors.base import Compressor, write_mean
from sparsecoll.torch.tensors.layout import Array
from sparsecoll.transport import Transport
from sparsecoll.vector import DenseVector


@dataclass
class NoCompression(Compressor):
    """The mean of all gradients, by the dense allreduce. Volume: 2n(P-1)/P words."""

    name = "none"
    passes_nonfinite = stands_alone = True

    def compensate(self, gradient: Array, *, source: Array | None = None) -> Array:
        return gradient if source is None else source

    def compress(self, acc: Array) -> DenseVector:
        return DenseVector(acc)

    def communicate(self, transport: Transport, message: DenseVector) -> Reduction:
        return self.reduce(transport, message)

    def encoded(self, message: DenseVector) -> Array:
        return message.values.view(np.uint8)

    def combined(self, blocks: Sequence[Array], shares: Sequence[float] | None = None) -> Reduction:
        total = self.layout.zeros()
        for block, share in zip(blocks, shares or [1] * len(blocks), strict=True):
            total += block.view(total.dtype) if share == 1 else share * block.view(total.dtype)
        value = DenseVector(total)
        return Reduction(value, value)

    def update(self, out: Array, message: Any, reduced: Reduction) -> None:
        write_mean(out, reduced.value, self.size)


@dataclass
class NoCommunication(Compressor):
    """No communication: every rank uses its own gradient, so that replicas drift apart.

    Use it only to measure the time of a step without communication, which is the lower bound for all compressors.
    """

    name = "free"
    communicates = False
    passes_nonfinite = True

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    compensate = compress = communicate = update = _nothing
