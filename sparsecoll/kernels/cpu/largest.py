"""The exact top k: a pass of `selection.py` above a bound taken from a sample, then the k largest of what it found."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsecoll.kernels import reference
from sparsecoll.kernels.cpu.lanes import BLOCK, jit, magnitude_key
from sparsecoll.kernels.cpu.selection import lanes_of, select_at_least
from sparsecoll.kernels.cpu.selection_pass import select_all
from sparsecoll.kernels.keys import PLAIN, Array, Pass, bits_and_mask, index_dtype
from sparsecoll.kernels.memory import empty, readonly
from sparsecoll.kernels.sampling import bounding_sample

SAMPLE = 1 << 15  # size of the largest sample that bounds the k-th magnitude from below
BEYOND = 1 << 64  # a key that no value reaches


@jit
def _first_surplus_tie(bits, mask, key, ties):  # type: ignore[no-untyped-def]
    """The position of the item with this key that follows the first `ties` of them; the size if there is none."""
    for i in range(bits.size):
        if magnitude_key(bits[i], mask) == key:
            if ties == 0:
                return i
            ties -= 1
    return bits.size


@jit
def _put_back(dense, positions, bits, mask, key, edge):  # type: ignore[no-untyped-def]
    for i in range(bits.size):
        m = magnitude_key(bits[i], mask)
        if m < key or (m == key and i >= edge):
            dense[positions[i]] = bits[i]


def _cut_at_ties(values: Array, key: int, ties: int) -> tuple[Any, int]:
    """(typed key, position of the first item with this key that exceeds `ties`)."""
    bits, mask = lanes_of(values)
    typed = mask.dtype.type(key)
    return typed, int(_first_surplus_tie(bits, mask, typed, ties))


def topk_by_key(values: Array, key: int, ties: int, *, indices: Array | None = None) -> Any:
    index = index_dtype(values.size) if indices is None else indices.dtype
    room = values.size + BLOCK
    out = empty(room, index), empty(room, values.dtype)
    return _topk_by_key_into(*out, values, indices, *_cut_at_ties(values, key, ties))


def _topk_by_key_into(out_i: Array, out_v: Array, values: Array, indices: Array | None, key: Any, edge: int) -> Any:
    """The outputs may be `indices` and `values` themselves: an item is written only after it was read."""
    bits, mask = lanes_of(values)
    out_bits = lanes_of(out_v, write=True)[0]
    indices = None if indices is None else readonly(indices)
    count = 0
    for start, stop, least in ((0, edge, key), (edge, values.size, key + key.dtype.type(1))):
        if least >= key:  # else the key was the largest one: nothing is above it
            part = bits[:stop]
            count = select_all(part, mask, least, indices, start, out_i, out_bits, count)
    return out_i[:count], out_v[:count]


def lower_bound_key(values: Array, k: int, work: Pass = PLAIN) -> int:
    found = bounding_sample(values, k, work, SAMPLE, reference.form)
    return kth_key(*found)[0] if found else 0


def kth_key(values: Array, k: int) -> tuple[int, int]:
    bits, mask = bits_and_mask(values)
    keys = np.bitwise_and(bits, bits.dtype.type(mask), out=empty(bits.size, bits.dtype))
    position = keys.size - k
    keys.partition(position)
    return int(keys[position]), k - int(np.count_nonzero(keys[position + 1 :] > keys[position]))


def topk(values: Array, k: int, *, indices: Array | None = None, work: Pass = PLAIN) -> tuple[Array, Array]:
    if k == 0:
        return select_at_least(values, BEYOND, indices=indices, work=work)
    bound = lower_bound_key(values, k, work)
    found_i, found_v = select_at_least(values, bound, k + (k >> 2), indices=indices, work=work)
    if found_v.size < min(k, values.size):  # the sample was not typical, as for periodic data
        if work.clear:
            values[found_i] = found_v
        found_i, found_v = select_at_least(values, 0, values.size, indices=indices, work=Pass(clear=work.clear))
    if k >= found_v.size:
        return found_i, found_v
    typed, edge = _cut_at_ties(found_v, *kth_key(found_v, k))
    if work.clear:
        _put_back(lanes_of(values, write=True)[0], readonly(found_i), *lanes_of(found_v), typed, edge)
    return _topk_by_key_into(found_i, found_v, found_v, found_i, typed, edge)  # type: ignore[no-any-return]
