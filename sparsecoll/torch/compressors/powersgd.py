"""PowerSGD (Vogels, Karimireddy, Jaggi, NeurIPS 2019): matrices of rank r by one power iteration a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sparsecoll.errors import check_integer
from sparsecoll.torch.compressors.base import ErrorFeedback, StepContext
from sparsecoll.torch.compressors.versions import Versioned
from sparsecoll.torch.tensors.layout import Array, Layout
from sparsecoll.transport import Transport
from sparsecoll.vector import DenseVector


@dataclass
class LowRank(ErrorFeedback):
    """Common base of PowerSGD and ACP-SGD: the matrices of a bucket, their factors, and the rest, which is sent whole.

    A parameter of shape (a, b, c, ...) is a matrix with a rows. It is compressed if its factors have fewer values.
    """

    replicated_state = frozenset({"p", "q"})

    rank: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("rank", self.rank, 1)

    def bind(self, layout: Layout, transport: Transport, context: StepContext, timeout: float | None = None) -> None:
        super().bind(layout, transport, context, timeout)
        found = [(index, *self._factored(shape)) for index, shape in enumerate(layout.shapes)]
        self._whole = [index for index, *_, r in found if not r]  # numbers of the parameters that are sent densely
        self._low = [(index, n, m) for index, n, m, r in found if r]  # and rows and columns, of those compressed
        rows: list[tuple[int, ...]] = [(n, r) for _, n, _, r in found if r]
        columns: list[tuple[int, ...]] = [(m, r) for *_, m, r in found if r]
        rest: list[tuple[int, ...]] = [(math.prod(layout.shapes[index]),) for index in self._whole]
        self._P, self._Q = layout.of_shapes(rows + rest), layout.of_shapes(columns + rest)
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + layout.index) % (1 << 63))
        first = tuple([self._random(shape, generator) for shape in shapes] for shapes in (rows, columns))
        self._factors = self.versions.add(Versioned(first))

    def _factored(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Return rows, columns and the rank of the factors of a parameter; rank 0 if it is sent densely."""
        n = shape[0] if len(shape) > 1 else 1
        m = math.prod(shape) // max(n, 1)
        r = min(self.rank, n, m)
        return n, m, r if len(shape) > 1 and (n + m) * r < n * m else 0

    def state_shape(self, kind: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        n, m, r = self._factored(shape)
        return {"p": (n, r), "q": (m, r)}.get(kind, super().state_shape(kind, shape))

    @property
    def _pair(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The left and the right factors, of the current reduction if there is one."""
        return self._factors.trial or self._factors.current  # type: ignore[no-any-return]

    def _random(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        """Return a normally distributed matrix in the bucket's memory, the same on every kind of device."""
        device, dtype = self.layout.device, self.layout.dtype
        return device.to(torch.randn(*shape, generator=generator, device="cpu")).to(device.zeros_tensor(0, dtype).dtype)

    def _matrices(self, flat: Array) -> list[torch.Tensor]:
        views = [*self.layout.by_name(flat).values()]
        return [views[index].reshape(n, m) for index, n, m in self._low]

    def _rest(self, flat: Array) -> list[torch.Tensor]:
        views = [*self.layout.by_name(flat).values()]
        return [views[index].reshape(-1) for index in self._whole]

    def _means(self, transport: Transport, message: DenseVector, packed: Layout) -> list[torch.Tensor]:
        """Return the means over the ranks of the arrays in a message."""
        value = self.reduce(transport, message).value
        assert isinstance(value, DenseVector)
        return [part.div_(self.size) for part in packed.by_name(value.values).values()]

    def _write_rest(self, out: Array, means: list[torch.Tensor]) -> None:
        """Write the means of the parameters that are sent densely, and clear their residuals."""
        for view, mean in zip(self._rest(out), means, strict=True):
            view.copy_(mean)
        if self.keeps_gradient:
            for kept in self._rest(self.acc.values):
                kept.zero_()

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        names = [self.layout.names[index] for index, *_ in self._low]
        p, q = self._factors.base
        return super().state() | {"p": dict(zip(names, p, strict=True)), "q": dict(zip(names, q, strict=True))}

    def finite(self, message: Array, acc: DenseVector) -> DenseVector:
        """Return a message computed from all of acc; raise NonFiniteError if acc is not finite."""
        if not np.isfinite(message).all():
            self.check_finite(acc)
        return DenseVector(message)


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Return orthonormal columns with the same span (reduced QR)."""
    return torch.linalg.qr(matrix)[0]  # type: ignore[no-any-return]


@dataclass
class PowerSGD(LowRank):
    """Low-rank compression that approximates M = residual + gradient by P Q^T (Algorithm 1; Algorithm 1 of ACP-SGD).

    1. P = M Q, averaged over the ranks and orthogonalized.
    2. Q = M^T P, averaged over the ranks. The next step starts from Q.
    3. residual = M - P Q^T.

    Two successive allreduces per step. Volume: 2r(n + m)(P-1)/P words per matrix. Every rank orthogonalizes for itself;
    if the ranks' processors compute different bits in LAPACK, replicas drift apart, which `verify` detects.

    Args:
        rank: rank r of the factors (default: 4).
        seed: seed of the first factors, the same on all ranks (default: 0).
    """

    name = "powersgd"

    @torch.no_grad()
    def compress(self, acc: DenseVector) -> DenseVector:
        values = acc.values
        parts = [M @ q for M, q in zip(self._matrices(values), self._pair[1], strict=True)]
        return self.finite(self._P.join(parts + self._rest(values)), acc)

    @torch.no_grad()
    def communicate(self, transport: Transport, message: DenseVector) -> list[torch.Tensor]:
        means, count = self._means(transport, message, self._P), len(self._low)
        left = [orthogonalized(part) for part in means[:count]]
        right: list[torch.Tensor] = []
        columns = self.layout.of_shapes(self._Q.shapes[:count])
        if count:
            parts = [M.T @ p for M, p in zip(self._matrices(self.acc.values), left, strict=True)]
            right = self._means(transport, DenseVector(columns.join(parts)), columns)
        self._factors.trial = left, right
        return means[count:]

    @torch.no_grad()
    def update(self, out: Array, message: Any, reduced: list[torch.Tensor]) -> None:
        self._write_rest(out, reduced)
        for M, kept, p, q in zip(self._matrices(out), self._matrices(self.acc.values), *self._pair, strict=True):
            torch.mm(p, q.T, out=M)
            kept.sub_(M)
