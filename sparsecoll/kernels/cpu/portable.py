"""Operations on blocks in Numba's public language, for processors without AVX2, as ARM.

LLVM vectorises the search for blocks in which something is to be selected.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from sparsecoll.kernels.cpu.intrinsics.target import BLOCK
from sparsecoll.kernels.cpu.intrinsics.words import magnitude_key

_inline: Any = nb.njit(inline="always")


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
