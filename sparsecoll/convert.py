"""The caller's types to vectors and back. Besides `torch/` the only place that knows other libraries, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sparsecoll.kernels.memory import from_dlpack, on_gpu
from sparsecoll.select import Vector
from sparsecoll.vector import DenseVector, SparseVector

Back = Callable[[SparseVector], Any]


def _as_is(y: SparseVector) -> SparseVector:
    return y


def _as_triple(y: SparseVector) -> tuple[Any, Any, int]:
    return y.indices, y.values, y.length


def to_vector(x: Any) -> tuple[Vector, Back]:
    """(x as a vector, how a result becomes x's kind again).

    Takes a SparseVector, a DenseVector, (indices, values, length), a dense 1-D NumPy or CuPy array, a dense 1-D torch
    tensor on the CPU or a CUDA device. Values are not copied, and stay where they are. Dense kinds come back as a
    SparseVector.

    Raises:
        TypeError: another type, or a dtype that is not supported.
        ValueError: not 1-D, or invalid indices.
    """
    if isinstance(x, (SparseVector, DenseVector)):
        return x, _as_is
    if isinstance(x, tuple) and len(x) == 3:
        return SparseVector(*x), _as_triple
    if isinstance(x, np.ndarray) or on_gpu(x):
        return DenseVector(x), _as_is
    if type(x).__module__.split(".")[0] == "torch":
        return _from_torch(x), _as_is
    raise TypeError(
        "x: expected a SparseVector, (indices, values, length), a 1-D NumPy or CuPy array or a 1-D torch tensor,"
        f" got {type(x).__module__}.{type(x).__qualname__}"
    )


def _from_torch(x: Any) -> DenseVector:
    kind = str(getattr(x, "layout", type(x).__name__))
    if kind != "torch.strided" or x.device.type not in ("cpu", "cuda"):
        raise TypeError(
            f"x: expected a dense torch tensor on the CPU or CUDA, got {kind} on {getattr(x, 'device', '?')}"
        )
    if str(x.dtype) == "torch.bfloat16":
        raise TypeError("x: expected float16, float32, float64, int32 or int64, got torch.bfloat16: use x.float()")
    return DenseVector(from_dlpack(x.detach()) if x.device.type == "cuda" else x.detach().numpy())
