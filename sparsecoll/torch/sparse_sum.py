"""SparseSGD's compressor, which returns the sum over the ranks as a sparse vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparsecoll.algorithms import resolve
from sparsecoll.select import Vector
from sparsecoll.torch.compressors import TopK
from sparsecoll.torch.device import Array
from sparsecoll.vector import DenseVector


@dataclass
class SparseSum(TopK):
    """TopK that returns the sum as it is, sparse, instead of writing a dense mean.

    Args:
        k: entries to select instead of `density`.
    """

    name = "SparseSGD"

    k: int | None = None

    def describe(self) -> str:
        return f"{self.name}({resolve(self.algo).describe()})"

    def count(self) -> int:
        return super().count() if self.k is None else self.k

    @property
    def compared(self) -> dict[str, Any]:
        return super().compared if self.k is None else {}

    def compress(self, acc: Vector) -> Vector:
        if self._algorithm.selector is not None:  # which may pass NaN by
            self.check_finite(acc)
        return super().compress(acc)

    def compensate(self, gradient: Array, scale: float = 1.0, source: Array | None = None) -> DenseVector:
        """Return acc, to which the residual was added already, with the learning rate of the gradient."""
        self.begin(gradient)
        return self.acc
