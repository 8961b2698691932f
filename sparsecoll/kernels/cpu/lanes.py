"""The instruction set of the kernels, chosen at import, and its operations.

The operations on blocks of BLOCK items are in intrinsics/.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import numba

from sparsecoll.kernels.cpu.intrinsics.blocks import *  # noqa: F403
from sparsecoll.kernels.cpu.intrinsics.cache import jit as jit
from sparsecoll.kernels.cpu.intrinsics.target import ADVICE as ADVICE, BLOCK as BLOCK, PURE, SET, SUPPORTED
from sparsecoll.kernels.cpu.intrinsics.words import *  # noqa: F403
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
