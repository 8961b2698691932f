"""ACP-SGD (Zhang, Zhang, Shi, Chu, Li, "Evaluation and Optimization of Gradient Compression", ICDCS 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sparsecoll.torch.compressors.powersgd import LowRank, orthogonalized
from sparsecoll.torch.tensors.layout import Array
from sparsecoll.transport import Transport
from sparsecoll.vector import DenseVector


@dataclass
class ACPSGD(LowRank):
    """Low-rank compression that sends the factor P in odd steps and Q in even ones (Algorithm 2).

    1. In odd steps, Q = orthogonalize(Q) and P = (M + E) Q; in even steps, P = orthogonalize(P) and Q = (M + E)^T P.
    2. E = M + E - P Q^T, with this rank's own factor.
    3. The new factor is averaged over the ranks; the gradient is P Q^T.

    One allreduce per step, which depends only on the gradient and therefore overlaps with back-propagation. Buckets are
    filled by bytes of gradient, so that their messages are smaller by the compression rate, as the paper scales its
    buffers (section IV-B). Volume: r(n + m)(P-1)/P words per matrix on average. As with PowerSGD, every rank
    orthogonalizes for itself.

    Args:
        rank: rank r of the factors (default: 4).
        seed: seed of the first factors, the same on all ranks (default: 0).
        feedback: whether to add E, the error feedback (default: True); False is the paper's ablation.
        reuse: whether to start from the factors of the last step (default: True) or from new random ones (the paper's
            ablation).
    """

    name = "acpsgd"

    feedback: bool = True
    reuse: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.keeps_gradient = self.feedback

    @property
    def _odd(self) -> bool:
        return self.turn % 2 == 0  # steps count from 1 in the paper

    @torch.no_grad()
    def compress(self, acc: DenseVector) -> DenseVector:
        fixed = self._pair[self._odd]
        if not self.reuse:
            seed = (self.seed + self.context.step + 1) * 1_000_003 + self.layout.index
            generator = torch.Generator().manual_seed(seed % (1 << 63))
            fixed = [self._random(tuple(f.shape), generator) for f in fixed]
        self._fixed = [orthogonalized(f) for f in fixed]
        pairs = zip(self._matrices(acc.values), self._fixed, strict=True)
        self._own = [(M if self._odd else M.T) @ f for M, f in pairs]
        return self.finite((self._P if self._odd else self._Q).join(self._own + self._rest(acc.values)), acc)

    @torch.no_grad()
    def communicate(self, transport: Transport, message: DenseVector) -> list[torch.Tensor]:
        means = self._means(transport, message, self._P if self._odd else self._Q)
        count = len(self._fixed)
        self._factors.trial = (means[:count], self._fixed) if self._odd else (self._fixed, means[:count])
        return means[count:]

    @torch.no_grad()
    def update(self, out: Array, message: Any, reduced: list[torch.Tensor]) -> None:
        if self.feedback:
            for M, own, fixed in zip(self._matrices(self.acc.values), self._own, self._fixed, strict=True):
                left, right = (own, fixed) if self._odd else (fixed, own)
                M.addmm_(left, right.T, alpha=-1)
        self._write_rest(out, reduced)
        for M, p, q in zip(self._matrices(out), *self._pair, strict=True):
            torch.mm(p, q.T, out=M)
