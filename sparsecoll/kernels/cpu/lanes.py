"""The instruction set of the kernels, chosen at import, and its operations.

`avx512` and `avx2` have operations on blocks of BLOCK items in intrinsics/, `portable` has them in portable.py.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import numba
from numba.extending import overload

from sparsecoll.kernels.cpu import portable
from sparsecoll.kernels.cpu.intrinsics import blocks
from sparsecoll.kernels.cpu.intrinsics.blocks import (
    end_stream as end_stream,
    narrow_block as narrow_block,
    stream_block as stream_block,
    widen_block as widen_block,
)
from sparsecoll.kernels.cpu.intrinsics.cache import jit as jit
from sparsecoll.kernels.cpu.intrinsics.target import (
    ADVICE as ADVICE,  # how the kernels could be faster here, or ""
    BLOCK as BLOCK,
    PURE,
    SET,
    SUPPORTED,
)
from sparsecoll.kernels.cpu.intrinsics.words import (
    array_at as array_at,
    load64 as load64,
    magnitude_key as magnitude_key,
    popcount as popcount,
    prefetch as prefetch,
    store64 as store64,
    trailing_zeros as trailing_zeros,
)
from sparsecoll.kernels.keys import Array
from sparsecoll.kernels.memory import ALIGNMENT, data_ptr

logger = logging.getLogger(__name__)

chosen = os.environ.get("SPARSECOLL_KERNELS") or SET
if chosen != SET:
    raise ValueError(
        f"SPARSECOLL_KERNELS: {chosen!r} cannot run here, expected one of {', '.join(SUPPORTED)}, reference"
    )
if not PURE:
    logger.warning("Numba has compiled for AVX-512 before in this process: kernels for AVX2 may use it")

inlined: Any = numba.njit(inline="always")
VECTORS = SET != "portable"  # there are all operations on blocks, and they also add
_own: Any = blocks if VECTORS else portable
compress_block, emit_block = _own.compress_block, _own.emit_block
LINE_BYTES = 64  # of a line of the caches
STREAMED = 1 << 24  # bytes of an array from which on it is written past the caches: it would not stay there anyway


def streams_to(array: Array) -> bool | None:
    """Whether a pass that overwrites an array writes past the caches, which then do not read it first: True or None.

    Such a pass and those that follow it take longer if the array would have stayed in the caches.
    """
    fits = array.nbytes >= STREAMED and data_ptr(array) % ALIGNMENT == 0
    return True if VECTORS and fits else None


def _line_items(array):  # type: ignore[no-untyped-def]
    """How many items of an array a line of the caches has; array.itemsize would be a division for each block."""


@overload(_line_items)  # type: ignore[untyped-decorator]
def _constant(array):  # type: ignore[no-untyped-def]
    items = 8 * LINE_BYTES // array.dtype.bitwidth
    return lambda array: items


@inlined
def prefetch_range(array, start, stop):  # type: ignore[no-untyped-def]
    """Have the processor load the items from `start` to `stop`, which may be beyond the end."""
    for place in range(start, stop, _line_items(array)):
        prefetch(array, place)
