"""The instruction set of the kernels, chosen at import, and its operations.

`avx512` and `avx2` have operations on blocks of BLOCK items in intrinsics/, `portable` has them in portable.py. Where
an internal of Numba is missing, all operations are the portable ones.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import numba
from numba.extending import overload

from sparsecoll.kernels.keys import Array
from sparsecoll.kernels.memory import ALIGNMENT, data_ptr

logger = logging.getLogger(__name__)

operations: Any
try:
    from sparsecoll.kernels.cpu import intrinsics as operations  # before anything is compiled

    operations.probe()
except Exception as error:
    from sparsecoll.kernels.cpu import portable as operations

    logger.warning(
        "Numba %s lacks what the kernels with intrinsics need (%s: %s): the slower portable kernels are used",
        numba.__version__,
        type(error).__name__,
        error,
    )

ADVICE: str = operations.ADVICE  # how the kernels could be faster on this machine; may be empty
SUPPORTED = (*operations.SUPPORTED, "portable")
SET = operations.SET
chosen = os.environ.get("SPARSECOLL_KERNELS") or SET
if chosen != SET:
    raise ValueError(
        f"SPARSECOLL_KERNELS: {chosen!r} cannot run here, expected one of {', '.join(SUPPORTED)}, reference"
    )
if not operations.PURE:
    logger.warning("Numba has compiled for AVX-512 before in this process: kernels for AVX2 may use it")

jit = operations.jit
inlined: Any = numba.njit(inline="always")
load64 = operations.load64
magnitude_key = operations.magnitude_key
popcount = operations.popcount
prefetch = operations.prefetch
store64 = operations.store64
trailing_zeros = operations.trailing_zeros

from sparsecoll.kernels.cpu.portable import BLOCK as BLOCK  # noqa: E402  # after the set was chosen
from sparsecoll.kernels.cpu.portable import array_at as array_at  # noqa: E402  # after the set was chosen

if SET == "portable":
    from sparsecoll.kernels.cpu import portable as blocks
else:
    blocks = operations
VECTORS = SET != "portable"  # there are all operations on blocks, and they also add
compress_block = blocks.compress_block
emit_block = blocks.emit_block
end_stream = blocks.end_stream
narrow_block = blocks.narrow_block
stream_block = blocks.stream_block
widen_block = blocks.widen_block
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
