"""The instruction set of the kernels, chosen at import, and its operations.

The operations on blocks of BLOCK items are in intrinsics/.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import numba

from sparsecoll.kernels.cpu.intrinsics.blocks import (
    compress_block as compress_block,
    emit_block as emit_block,
    end_stream as end_stream,
    stream_block as stream_block,
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
    narrowed as narrowed,
    popcount as popcount,
    prefetch as prefetch,
    store64 as store64,
    trailing_zeros as trailing_zeros,
    widened as widened,
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
VECTORS = SET != "portable"
STREAMED = 1 << 24  # bytes of an array from which on it is written past the caches: it would not stay there anyway


def streams_to(array: Array) -> bool | None:
    """Whether a pass that overwrites an array writes past the caches, which then do not read it first: True or None.

    Such a pass and those that follow it take longer if the array would have stayed in the caches.
    """
    fits = array.nbytes >= STREAMED and data_ptr(array) % ALIGNMENT == 0
    return True if VECTORS and fits else None
