"""Regular samples: their stride, and the sample that bounds the k-th largest magnitude from below."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from sparsecoll.kernels.keys import Array, Pass

Form = Callable[[Array, Pass], None]
SMALL = 1 << 13  # up to this many values the top k is selected among all of them
_SMALL_PRIMES = 2 * 3 * 5 * 7 * 11 * 13


def stride_for(length: int, size: int) -> int:
    """The stride that takes about `size` samples of `length` values.

    The stride is coprime to 2, 3, 5, 7, 11 and 13 (below 17 it is only odd): vectors are often flattened matrices, and
    a stride that divides the length of a row would visit only a few columns.

    >>> stride_for(1800 * 4096, 57600)
    131
    """
    stride = max(1, length // max(size, 1))
    primes = _SMALL_PRIMES if stride >= 17 else 2
    while math.gcd(stride, primes) > 1:
        stride += 1
    return stride


def sample_of(values: Array, work: Pass, every: slice, form: Form) -> Array:
    """A copy of values[every] as they are after `work`, which the kernel `form` does to the copy alone."""
    source, momentum, add, _ = work
    sample = (values if source is None else source)[every].copy()
    if momentum is not None:
        momentum = momentum._replace(velocity=momentum.velocity[every].copy(), new_velocity=sample.copy())
    form(sample, Pass(None, momentum, None if add is None else (add[0][every].copy(), add[1])))
    return sample


def bounding_sample(values: Array, k: int, work: Pass, most: int, form: Form) -> tuple[Array, int] | None:
    """A sample of the values as they are after `work`, and the rank in it of a key that k of them are likely to reach.

    Args:
        most: size of the largest sample.
        form: the kernel.

    Returns:
        (sample, rank), with 1 for the largest key; None if there are few values, or k is a large part of them.
    """
    if values.size <= SMALL or k > values.size // 2:
        return None
    stride, half = stride_for(values.size, min(max(values.size >> 7, SMALL), most)), values.size // 2
    parts = slice(None, half, stride), slice(half, None, stride_for(stride + 1, 1))
    sample = np.concatenate([sample_of(values, work, part, form) for part in parts])
    expected = k / stride  # if all of them are in the first half
    rank = int(expected + 4 * math.sqrt(expected) + 5)
    return None if rank > sample.size else (sample, rank)
