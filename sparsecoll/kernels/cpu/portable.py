"""The operations of intrinsics.py in Numba's public language, for a Numba in which an internal is missing.

Operations on sixteen lanes have no portable form: AVAILABLE is False, and their callers have loops of their own.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba.extending import overload

AVAILABLE = False
LANES = 16

_inline: Any = nb.njit(inline="always")


def magnitude_key(value, mask):  # type: ignore[no-untyped-def]
    """The magnitude key of one value (an unsigned bit pattern of a float, or a signed integer), as uint64."""


@overload(magnitude_key)  # type: ignore[untyped-decorator]
def _magnitude_key(value, mask):  # type: ignore[no-untyped-def]
    if value.signed:
        return lambda value, mask: np.uint64(value) if value >= 0 else np.uint64(-np.int64(value))
    return lambda value, mask: np.uint64(value & mask)


@_inline
def trailing_zeros(word):  # type: ignore[no-untyped-def]
    """How many 0 bits a uint64 other than 0 has below its lowest 1 bit."""
    count = 0
    for width in (32, 16, 8, 4, 2, 1):
        if word & ((np.uint64(1) << np.uint64(width)) - np.uint64(1)) == 0:
            word >>= np.uint64(width)
            count += width
    return count


@_inline
def load64(data, offset):  # type: ignore[no-untyped-def]
    """The eight bytes from `offset` on of a uint8 array as a little-endian uint64."""
    word = np.uint64(0)
    for i in range(8):
        word |= np.uint64(data[offset + i]) << np.uint64(8 * i)
    return word


@_inline
def store64(data, offset, word):  # type: ignore[no-untyped-def]
    """Write a uint64 over the eight bytes from `offset` on of a uint8 array, little-endian."""
    for i in range(8):
        data[offset + i] = np.uint8((word >> np.uint64(8 * i)) & np.uint64(255))


@_inline
def array_at(address, size, like):  # type: ignore[no-untyped-def]
    """Of lanes."""
    _unavailable(address)
    return like


@_inline
def compress_block(bits, start, mask, key, indices, addend, scale, out_i, out_v, count, clear):  # type: ignore[no-untyped-def]
    """Of lanes."""
    _unavailable(start)
    return count


@_inline
def emit_block(bits, start, base, out_i, out_v, count):  # type: ignore[no-untyped-def]
    """Of lanes."""
    _unavailable(start)
    return count


@_inline
def narrow_block(bits, start, out):  # type: ignore[no-untyped-def]
    """Of lanes."""
    _unavailable(start)


@_inline
def widen_block(bits, start, out):  # type: ignore[no-untyped-def]
    """Of lanes."""
    _unavailable(start)


@_inline
def _unavailable(start):  # type: ignore[no-untyped-def]
    if start >= 0:
        raise RuntimeError("lanes are used although the intrinsics are missing: remove Numba's cache")
