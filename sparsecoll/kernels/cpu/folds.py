"""Folds of sparse vectors by operations other than the sum, one window of the index space after the other.

A window keeps the first value of each coordinate and combines the later ones with it, so that no operation needs a
neutral element. A bit for each coordinate shows where values are, as in `merge`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np
from numba.extending import overload

from sparsecoll.kernels import reference
from sparsecoll.kernels.cpu.lanes import array_at, jit, trailing_zeros
from sparsecoll.kernels.cpu.sums import addresses
from sparsecoll.kernels.cpu.windows import lowest
from sparsecoll.kernels.keys import Array
from sparsecoll.kernels.memory import empty
from sparsecoll.kernels.reference.folds import FOLDS

WINDOW = 1 << 14  # indices folded at a time
MIN, MAX, PROD, AND, OR, XOR, DIFFER, LAST = range(len(FOLDS))


def _combined(a, b, fold):  # type: ignore[no-untyped-def]
    """Two values combined by the operation number `fold`."""


@overload(_combined)  # type: ignore[untyped-decorator]
def _combined_of(a, b, fold):  # type: ignore[no-untyped-def]
    def integers(a, b, fold):  # type: ignore[no-untyped-def]
        if fold == MIN:
            c = min(a, b)
        elif fold == MAX:
            c = max(a, b)
        elif fold == PROD:
            c = a * b
        elif fold == AND:
            c = a & b
        elif fold == OR:
            c = a | b
        elif fold == XOR:
            c = a ^ b
        elif fold == DIFFER:
            c = type(a)((a != 0) != (b != 0))
        else:
            c = b
        return c

    def floats(a, b, fold):  # type: ignore[no-untyped-def]
        c = b
        if fold == PROD:
            c = a * b
        elif fold == DIFFER:
            c = type(a)((a != 0) != (b != 0))
        elif fold == MIN:
            c = b if b < a or (a == b and np.signbit(b)) or a != a else a
        elif fold == MAX:
            c = b if b > a or (a == b and np.signbit(a)) or a != a else a
        if fold <= PROD and (c != c or a != a or b != b):
            c = type(a)(np.nan)
        return c

    return floats if isinstance(a, numba.types.Float) else integers


@jit
def _fold_into(dense, other, fold):  # type: ignore[no-untyped-def]
    for i in range(dense.size):
        dense[i] = _combined(dense[i], other[i], fold)


@jit
def _fold(index_at, value_at, sizes, starts, fold, expected, kept, counts, marks, out_indices, out_values):  # type: ignore[no-untyped-def]
    """For each window: combine the values of all parts, one part after the other, then write them in index order.

    A value of which fewer than `expected` parts have one is combined with zero at last.
    """
    count, window, zero = 0, np.uint64(kept.size), out_values.dtype.type(0)
    while True:
        base, found = lowest(index_at, sizes, starts, out_indices)
        if not found:
            return count
        last = 0
        for p in range(sizes.size):
            indices, values = array_at(index_at[p], sizes[p], out_indices), array_at(value_at[p], sizes[p], out_values)
            i = starts[p]
            while i < sizes[p] and np.uint64(indices[i]) - base < window:
                j = np.int64(np.uint64(indices[i]) - base)
                kept[j] = _combined(kept[j], values[i], fold) if counts[j] > 0 else values[i]
                counts[j] += 1
                marks[j >> 6] |= np.uint64(1) << np.uint64(j & 63)
                last = max(last, j)
                i += 1
            starts[p] = i
        for m in range((last >> 6) + 1):
            word, marks[m] = marks[m], 0
            while word != 0:
                j = (m << 6) + np.int64(trailing_zeros(word))
                word &= word - np.uint64(1)
                out_indices[count] = base + np.uint64(j)
                out_values[count] = _combined(kept[j], zero, fold) if counts[j] < expected else kept[j]
                counts[j] = 0
                count += 1


def _numbers(values: Array) -> Array:
    """The values as an array that Numba can compute with."""
    return np.ascontiguousarray(values).view(np.uint8) if values.dtype.kind == "b" else np.ascontiguousarray(values)


def fold_into(dense: Array, other: Array, fold: str) -> None:
    if dense.dtype.kind not in "biuf" or dense.dtype == np.float16:
        reference.fold_into(dense, other, fold)
    else:
        _fold_into(_numbers(dense), _numbers(other), FOLDS.index(fold))


def merge_fold(parts: Sequence[tuple[Array, Array]], fold: str, zeros: bool) -> tuple[Array, Array]:
    index, dtype = parts[0][0].dtype, parts[0][1].dtype
    room = sum(i.size for i, _ in parts)
    if dtype.kind not in "biuf" or dtype == np.float16 or room == 0:
        return reference.merge_fold(parts, fold, zeros)
    indices, values = [np.ascontiguousarray(i) for i, _ in parts], [_numbers(v) for _, v in parts]
    out_indices, out_values = empty(room, index), empty(room, values[0].dtype)
    fixed = (FOLDS.index(fold), len(parts) if zeros else 0)
    window = np.empty(WINDOW, values[0].dtype), np.zeros(WINDOW, np.int32), np.zeros(WINDOW >> 6, np.uint64)
    count = _fold(*addresses(indices, values), *fixed, *window, out_indices, out_values)
    return out_indices[:count], out_values[:count].view(dtype)
