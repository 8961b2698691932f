"""SparseSGD's compressor, which returns the sum over the ranks as a sparse vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparsecoll.algorithms import resolve
from sparsecoll.kernels.memory import may_share_memory
from sparsecoll.select import Vector
from sparsecoll.telemetry.trace import span
from sparsecoll.torch.compressors import TopK
from sparsecoll.torch.tensors.device import Array
from sparsecoll.transport import Transport
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.vector import DenseVector, SparseVector


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

    def allreduce_sum(self, transport: Transport, acc: Array) -> Vector:
        """Return the sum of what all ranks have sent of acc, which holds the residual already. Collective."""
        self.sync(transport)
        with CollectiveCall(transport, f"bucket {self.layout.index}", self.timeout):
            with span("select", acc.size):
                self.begin(acc)
                message = self.message(self.acc)
            reduced = self.communicate(transport, message)
            value = reduced.value
            if may_share_memory(value.values, acc):  # which will change
                value = value.copy() if isinstance(value, SparseVector) else DenseVector(value.values.copy())
            self._settle(message, reduced)
        return value
