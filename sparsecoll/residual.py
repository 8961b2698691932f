"""Error feedback: what was not sent is kept and added to the next gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsecoll.vector import DenseVector, SparseVector


class Residual:
    """acc = residual + gradient; residual = acc - contributed (Ok-Topk, Algorithm 2, lines 4 and 6).

    One array serves as both: `compensate` makes it acc, `update` makes it the residual again. Conservation: what
    entered the result plus what stays is what was there before.

    Args:
        length: number of coordinates.
        dtype: of the array; float16 gradients want a float32 residual.
    """

    def __init__(self, length: int, dtype: Any = np.float32) -> None:
        self.vector = DenseVector(np.zeros(length, dtype))

    @property
    def array(self) -> NDArray[Any]:
        """The residual (or, between `compensate` and `update`, acc), writable."""
        return self.vector.values

    def compensate(self, gradient: NDArray[Any], scale: float = 1.0) -> DenseVector:
        """acc = residual + scale * gradient, in place."""
        array = self.array
        if scale == 1.0:
            array += gradient
        else:
            array += np.asarray(scale, array.dtype) * gradient
        return self.vector

    def update(self, contributed: SparseVector | DenseVector) -> None:
        """Subtract the local entries that entered the result."""
        if isinstance(contributed, SparseVector):
            self.vector.subtract_at(contributed)
        else:
            self.array[:] -= contributed.values
