"""Selection of the entries above a threshold: its arguments, threads and memory, and what needs no pass of its own.

`selection_pass.py` has the pass over the values, and `largest.py` the exact top k.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import numpy as np

from sparsecoll.kernels import reference, threads
from sparsecoll.kernels.cpu.additions import ADDED, form
from sparsecoll.kernels.cpu.lanes import BLOCK, VECTORS, jit, magnitude_key
from sparsecoll.kernels.cpu.radix import keep_largest
from sparsecoll.kernels.cpu.selection_pass import CHUNK, LINE, select_chunks
from sparsecoll.kernels.keys import PLAIN, Array, Pass, index_dtype, is_float
from sparsecoll.kernels.memory import empty, readonly
from sparsecoll.kernels.reference.selection import MOMENT_LANES, ROUNDS, moments_of, moments_of_lines, taken

SPARE = 1 << 16  # entries that a top k may find beyond 2k before it keeps the k largest of them


@jit
def _count(bits, mask, key):  # type: ignore[no-untyped-def]
    count = 0
    for i in range(bits.size):
        count += magnitude_key(bits[i], mask) >= key
    return count


@jit
def _key_range(bits, mask):  # type: ignore[no-untyped-def]
    lowest = magnitude_key(bits[0], mask)
    highest = lowest
    for i in range(bits.size):
        m = magnitude_key(bits[i], mask)
        lowest = min(lowest, m)
        highest = max(highest, m)
    return lowest, highest


@jit
def _permuted(length, half, key, out):  # type: ignore[no-untyped-def]
    mask, shift = (np.uint64(1) << np.uint64(half)) - np.uint64(1), np.uint64(half)
    for i in range(out.size):
        x = np.uint64(i)
        while True:
            left, right = x >> shift, x & mask
            for number in range(ROUNDS):
                z = (right + key + np.uint64(number) * np.uint64(0xD1B54A32D192ED03)) * np.uint64(0x9E3779B97F4A7C15)
                z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
                left, right = right, left ^ ((z ^ (z >> np.uint64(31))) & mask)
            x = (left << shift) | right
            if x < length:
                break
        out[i] = x


def lanes_of(values: Array, write: bool = False) -> tuple[Array, Any]:
    """(signed integers as they are, other values as unsigned bit patterns; the mask that removes the sign)."""
    if not values.flags.c_contiguous:
        raise ValueError("values: expected a contiguous array")
    lane, mask = _lane(values.dtype)
    bits = values if lane is None else values.view(lane)
    return bits if write else readonly(bits), mask


@functools.cache
def _lane(dtype: np.dtype[Any]) -> tuple[np.dtype[Any] | None, Any]:
    """(the unsigned dtype of the bit patterns, None for signed integers; the mask that removes the sign)."""
    unsigned = np.dtype(f"u{dtype.itemsize}")
    mask = unsigned.type(np.iinfo(unsigned).max >> is_float(dtype))
    return None if dtype.kind == "i" else unsigned, mask


def count_at_least(values: Array, key: int) -> int:
    bits, mask = lanes_of(magnitudes(values))
    return 0 if _beyond(key, bits) else int(_count(bits, mask, mask.dtype.type(key)))


def magnitudes(values: Array) -> Array:
    """|z| of complex numbers, other values as they are: both have the same magnitude keys."""
    return np.abs(values, out=empty(values.size, values.real.dtype)) if values.dtype.kind == "c" else values


def _beyond(key: int, values: Array) -> bool:
    """Whether a key does not fit into the size of the values."""
    return bool(key >> 8 * values.itemsize)


def key_range(values: Array) -> tuple[int, int]:
    if values.size == 0:
        return 0, 0
    lowest, highest = _key_range(*lanes_of(magnitudes(values)))
    return int(lowest), int(highest)


def random_indices(length: int, count: int, key: int) -> Array:
    out = empty(min(count, length), index_dtype(length))
    _permuted(np.uint64(length), max(1, (max(length - 1, 1).bit_length() + 1) // 2), np.uint64(key), out)
    out.sort()
    return out


def select_at_least(
    values: Array,
    key: int,
    expected: int = 0,
    *,
    indices: Array | None = None,
    moments: Array | None = None,
    work: Pass = PLAIN,
) -> tuple[Array, Array]:
    return select(values, key, expected, indices, moments, work)


def select(
    values: Array,
    key: int,
    expected: int,
    indices: Array | None,
    moments: Array | None,
    work: Pass,
    k: int | None = None,
) -> tuple[Array, Array]:
    """select_at_least; with `k`, some of the entries that are not among the k largest may be left out."""
    added_here = values.dtype in ADDED and (work.add is None or work.add[0].dtype in ADDED)  # else no arithmetic here
    beyond, in_lanes = _beyond(key, values), moments is None and _in_lanes(values, work)
    if not added_here or beyond or (work.momentum is not None and not in_lanes):
        form(values, work)
        work, in_lanes = Pass(clear=work.clear), False
    if not added_here and moments is not None:
        moments[:], moments = moments_of(values), None
    if beyond:
        return reference.select_at_least(values, key, indices=indices, moments=moments)
    if values.dtype.kind == "c":
        return taken(values, select_at_least(magnitudes(values), key, expected)[0], indices, work.clear)
    origin, momentum, add, clear = work
    bits, mask = lanes_of(values, write=clear or add is not None or origin is not None)
    lines = None if moments is None else np.empty((-(-values.size // LINE), 4))
    addend, scale = (None, None) if add is None else (readonly(np.ascontiguousarray(add[0])), values.dtype.type(add[1]))
    floats = bits if addend is None and lines is None else values if addend is not None else readonly(values)
    if origin is not None:
        origin = readonly(origin) if addend is not None else lanes_of(origin)[0]  # which is only copied
    added = addend.view(bits.dtype) if in_lanes else None  # type: ignore[union-attr]
    source = lanes_of(origin)[0] if in_lanes and origin is not None else None
    velocity = new_velocity = factor = with_nesterov = None
    if momentum is not None:
        velocity, new_velocity = readonly(momentum.velocity), momentum.new_velocity
        factor, with_nesterov = values.dtype.type(momentum.factor), momentum.nesterov or None
    index = index_dtype(values.size) if indices is None else indices.dtype
    indices = None if indices is None else readonly(indices)

    def part(start: int, stop: int) -> tuple[Array, Array]:
        given = velocity, new_velocity, floats, bits, origin, source, indices, addend, added
        old, new, *arrays = [None if array is None else array[:stop] for array in given]
        guess, typed = expected * (stop - start) // max(values.size, 1), mask.dtype.type(key)
        moving = old, new, factor, with_nesterov
        return _select_range(*arrays, mask, typed, scale, lines, start, guess, index, clear, moving, k)  # type: ignore

    count, unit = threads.count_for(values.size), CHUNK if lines is None else LINE
    edges = [values.size * t // count // unit * unit for t in range(count)] + [values.size]
    out_i, out_v = threads.joined(threads.run(part, list(pairwise(edges))))
    if lines is not None:
        moments[:] = moments_of_lines(lines)  # type: ignore[index]
    return out_i, out_v.view(values.dtype)


def _in_lanes(values: Array, work: Pass) -> bool:
    """Whether the pass adds an addend, and before that the momentum: where all are of the same floats."""
    if work.add is None or not VECTORS or values.dtype.char not in "fd":
        return False
    velocities = () if work.momentum is None else (work.momentum.velocity, work.momentum.new_velocity)
    return all(array.dtype == values.dtype for array in (work.add[0], *velocities))


def _select_range(
    floats: Any,
    bits: Any,
    origin: Any,
    source: Any,
    indices: Any,
    addend: Any,
    added: Any,
    mask: Any,
    key: Any,
    scale: Any,
    lines: Any,
    start: int,
    expected: int,
    index: Any,
    clear: bool,
    moving: tuple[Any, ...],
    k: int | None,
) -> tuple[Array, Array]:
    """(indices, bits) of the entries selected from `start` to the end, in arrays that grow as needed."""
    count, size, begin, first = 0, bits.size, start, key
    most = size - start if k is None else min(size - start, 2 * k + SPARE)
    capacity = min(most, expected + (expected >> 3)) + 2 * CHUNK
    out_i, out_v = empty(capacity, index), empty(capacity, bits.dtype)
    sums = None if lines is None else np.empty((4, MOMENT_LANES))
    while True:
        room = capacity if k is None or key != first else k + CHUNK + BLOCK - 1  # with this it stops at k entries
        given = (floats, bits, origin, source, mask, key, indices, addend, added, scale, sums, lines)
        start, count = select_chunks(*given, start, out_i[:room], out_v[:room], count, clear or None, *moving)
        if start == size:
            break
        if k is not None and count >= k and (key == first or capacity >= most):
            if key != first:  # not even all above the first k entries have room
                key, count = keep_largest(out_i[:count], out_v[:count], mask, k, bits if clear else None)
            if key == np.iinfo(key.dtype).max:
                break
            key += key.dtype.type(1)  # ties go to the k entries found before
            continue
        wanted = max(2 * count, int(1.1 * count * (size - begin) / max(start - begin, 1)))
        capacity = min(wanted, count + size - start, most) + 2 * CHUNK
        out_i, out_v = _grown(out_i, count, capacity), _grown(out_v, count, capacity)
    return out_i[:count], out_v[:count]


def _grown(array: Array, count: int, capacity: int) -> Array:
    larger = empty(capacity, array.dtype)
    larger[:count] = array[:count]
    return larger
