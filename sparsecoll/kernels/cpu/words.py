"""Words, numbered by a hash table of their positions; words of equal hashes are compared byte by byte."""

from __future__ import annotations

import numpy as np

from sparsecoll.kernels.cpu.lanes import inlined, jit
from sparsecoll.kernels.keys import Array
from sparsecoll.kernels.memory import empty, filled, readonly
from sparsecoll.kernels.reference.words import OFFSET, PRIME

_OFFSET, _PRIME, _HALF = np.uint64(OFFSET), np.uint64(PRIME), np.uint64(32)


@inlined
def _hash(text, start, stop):  # type: ignore[no-untyped-def]
    h = _OFFSET
    for i in range(start, stop):
        h = (h ^ np.uint64(text[i])) * _PRIME
    return h ^ (h >> _HALF)


@jit
def _hashes(text, starts, stops, hashes):  # type: ignore[no-untyped-def]
    for w in range(starts.size):
        hashes[w] = _hash(text, starts[w], stops[w])


@jit
def _equal(text, start, stop, other, other_stop):  # type: ignore[no-untyped-def]
    same = stop - start == other_stop - other
    d = 0
    while same and start + d < stop:
        same = text[start + d] == text[other + d]
        d += 1
    return same


@jit
def _number(text, starts, stops, slots, hashes, numbers, first):  # type: ignore[no-untyped-def]
    count, last = 0, np.uint64(slots.size - 1)
    for w in range(starts.size):
        h = _hash(text, starts[w], stops[w])
        slot = h & last
        while True:
            number = slots[slot]
            if number < 0:
                slots[slot], hashes[count], first[count], numbers[w] = count, h, w, count
                count += 1
                break
            f = first[number]
            if hashes[number] == h and _equal(text, starts[w], stops[w], starts[f], stops[f]):
                numbers[w] = number
                break
            slot = (slot + np.uint64(1)) & last
    return count


@jit
def _join(text, starts, stops, joined):  # type: ignore[no-untyped-def]
    place = 0
    for w in range(starts.size):
        for i in range(starts[w], stops[w]):
            joined[place] = text[i]
            place += 1
        joined[place] = 0
        place += 1


def join_words(text: Array, starts: Array, stops: Array) -> Array:
    size = int((stops - starts).sum()) + starts.size
    return filled(size, np.uint8, _join, readonly(text), readonly(starts), readonly(stops))


def word_hashes(text: Array, starts: Array, stops: Array) -> Array:
    return filled(starts.size, np.uint64, _hashes, readonly(text), readonly(starts), readonly(stops))


def number_words(text: Array, starts: Array, stops: Array) -> tuple[Array, Array]:
    slots = empty(1 << (2 * starts.size).bit_length(), np.int32 if starts.size < 1 << 31 else np.int64)
    slots[:] = -1
    hashes, numbers, first = (empty(starts.size, dtype) for dtype in (np.uint64, np.int64, np.int64))
    count = _number(readonly(text), readonly(starts), readonly(stops), slots, hashes, numbers, first)
    return numbers, first[:count]
