"""Selection of the entries above a threshold: its arguments, threads and memory, and what needs no pass of its own.

`selection_pass.py` has the pass over the values. The exact top k is a pass above a bound taken from a sample, then the
k largest of what it found.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sparsecoll.kernels import reference, threads
from sparsecoll.kernels.cpu.codecs import from_float16
from sparsecoll.kernels.cpu.lanes import BLOCK, jit, magnitude_key
from sparsecoll.kernels.cpu.radix import cut, keep_largest, kth, range_of
from sparsecoll.kernels.cpu.selection_pass import CHUNK, LINE, select_chunks
from sparsecoll.kernels.keys import PLAIN, Array, Pass, index_dtype, is_float
from sparsecoll.kernels.memory import empty, grown, readonly
from sparsecoll.kernels.reference.selection import MOMENT_LANES, moments_of_lines, taken
from sparsecoll.kernels.sampling import bounding_sample

SAMPLE = 1 << 15  # size of the largest sample that bounds the k-th magnitude from below
SPARE = 1 << 16  # entries that a top k may find beyond 2k before it keeps the k largest of them


@jit
def _count(bits, mask, key):  # type: ignore[no-untyped-def]
    count = 0
    for i in range(bits.size):
        count += magnitude_key(bits[i], mask) >= key
    return count


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
    return 0 if key > _highest(bits) else int(_count(bits, mask, mask.dtype.type(key)))


def magnitudes(values: Array) -> Array:
    """|z| of complex numbers, other values as they are: both have the same magnitude keys."""
    return np.abs(values, out=empty(values.size, values.real.dtype)) if values.dtype.kind == "c" else values


def key_range(values: Array) -> tuple[int, int]:
    if values.size == 0:
        return 0, 0
    lowest, highest = range_of(*lanes_of(magnitudes(values)))
    return int(lowest), int(highest)


def moments_of(values: Array) -> Array:
    moments = np.empty(4)
    select_at_least(values, _highest(magnitudes(values[:0])), moments=moments)
    return moments


def form(values: Array, work: Pass) -> None:
    if values.dtype.char in "fd":
        select_at_least(values, _highest(values), work=work._replace(clear=False))
    else:
        reference.form(values, work)


def _highest(values: Array) -> int:
    """The highest key of the size of the values; no float has it."""
    return (1 << 8 * values.itemsize) - 1


def select_at_least(
    values: Array, key: int, expected: int = 0, *, indices: Array | None = None, moments: Any = None, work: Pass = PLAIN
) -> tuple[Array, Array]:
    return select(values, key, expected, indices, moments, work)


def select(
    values: Array, key: int, expected: int, indices: Any, moments: Any, work: Pass, k: int | None = None
) -> tuple[Array, Array]:
    """select_at_least; with `k`, some of the entries that are not among the k largest may be left out."""
    if values.dtype.char not in "fd":  # there is no arithmetic of this type in the pass
        reference.form(values, work)
        work = Pass(clear=work.clear)
    if values.dtype.kind == "c":
        found, _ = select_at_least(magnitudes(values), key, expected, moments=moments)
        return taken(values, found, indices, work.clear)
    if key > _highest(values) and not is_float(values.dtype):
        return reference.select_at_least(values, key, indices=indices, moments=moments)
    source, momentum, add, clear = work
    old, _, new, nesterov = momentum or (None, 0.0, None, False)
    source = None if source is None else lanes_of(source)[0]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        addend = None if add is None else np.ascontiguousarray(add[0], values.dtype)
    works = any(part is not None for part in work[:3])
    bits, mask = lanes_of(values, write=clear or works)
    lines = None if moments is None else np.empty((-(-values.size // LINE), 4))
    numbers = None if lines is None else _numbers(values)
    arrays = [None if array is None else readonly(array) for array in (numbers, indices, source, addend, old)]
    typed = mask.dtype.type(min(key, _highest(values)))
    scales = [None if pair is None else values.dtype.type(pair[1]) for pair in (add, momentum)]

    def part(start: int, stop: int) -> tuple[Array, Array]:
        reals, own, origin, added, velocity = (None if array is None else array[:stop] for array in arrays)
        moving = (velocity, None if new is None else new[:stop], scales[1], nesterov or None)
        done = (origin, added, scales[0], *moving) if works else ()
        guess = expected * (stop - start) // max(values.size, 1)
        given = (reals, bits[:stop], mask, own, None if lines is None else np.empty((4, MOMENT_LANES)), lines)
        index = index_dtype(values.size) if own is None else own.dtype
        return _select_range(given, typed, done, clear, start, guess, index, k)

    edges = threads.ranges(values.size, CHUNK if lines is None else LINE)
    out_i, out_v = threads.joined(threads.run(part, edges))
    if lines is not None:
        moments[:] = moments_of_lines(lines)
    return out_i, out_v.view(values.dtype)


def _numbers(values: Array) -> Array:
    """The same numbers as an array that Numba can compute with."""
    if values.dtype.kind == "b":
        return values.view(np.uint8)
    if values.dtype.itemsize == 2 and is_float(values.dtype):
        return from_float16(values) if values.dtype.kind == "f" else reference.from_bfloat16(values.view(np.uint16))
    return values


def _select_range(
    given: Any, key: Any, done: Any, clear: bool, start: int, expected: int, index: Any, k: int | None
) -> tuple[Array, Array]:
    """(indices, bits) of the entries selected from `start` to the end, in arrays that grow as needed."""
    _, bits, mask, *_ = given
    count, size, begin, first = 0, bits.size, start, key
    most = size - start if k is None else min(size - start, 2 * k + SPARE)
    capacity = min(most, expected + (expected >> 3)) + 2 * CHUNK
    out_i, out_v = empty(capacity, index), empty(capacity, bits.dtype)
    while True:
        room = capacity if k is None or key != first else k + CHUNK + BLOCK - 1  # with this it stops at k entries
        start, count = select_chunks(*given, key, start, out_i[:room], out_v[:room], count, clear or None, *done)
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
        out_i, out_v = grown(out_i, count, capacity), grown(out_v, count, capacity)
    return out_i[:count], out_v[:count]


def topk_by_key(values: Array, key: int, ties: int, *, indices: Array | None = None) -> Any:
    if values.dtype.kind == "c":
        return taken(values, topk_by_key(magnitudes(values), key, ties)[0], indices)
    index, (bits, mask) = index_dtype(values.size) if indices is None else indices.dtype, lanes_of(values)
    out_i, out_v = empty(values.size + BLOCK, index), empty(values.size + BLOCK, bits.dtype)
    indices = None if indices is None else readonly(indices)
    count = cut(bits, mask, indices, mask.dtype.type(key), ties, out_i, out_v)
    return out_i[:count], out_v[:count].view(values.dtype)


def lower_bound_key(values: Array, k: int, work: Pass = PLAIN) -> int:
    found = bounding_sample(values, k, work, SAMPLE, reference.form)
    return kth_key(*found)[0] if found else 0


def kth_key(values: Array, k: int) -> tuple[int, int]:
    key, ties = kth(*lanes_of(magnitudes(values)), k)
    return int(key), ties


def topk(values: Array, k: int, *, indices: Array | None = None, work: Pass = PLAIN) -> tuple[Array, Array]:
    if k == 0:
        return select_at_least(values, 1 << 64, indices=indices, work=work)
    if values.dtype.kind == "c":
        form(values, work)
        return taken(values, topk(magnitudes(values), k)[0], indices, work.clear)
    if k < values.size < 2 * k and work is PLAIN:  # no pass leaves out enough
        key, ties = kth_key(values, k)
        return topk_by_key(values, key, ties, indices=indices)  # type: ignore[no-any-return]
    bound, room = lower_bound_key(values, k, work), k + (k >> 2)
    found_i, found_v = select(values, bound, room, indices, None, work, k)
    if found_v.size < min(k, values.size):  # the sample was not typical, as for periodic data
        if work.clear:
            values[found_i] = found_v
        found_i, found_v = select(values, 0, room, indices, None, Pass(clear=work.clear), k)
    if k >= found_v.size:
        return found_i, found_v
    bits, mask = lanes_of(found_v, write=True)
    _, count = keep_largest(found_i, bits, mask, k, lanes_of(values, write=True)[0] if work.clear else None)
    return found_i[:count], found_v[:count]
