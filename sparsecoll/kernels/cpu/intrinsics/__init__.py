"""Operations that Numba's vectoriser cannot produce, built from LLVM instructions.

This is the only package that uses internals of Numba and of llvmlite, which may change with any release: `target`
chooses the instruction set, `cache` keeps compiled kernels on disk, `words` and `blocks` have the operations. lanes.py
takes the portable code in their place where an internal is missing, and pyproject.toml bounds the versions to those
tested.
"""

from __future__ import annotations

import numpy as np

from sparsecoll.kernels.cpu.intrinsics.blocks import compress_block as compress_block
from sparsecoll.kernels.cpu.intrinsics.blocks import emit_block as emit_block
from sparsecoll.kernels.cpu.intrinsics.blocks import end_stream as end_stream
from sparsecoll.kernels.cpu.intrinsics.blocks import narrow_block as narrow_block
from sparsecoll.kernels.cpu.intrinsics.blocks import stream_block as stream_block
from sparsecoll.kernels.cpu.intrinsics.blocks import widen_block as widen_block
from sparsecoll.kernels.cpu.intrinsics.cache import jit as jit
from sparsecoll.kernels.cpu.intrinsics.target import ADVICE as ADVICE
from sparsecoll.kernels.cpu.intrinsics.target import PURE as PURE
from sparsecoll.kernels.cpu.intrinsics.target import REGISTER
from sparsecoll.kernels.cpu.intrinsics.target import SET as SET
from sparsecoll.kernels.cpu.intrinsics.target import SUPPORTED as SUPPORTED
from sparsecoll.kernels.cpu.intrinsics.words import load64 as load64
from sparsecoll.kernels.cpu.intrinsics.words import magnitude_key as magnitude_key
from sparsecoll.kernels.cpu.intrinsics.words import popcount as popcount
from sparsecoll.kernels.cpu.intrinsics.words import prefetch as prefetch
from sparsecoll.kernels.cpu.intrinsics.words import store64 as store64
from sparsecoll.kernels.cpu.intrinsics.words import trailing_zeros as trailing_zeros
from sparsecoll.kernels.cpu.portable import BLOCK
from sparsecoll.kernels.memory import ALIGNMENT


@jit
def _probe(words, halves, raw):  # type: ignore[no-untyped-def]
    """Uses each of the above once."""
    key, count = np.uint32(1), 0
    if REGISTER:
        count = compress_block(
            words, None, 0, key, key, None, None, None, None, None, None, words, words, count, None, None, None, False
        )
        count = emit_block(words, 0, np.uint64(0), words, words, count)
        narrow_block(words, 0, halves)
        widen_block(halves, 0, words)
        stream_block(words, BLOCK, words, 0)
        end_stream()
    prefetch(raw, 0)
    store64(raw, 0, load64(raw, 0) + np.uint64(magnitude_key(words[0], key)) + popcount(np.uint64(9)))
    return count + trailing_zeros(np.uint64(8))


def probe() -> None:
    """Raise whatever Numba or LLVM raises if an operation of this package cannot be compiled any more."""
    words = np.ones(3 * BLOCK + ALIGNMENT // 4, np.uint32)
    first = -words.__array_interface__["data"][0] % ALIGNMENT // 4
    _probe(words[first : first + 3 * BLOCK], np.ones(BLOCK, np.uint16), np.ones(8, np.uint8))
