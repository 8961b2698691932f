"""The exact top k: a pass of `selection.py` above a bound taken from a sample, then the k largest of what it found."""

from __future__ import annotations

from typing import Any

from sparsecoll.kernels import reference
from sparsecoll.kernels.cpu.lanes import BLOCK
from sparsecoll.kernels.cpu.radix import cut, keep_largest, kth
from sparsecoll.kernels.cpu.selection import form, lanes_of, magnitudes, select, select_at_least
from sparsecoll.kernels.keys import PLAIN, Array, Pass, index_dtype
from sparsecoll.kernels.memory import empty, readonly
from sparsecoll.kernels.reference.selection import taken
from sparsecoll.kernels.sampling import bounding_sample

SAMPLE = 1 << 15  # size of the largest sample that bounds the k-th magnitude from below
BEYOND = 1 << 64  # a key that no value reaches


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
        return select_at_least(values, BEYOND, indices=indices, work=work)
    if values.dtype.kind == "c":
        form(values, work)
        return taken(values, topk(magnitudes(values), k)[0], indices, work.clear)
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
