"""Words of eight bytes and blocks of sixteen lanes: intrinsics where this Numba has them, else portable code."""

from __future__ import annotations

import logging
from typing import Any

import numba

operations: Any
try:
    from sparsecoll.kernels.cpu import intrinsics as operations

    operations.probe()
except Exception as error:
    from sparsecoll.kernels.cpu import portable as operations

    logging.getLogger(__name__).warning(
        "Numba %s lacks what the kernels with intrinsics need (%s: %s): the slower portable kernels are used",
        numba.__version__,
        type(error).__name__,
        error,
    )

AVAILABLE = operations.AVAILABLE
LANES = operations.LANES
array_at = operations.array_at
compress_block = operations.compress_block
emit_block = operations.emit_block
load64 = operations.load64
magnitude_key = operations.magnitude_key
narrow_block = operations.narrow_block
store64 = operations.store64
trailing_zeros = operations.trailing_zeros
widen_block = operations.widen_block
