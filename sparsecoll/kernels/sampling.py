"""The stride of a regular sample."""

from __future__ import annotations

import math

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
