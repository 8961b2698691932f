"""Where to look when a few values stand for all."""

from __future__ import annotations

import math

_SMALL_PRIMES = 2 * 3 * 5 * 7 * 11 * 13


def stride_for(length: int, size: int) -> int:
    """The distance of about `size` samples of `length` values.

    It shares no factor up to 13 with anything (from 17 on; below it is odd). Vectors are often matrices, and a distance
    that divides the length of a row would keep to a few columns.

    >>> stride_for(1800 * 4096, 57600)
    131
    """
    stride = max(1, length // max(size, 1))
    primes = _SMALL_PRIMES if stride >= 17 else 2
    while math.gcd(stride, primes) > 1:
        stride += 1
    return stride
