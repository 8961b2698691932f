"""Magnitude keys, which order values by |x|, and the integer types of indices: what all kernels share.

A magnitude key is an unsigned integer: for a float the bit pattern without its sign, so that 0 < subnormal numbers
< ... < infinity < NaN; for an integer the absolute value; for a complex number the key of |z|. Comparing keys is
comparing magnitudes.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Taken = tuple[Array, Array, Array]  # indices, codes and magnitudes, see `kernels.reference.chunks.chunk_topk`
Addend = tuple[Array, float]  # (addend, scale): values += scale * addend, in the dtype of values


class Momentum(NamedTuple):
    """What replaces a gradient: new_velocity = factor * velocity + gradient.

    Attributes:
        velocity: of the dtype and length of the gradient.
        factor: of the velocity.
        new_velocity: memory for the new velocity; overlaps neither the old one nor the gradient.
        nesterov: new_velocity = factor * (velocity + gradient), and gradient + new_velocity replaces the gradient.
    """

    velocity: Array
    factor: float
    new_velocity: Array
    nesterov: bool


class SgdRule(NamedTuple):
    """The options of a step of SGD.

    Attributes:
        lr: learning rate.
        share: factor of the sum that makes the mean gradient of it.
        decay: weight decay.
        momentum: factor of the velocity.
        damp: factor of the gradient in the velocity, unless it is the first one.
        nesterov: whether momentum is Nesterov's.
    """

    lr: float
    share: float
    decay: float
    momentum: float
    damp: float
    nesterov: bool


class Code(NamedTuple):
    """How values are quantized.

    Attributes:
        bits: bits per value.
        levels: "linear", "float" or "mean", see `kernels.reference.quantization`.
        bucket: number of values that share a scale; a bucket consists of the values with the same index // `bucket`.
    """

    bits: int
    levels: str
    bucket: int


class Chunks(NamedTuple):
    """Parts of a vector, of each of which the largest values are selected; int64 arrays in host memory.

    Attributes:
        edges: where each chunk begins, and the length of the vector.
        blocks: of chunks that share two magnitudes: the first chunk of each, and the number of chunks.
        counts: how many values of each chunk are selected, at most.
    """

    edges: Array
    blocks: Array
    counts: Array


class Pass(NamedTuple):
    """What a pass over values does besides selecting some, in this order.

    Attributes:
        source: an array of the same dtype and length, of which the values become a copy.
        momentum: replaces the values, a gradient.
        add: values += scale * addend.
        clear: values that are selected are zero afterwards.
    """

    source: Array | None = None
    momentum: Momentum | None = None
    add: Addend | None = None
    clear: bool = False


PLAIN = Pass()
COMPILED_DTYPES = tuple(map(np.dtype, ("float16", "float32", "float64", "int32", "int64")))  # that all kernels take
_UINT32: np.dtype[Any] = np.dtype(np.uint32)
_UINT64: np.dtype[Any] = np.dtype(np.uint64)
_UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def index_dtype(length: int) -> np.dtype[np.generic]:
    """uint32 for lengths up to 2^32 (the largest index then fits), uint64 above."""
    return _UINT32 if length <= 2**32 else _UINT64


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether values of `dtype` are real floats, bfloat16 (which NumPy knows as a void type) among them."""
    return dtype.kind == "f" or dtype.name == "bfloat16"


def _magnitude_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype


def bits_and_mask(values: Array) -> tuple[Array, int]:
    """(unsigned array, mask) with key = bits & mask. A view for floats, |x| for integers and complex numbers."""
    if values.dtype.kind == "c":
        values = np.abs(values)
    size = values.dtype.itemsize
    most = (1 << 8 * size) - 1
    if is_float(values.dtype):
        return values.view(_UNSIGNED[size]), most >> 1
    return np.abs(values).view(_UNSIGNED[size]), most


def key_of(threshold: float, dtype: np.dtype[np.generic]) -> int:
    """The smallest key of a value of `dtype` whose magnitude is >= threshold; no integer reaches an infinite one."""
    dtype, threshold = _magnitude_dtype(dtype), max(threshold, 0.0)
    if not is_float(dtype):
        return int(np.ceil(threshold)) if np.isfinite(threshold) else nan_key(dtype)
    with np.errstate(over="ignore", under="ignore"):
        cast = np.asarray([threshold], dtype=np.float64).astype(dtype)
        if float(cast[0]) < threshold:
            cast = np.nextafter(cast, np.asarray(np.inf, dtype))
    return _key(cast)


def magnitude_of(key: int, dtype: np.dtype[np.generic]) -> float:
    """The magnitude of the values of `dtype` that have this key."""
    dtype = _magnitude_dtype(dtype)
    unsigned = np.asarray([key], dtype=_UNSIGNED[dtype.itemsize])
    return float(unsigned.view(dtype)[0]) if is_float(dtype) else float(key)


@functools.cache
def nan_key(dtype: np.dtype[np.generic]) -> int:
    """Values of `dtype` whose key is at least this one are NaN. No key of an integer reaches it."""
    dtype = _magnitude_dtype(dtype)
    return _key(np.asarray([np.inf], dtype)) + 1 if is_float(dtype) else 1 << (8 * dtype.itemsize)


def _key(value: Array) -> int:
    """The key of the only value of an array."""
    bits, mask = bits_and_mask(value)
    return int(bits[0]) & mask
