"""Half-precision values on the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsecoll.algorithms import Reduction
from sparsecoll.torch.compressors.base import overflowed, write_mean
from sparsecoll.torch.compressors.none import NoCompression
from sparsecoll.torch.tensors.layout import Array
from sparsecoll.transport import Transport
from sparsecoll.vector import DenseVector


@dataclass
class FP16(NoCompression):
    """The dense mean, with values of 16 bits on the wire that are summed in 32 bits. Volume: n(P-1)/P words.

    Gradients are divided by P before they are rounded, so that sums do not overflow if gradients do not. There is no
    error feedback: the rounding error is lost, as in the fp16 hooks of other frameworks. Values beyond the range of
    float16 (65,504) become infinite, so that a GradScaler notices.

    Args:
        value_dtype: "float16" (the default) or "bfloat16".
    """

    name = "fp16"
    stands_alone = False  # it divides by the number of ranks before a round, when that is not known

    value_dtype: str = "float16"

    def __post_init__(self) -> None:
        if self.value_dtype not in ("float16", "bfloat16"):
            raise ValueError(f"value_dtype: expected float16 or bfloat16, got {self.value_dtype!r}")

    def for_rows(self) -> dict[str, Any]:
        return super().for_rows() | {"value_dtype": self.value_dtype}

    def compensate(self, gradient: Array, *, source: Array | None = None) -> Array:
        """The gradient / P, in the memory of `gradient`."""
        return self._overflowed(np.divide(gradient if source is None else source, self.size, out=gradient))

    def _overflowed(self, values: Array) -> Array:
        return overflowed(values) if self.value_dtype == "float16" else values

    def communicate(self, transport: Transport, message: DenseVector) -> Reduction:
        return self.reduce(transport, message, value_dtype=self.value_dtype)

    def update(self, out: Array, message: Any, reduced: Reduction) -> None:
        write_mean(out, reduced.value, 1)
        self._overflowed(out)
