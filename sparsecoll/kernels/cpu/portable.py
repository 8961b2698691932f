"""The operations of intrinsics/ in Numba's public language.

Those on blocks run on processors without AVX2, as on ARM: LLVM vectorises the search for blocks in which something is
to be selected. The others take the place of an internal that a Numba lacks.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba.extending import intrinsic, overload

SUPPORTED: tuple[str, ...] = ()
SET = "portable"
PURE = True
ADVICE = "this version of Numba lacks internals that faster kernels use: install one that sparsecoll was tested with"
BLOCK = 32  # items of a block, in all sets

_inline: Any = nb.njit(inline="always")


def jit(function: Any) -> Any:
    """`function`, compiled when it is first called with arguments of these types; releases the GIL, and is cached."""
    return nb.njit(nogil=True, cache=True)(function)


def magnitude_key(value, mask):  # type: ignore[no-untyped-def]
    """The magnitude key of one value (an unsigned bit pattern of a float, or a signed integer)."""


@overload(magnitude_key)  # type: ignore[untyped-decorator]
def _magnitude_key(value, mask):  # type: ignore[no-untyped-def]
    unsigned = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[value.bitwidth]
    if value.signed:
        return lambda value, mask: unsigned(value) if value >= 0 else unsigned(-np.int64(value))
    return lambda value, mask: unsigned(value & mask)


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
def popcount(word):  # type: ignore[no-untyped-def]
    """How many bits of a uint64 are 1."""
    word -= (word >> np.uint64(1)) & np.uint64(0x5555555555555555)
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return (word * np.uint64(0x0101010101010101)) >> np.uint64(56)


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
def prefetch(array, offset):  # type: ignore[no-untyped-def]
    """Does nothing."""


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(context: Any, address: Any, like: Any) -> Any:
    pointer: Any = nb.types.CPointer(like.dtype)  # type: ignore[no-untyped-call]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(pointer))

    return pointer(nb.types.intp, like), generate


@_inline
def array_at(address, size, like):  # type: ignore[no-untyped-def]
    """The array of `size` items of the dtype of `like` at an address."""
    return nb.carray(_pointer(address, like), (size,))


end_stream: Any = None  # these have no portable form
narrow_block: Any = None
stream_block: Any = None
widen_block: Any = None


@_inline
def compress_block(  # type: ignore[no-untyped-def]
    bits,
    origin,
    start,
    mask,
    key,
    indices,
    addend,
    scale,
    velocity,
    new_velocity,
    factor,
    out_i,
    out_v,
    count,
    clear,
    stream,
    nesterov,
    often,
):
    """Append those of the BLOCK items from `start` on whose key is >= `key` to out_i and out_v; return the new count.

    As in intrinsics/, but `origin`, `addend` and `velocity` are None, and blocks with none are always skipped.
    """
    # unsigned, since negative indices prevent vectorisation, and not of a constant length, which would be unrolled
    begin, end = np.uint64(start), np.uint64(min(start + BLOCK, bits.size))
    largest = magnitude_key(bits[begin], mask)
    for i in range(begin, end):
        m = magnitude_key(bits[i], mask)
        largest = m if m > largest else largest
    if largest >= key:
        for i in range(begin, end):
            x, place = bits[i], np.uint64(count)
            chosen = magnitude_key(x, mask) >= key
            if indices is None:
                out_i[place] = i
            else:
                out_i[place] = indices[i]
            out_v[place] = x
            count += chosen
            if clear is not None:
                bits[i] = bits.dtype.type(0) if chosen else x
    return count


@_inline
def emit_block(bits, start, base, out_i, out_v, count):  # type: ignore[no-untyped-def]
    """Append those of the BLOCK floats (bit patterns) from `start` on that are not -0, and reset them to -0."""
    blank = bits.dtype.type(1) << bits.dtype.type(8 * bits.itemsize - 1)
    for i in range(np.uint64(start), np.uint64(start + BLOCK)):
        x, place = bits[i], np.uint64(count)
        out_i[place] = base + i
        out_v[place] = x
        count += x != blank
        bits[i] = blank
    return count
