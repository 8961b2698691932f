"""The sum of two sparse vectors in one pass: entries of equal index are added as they are merged.

No branch depends on the data. Values are chosen by masks of their bits, since LLVM chooses between two floats by a
branch unless the processor has AVX-512. Each step waits for the one before, so four places of a block are merged at a
time, each to a quarter of a buffer that stays in the cache.
"""

from __future__ import annotations

import numpy as np

from sparsecoll.kernels.cpu.lanes import inlined, jit, viewed
from sparsecoll.kernels.keys import Array
from sparsecoll.kernels.memory import empty

QUARTER = 1 << 11  # entries of each quarter of the buffer
SPARE = 2  # entries of a quarter by which its end may move, see _cut


@inlined
def _step(a, x, i, b, y, j, keys, sums, o):  # type: ignore[no-untyped-def]
    """Write the lower one of a[i] and b[j], or the sum of both; return the next places."""
    p, q, zero = np.int64(a[i]), np.int64(b[j]), sums.dtype.type(0)
    own, other = (p - q - 1) >> 63, (q - p - 1) >> 63  # -1 if p <= q, -1 if q <= p; otherwise 0
    u, v = x.dtype.type(x[i] & own), x.dtype.type(y[j] & other)
    keys[o] = min(p, q)
    sums[o] = (viewed(u, sums.dtype) + zero) + viewed(v, sums.dtype)  # from +0 on, so that -0 becomes +0
    return i - np.uint64(own), j - np.uint64(other), o + np.uint64(1)


@jit
def among_first(a, i, i_stop, b, j, j_stop, count):  # type: ignore[no-untyped-def]
    """How many of the first `count` entries of the merged a[i:i_stop] and b[j:j_stop] are in a; uint64."""
    low = count - (j_stop - j) if count > j_stop - j else np.uint64(0)
    high = min(count, i_stop - i)
    while low < high:
        middle = (low + high) >> np.uint64(1)
        if a[i + middle] <= b[j + count - middle - np.uint64(1)]:
            low = middle + np.uint64(1)
        else:
            high = middle
    return low


@jit
def _cut(a, i, i_stop, b, j, j_stop, count):  # type: ignore[no-untyped-def]
    """The places up to which a and b have the first `count` of the merged entries, or one more of an equal index."""
    low = among_first(a, i, i_stop, b, j, j_stop, count)
    u, v = i + low, j + count - low
    if u > i and v < j_stop and a[u - np.uint64(1)] == b[v]:
        v += np.uint64(1)
    return u, v


@jit
def _finish(a, x, i, i_stop, b, y, j, j_stop, keys, sums, o):  # type: ignore[no-untyped-def]
    """Merge the rest of a quarter; return where it ends."""
    zero = sums.dtype.type(0)
    while i < i_stop and j < j_stop:
        for _ in range(min(i_stop - i, j_stop - j)):  # so many steps need no test
            i, j, o = _step(a, x, i, b, y, j, keys, sums, o)
    for d in range(i_stop - i):
        keys[o + d], sums[o + d] = a[i + d], viewed(x[i + d], sums.dtype) + zero
    o += i_stop - i
    for d in range(j_stop - j):
        keys[o + d], sums[o + d] = b[j + d], viewed(y[j + d], sums.dtype) + zero
    return o + (j_stop - j)


@jit
def _union(a, x, b, y, keys, sums, out_indices, out_sums):  # type: ignore[no-untyped-def]
    """Write the union and return its size. `keys` and `sums` have four quarters."""
    count, none = np.uint64(0), np.uint64(0)
    i, j, a_stop, b_stop = none, none, np.uint64(a.size), np.uint64(b.size)
    quarter = np.uint64(keys.size >> 2)
    while i < a_stop or j < b_stop:
        share = min(a_stop - i + b_stop - j, np.uint64(4) * (quarter - np.uint64(SPARE))) >> np.uint64(2)
        share = max(share, np.uint64(1))
        i0, j0, o0 = i, j, none
        i1, j1 = _cut(a, i0, a_stop, b, j0, b_stop, min(share, a_stop - i0 + b_stop - j0))
        i2, j2 = _cut(a, i1, a_stop, b, j1, b_stop, min(share, a_stop - i1 + b_stop - j1))
        i3, j3 = _cut(a, i2, a_stop, b, j2, b_stop, min(share, a_stop - i2 + b_stop - j2))
        i, j = _cut(a, i3, a_stop, b, j3, b_stop, min(share, a_stop - i3 + b_stop - j3))
        s0, s1, s2, s3, t0, t1, t2, t3 = i1, i2, i3, i, j1, j2, j3, j
        o1, o2, o3 = quarter, quarter + quarter, quarter + quarter + quarter
        while True:
            steps = min(s0 - i0, t0 - j0, s1 - i1, t1 - j1, s2 - i2, t2 - j2, s3 - i3, t3 - j3)
            if steps == none:
                break
            for _ in range(steps):
                i0, j0, o0 = _step(a, x, i0, b, y, j0, keys, sums, o0)
                i1, j1, o1 = _step(a, x, i1, b, y, j1, keys, sums, o1)
                i2, j2, o2 = _step(a, x, i2, b, y, j2, keys, sums, o2)
                i3, j3, o3 = _step(a, x, i3, b, y, j3, keys, sums, o3)
        ends = (
            _finish(a, x, i0, s0, b, y, j0, t0, keys, sums, o0),
            _finish(a, x, i1, s1, b, y, j1, t1, keys, sums, o1),
            _finish(a, x, i2, s2, b, y, j2, t2, keys, sums, o2),
            _finish(a, x, i3, s3, b, y, j3, t3, keys, sums, o3),
        )
        start = none
        for stop in ends:
            for d in range(stop - start):
                out_indices[count + d] = keys[start + d]
            for d in range(stop - start):
                out_sums[count + d] = sums[start + d]
            count += stop - start
            start += quarter
    return np.int64(count)


def union_sum(a: Array, x: Array, b: Array, y: Array) -> tuple[Array, Array]:
    """merge_sum of two vectors: contiguous indices a, b and values x, y, of one dtype each."""
    room = a.size + b.size
    quarters = min(4 * QUARTER, room + 4 * SPARE + 4) & ~3
    out_indices, out_sums = empty(room, a.dtype), empty(room, x.dtype)
    keys, sums = np.empty(quarters, a.dtype), np.empty(quarters, x.dtype)
    kind = np.dtype(f"u{x.itemsize}")
    count = _union(a, x.view(kind), b, y.view(kind), keys, sums, out_indices, out_sums)
    return out_indices[:count], out_sums[:count]
