"""Selection in one pass: the entries above a threshold, and the exact top k. The host reads only sizes and keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsecoll.kernels import reference
from sparsecoll.kernels.gpu import device
from sparsecoll.kernels.gpu.device import Array, launch, types, u32
from sparsecoll.kernels.keys import PLAIN, Pass, index_dtype
from sparsecoll.kernels.memory import grown
from sparsecoll.kernels.reference.selection import MOMENT_ROWS, ROUNDS
from sparsecoll.kernels.sampling import SMALL, bounding_sample

Addend = tuple[Array, float]

TILE = 4096  # items per block of threads, as in selection.cu; also the length of a line of moments
GROUP, WARPS = 32, 8  # tiles of a group, and warps of a block, as in selection.cu and common.cu
FEW_TILES = 4096  # up to so many have a block of `gather` each, and one more a warp
SEGMENT = 1 << 30  # items per launch, whose counts have 31 bits
DIGIT = 11  # bits per digit of the radix selection, as in selection.cu
SHARE, FEW_BLOCKS = 4096, 528  # values for a block that ends with atomics, of which there are not many at once
SAMPLE = 1 << 17  # size of the largest sample that bounds the k-th magnitude from below

assert TILE == MOMENT_ROWS * device.THREADS


def _bits(values: Array) -> np.dtype[Any]:
    return np.dtype(f"u{values.dtype.itemsize}")


def _added(add: Addend | None) -> tuple[tuple[str, ...], Array | None, np.float64]:
    """(macros, addend, scale)."""
    if add is None:
        return (), None, np.float64(0)
    addend = add[0] if add[0].flags.c_contiguous else add[0].copy()
    return (f"-DADD={device.code(addend.dtype)}",), addend, np.float64(add[1])


def form(values: Array, work: Pass) -> None:
    _begin(values, work)
    if work.add is not None:
        macros, addend, scale = _added(work.add)
        given = (values, values.size, addend, scale)
        launch("selection", "accumulate", values.size, *given, macros=types(values) + macros)


def _begin(values: Array, work: Pass) -> None:
    """`form`, but for the addend."""
    reference.form(values, work._replace(add=None))


def count_at_least(values: Array, key: int) -> int:
    bits = _bits(values)
    if key > np.iinfo(bits).max:
        return 0
    found = device.zeros(1, np.uint64)
    launch("selection", "count", values.size, values, values.size, bits.type(key), found, macros=types(values))
    return int(found[0])


def key_range(values: Array) -> tuple[int, int]:
    if values.size == 0:
        return 0, 0
    found = device.zeros(2, np.uint64)
    blocks = min(-(-values.size // SHARE), FEW_BLOCKS)
    launch("selection", "key_range", values.size, values, values.size, found, macros=types(values), blocks=blocks)
    low, high = found.get().tolist()
    return low ^ ((1 << 64) - 1), high


def moments_of(values: Array) -> np.ndarray[Any, Any]:
    moments = np.zeros(4)
    _take(values, np.iinfo(_bits(values)).max, moments=moments)
    return moments


def _take(
    values: Array,
    above: int,
    ties: int = 0,
    expected: int = 0,
    indices: Array | None = None,
    add: Addend | None = None,
    moments: np.ndarray[Any, Any] | None = None,
    clear: bool = False,
) -> tuple[Array, Array]:
    """The entries with a key > `above` (-1: all), and the first `ties` of those with this key."""
    index, bits = index_dtype(values.size) if indices is None else indices.dtype, _bits(values)
    room = min(values.size, expected + (expected >> 3) + TILE)
    out_i, out_v, have = device.empty(room, index), device.empty(room, values.dtype), 0
    places, staged = device.empty(min(room, SEGMENT), np.uint16), device.empty(min(room, SEGMENT), values.dtype)
    lines = None if moments is None else device.empty(4 * -(-values.size // TILE), np.float64)
    for start in range(0, values.size, SEGMENT):
        segment = values[start : start + SEGMENT]
        own = None if indices is None else indices[start : start + SEGMENT]
        macros, addend, scale = _added(None if add is None else (add[0][start : start + SEGMENT], add[1]))
        tiles = device.empty(-(-segment.size // TILE), np.uint64)
        groups, parts = -(-tiles.size // GROUP), GROUP if tiles.size <= FEW_TILES else GROUP // WARPS
        scratch = device.zeros(3 + groups, np.uint64)
        what = (segment, segment.size, bits.type(max(above, 0)), u32(above < 0), ties)
        launch(
            "selection",
            "stage",
            segment.size,
            *(*what, addend, scale, places, staged, staged.size),
            *(None if lines is None else lines[4 * (start // TILE) :], tiles, scratch),
            macros=(*types(values, index), *macros, *(() if lines is None else ("-DMOMENTS=1",))),
            blocks=tiles.size,
        )
        while True:
            given = (*what, own, start, u32(clear), places, staged, tiles, groups, u32(parts))
            launch(
                "selection",
                "gather",
                segment.size,
                *(*given, out_i[have:], out_v[have:], room - have, scratch),
                macros=types(values, index),
                blocks=groups * parts,
            )
            count, tied = scratch[1:3].get().tolist()
            if have + count <= room:
                break
            left = values.size - start - segment.size
            room = min(have + count + (have + count) * left // values.size + TILE, values.size)
            out_i, out_v = grown(out_i, have, room), grown(out_v, have, room)
        have, ties = have + count, ties - tied
    if moments is not None:
        folded = device.zeros(4, np.float64)
        count = -(-values.size // TILE)
        macros = (*types(values), "-DMOMENTS=1")
        launch("selection", "fold_moments", count, lines, count, folded, macros=macros, blocks=1)
        moments[:] = folded.get()
    return out_i[:have], out_v[:have]


def select_at_least(
    values: Array,
    key: int,
    expected: int = 0,
    *,
    indices: Array | None = None,
    moments: np.ndarray[Any, Any] | None = None,
    work: Pass = PLAIN,
) -> tuple[Array, Array]:
    _begin(values, work)
    above = min(key - 1, int(np.iinfo(_bits(values)).max))
    return _take(values, above, 0, expected, indices, work.add, moments, work.clear)


def topk_by_key(values: Array, key: int, ties: int, *, indices: Array | None = None) -> tuple[Array, Array]:
    return _take(values, key, ties, values.size, indices)


def lower_bound_key(values: Array, k: int, work: Pass = PLAIN) -> int:
    found = bounding_sample(values, k, work, SAMPLE, form)
    return kth_key(*found)[0] if found else 0


def _key_bits(values: Array) -> int:
    return int(8 * values.dtype.itemsize - (values.dtype.kind == "f"))


def kth_key(values: Array, k: int) -> tuple[int, int]:
    return _narrowed(values, k, -(-_key_bits(values) // DIGIT))


def _narrowed(values: Array, k: int, digits: int) -> tuple[int, int]:
    """(smallest key with the leading digits of the k-th largest, its rank among those), after `digits` digits."""
    state = device.zeros(4 + (1 << DIGIT), np.uint64)
    blocks = min(-(-values.size // SHARE), FEW_BLOCKS)
    for digit in range(digits):
        first = (_key_bits(values), k) if digit == 0 else (0, 0)
        given = (values, values.size, *first, state)
        launch("selection", "kth_digit", values.size, *given, macros=types(values), blocks=blocks)
    key, _, rank = state[:3].get().tolist()
    return key, rank


def topk(values: Array, k: int, *, indices: Array | None = None, work: Pass = PLAIN) -> tuple[Array, Array]:
    _begin(values, work)
    add = Pass(add=work.add)
    if k == 0:
        return select_at_least(values, 1 << 64, indices=indices, work=add)
    bound, all_i, all_v = lower_bound_key(values, k, add), indices, values
    if bound:
        all_i, all_v = select_at_least(values, bound, k + (k >> 2), indices=indices, work=add)
    else:
        form(values, add)
    if values.size > SMALL and k < values.size and (not bound or all_v.size < k):  # no sample, or not a typical one
        certain, _ = _narrowed(values, k, 1)  # a key that at least k values reach, and not many more, from one pass
        all_i, all_v = select_at_least(values, certain, k + (k >> 2), indices=indices)
    above, ties = (-1, 0) if k >= all_v.size else kth_key(all_v, k)
    chosen = _take(all_v, above, ties, min(k, all_v.size), all_i)
    if work.clear:
        launch("selection", "clear", chosen[0].size, values, chosen[0], chosen[0].size, macros=types(values, chosen[0]))
    return chosen


def random_indices(length: int, count: int, key: int) -> Array:
    out = device.empty(min(count, length), index_dtype(length))
    half = max(1, (max(length - 1, 1).bit_length() + 1) // 2)
    given = (length, u32(half), key, u32(ROUNDS), out, out.size)
    launch("selection", "permuted", out.size, *given, macros=types(indices=out))
    out.sort()
    return out
