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
