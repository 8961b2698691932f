"""The sum of sparse vectors: their entries are merged, then those of equal indices are added.

A block of some thousand entries at a time, which stays in the second-level cache, is merged pairwise: the entries of
two vectors into one sorted run, two runs into one, until one is left. Equal indices stay in the order of the vectors.
No branch depends on the data, and each merge works on two places at a time, since each step waits for the one before.
Two vectors are added in one pass (union.py), and where entries are dense, windows.py is faster.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparsecoll.kernels import reference, threads
from sparsecoll.kernels.cpu.lanes import array_at, inlined, jit
from sparsecoll.kernels.cpu.sums import addresses, as_contiguous, end
from sparsecoll.kernels.cpu.union import among_first, union_sum
from sparsecoll.kernels.cpu.windows import are_dense, sum_in_windows
from sparsecoll.kernels.keys import Array
from sparsecoll.kernels.memory import empty

BLOCK = 1 << 17  # bytes of the entries merged at a time
SAMPLES = 64  # indices for each thread, of which some divide the entries among threads


@inlined
def _step(a, x, s, b, y, t, keys, bits, out):  # type: ignore[no-untyped-def]
    """Write the lower one of a[s] and b[t]; return the next places."""
    p, q, u, v = a[s], b[t], x[s], y[t]
    keys[out] = min(p, q)
    bits[out] = v if q < p else u
    return s + np.uint64(p <= q), t + np.uint64(q < p), out + np.uint64(1)


@jit
def _merge(a, x, i, i_stop, b, y, j, j_stop, keys, bits, o):  # type: ignore[no-untyped-def]
    """Merge a[i:i_stop] with values x and b[j:j_stop] with values y; write keys and bits from `o` on."""
    half = np.uint64((i_stop - i + j_stop - j) >> 1)
    s, t, out = np.uint64(i), np.uint64(j), np.uint64(o)  # unsigned positions: negative ones would be looked at
    u_stop, v_stop = np.uint64(i_stop), np.uint64(j_stop)
    first = among_first(a, s, u_stop, b, t, v_stop, half)
    u, v, far = s + first, t + half - first, out + half
    s_stop, t_stop = u, v
    while s < s_stop and t < t_stop and u < u_stop and v < v_stop:
        s, t, out = _step(a, x, s, b, y, t, keys, bits, out)
        u, v, far = _step(a, x, u, b, y, v, keys, bits, far)
    _finish(a, x, s, s_stop, b, y, t, t_stop, keys, bits, out)
    _finish(a, x, u, u_stop, b, y, v, v_stop, keys, bits, far)


@jit
def _finish(a, x, s, s_stop, b, y, t, t_stop, keys, bits, out):  # type: ignore[no-untyped-def]
    while s < s_stop and t < t_stop:
        s, t, out = _step(a, x, s, b, y, t, keys, bits, out)
    for d in range(s_stop - s):
        keys[out + d], bits[out + d] = a[s + d], x[s + d]
    for d in range(t_stop - t):
        keys[out + d], bits[out + d] = b[t + d], y[t + d]


@jit
def _block(index_at, sizes, starts, parts, stops, room, like):  # type: ignore[no-untyped-def]
    """Write the parts that have some of the next `room` entries, and where these stop; return how many they are."""
    active = 0
    for p in range(sizes.size):
        active += starts[p] < sizes[p]
    share = max(1, room // max(1, active))
    limit, limited = np.uint64(0), False
    for p in range(sizes.size):
        if starts[p] + share < sizes[p]:
            index = np.uint64(array_at(index_at[p], sizes[p], like)[starts[p] + share])
            limit = index if not limited or index < limit else limit
            limited = True
    found = 0
    for p in range(sizes.size):
        stop = sizes[p]
        if limited and starts[p] < stop:
            stop = end(array_at(index_at[p], sizes[p], like), starts[p], limit)
        if starts[p] < stop:
            parts[found], stops[found] = p, stop
            found += 1
    return found


@jit
def _merge_block(index_at, value_at, sizes, starts, parts, stops, found, ends, keys, bits):  # type: ignore[no-untyped-def]
    """Merge the entries of a block; return the row of `keys` and `bits` in which they are, and their number."""
    runs, filled = 0, 0
    for r in range(0, found, 2):
        p, q = parts[r], parts[min(r + 1, found - 1)]
        a, x = array_at(index_at[p], sizes[p], keys), array_at(value_at[p], sizes[p], bits)
        b, y = array_at(index_at[q], sizes[q], keys), array_at(value_at[q], sizes[q], bits)
        q_start = starts[q] if r + 1 < found else stops[r]
        q_stop = stops[min(r + 1, found - 1)]
        _merge(a, x, starts[p], stops[r], b, y, q_start, q_stop, keys[0], bits[0], filled)
        filled += stops[r] - starts[p] + q_stop - q_start
        runs += 1
        ends[runs] = filled
    for r in range(found):
        starts[parts[r]] = stops[r]
    row = 0
    while runs > 1:
        a, x = keys[row], bits[row]
        for r in range(0, runs, 2):
            first, middle, last = ends[r], ends[r + 1], ends[min(r + 2, runs)]
            _merge(a, x, first, middle, a, x, middle, last, keys[1 - row], bits[1 - row], first)
        for r in range(0, runs, 2):
            ends[(r >> 1) + 1] = ends[min(r + 2, runs)]
        runs = (runs + 1) >> 1
        row = 1 - row
    return row, filled


@jit
def _add_up(keys, values, filled, out_indices, out_sums, count):  # type: ignore[no-untyped-def]
    """Append the indices of a merged block and the sums of their values, from +0 on; return the new count."""
    one = np.uint64(1)
    slot, last = np.uint64(count), ~keys[0]
    for i in range(np.uint64(filled)):
        index = keys[i]
        out_sums[slot] = 0
        place = slot - np.uint64(index == last)
        out_indices[place] = index
        out_sums[place] += values[i]
        slot = place + one
        last = index
    return np.int64(slot)


@jit
def _merge_all(index_at, value_at, sizes, starts, parts, stops, ends, keys, bits, values, out_indices, out_sums):  # type: ignore[no-untyped-def]
    count = 0
    while True:
        found = _block(index_at, sizes, starts, parts, stops, keys.shape[1], out_indices)
        if found == 0:
            return count
        row, filled = _merge_block(index_at, value_at, sizes, starts, parts, stops, found, ends, keys, bits)
        count = _add_up(keys[row], values[row], filled, out_indices, out_sums, count)


def merge_sum(parts: Sequence[tuple[Array, Array]], dtype: np.dtype[np.generic]) -> tuple[Array, Array]:
    parts = [part for part in parts if part[0].size] or list(parts[:1])
    if not parts or parts[0][0].size == 0:
        return reference.merge_sum(parts, dtype)
    if len(parts) == 1:
        return parts[0][0], parts[0][1].astype(dtype) + dtype.type(0)  # -0 becomes +0, as in any sum that starts at +0
    indices = [np.ascontiguousarray(i) for i, _ in parts]
    values = [v for _, v in parts]
    count = threads.count_for(sum([i.size for i in indices]))
    if count == 1:
        return _merged(indices, values, dtype)
    sample = np.sort(np.concatenate([i[:: max(1, i.size // (SAMPLES * count))] for i in indices]))
    inner = sample[[sample.size * t // count for t in range(1, count)]]
    cuts = [[0, *np.searchsorted(i, inner).tolist(), i.size] for i in indices]

    def part(t: int) -> tuple[Array, Array]:
        own_i, own_v = ([a[c[t] : c[t + 1]] for a, c in zip(of, cuts, strict=True)] for of in (indices, values))
        return _merged(own_i, own_v, dtype)

    return threads.joined(threads.run(part, [(t,) for t in range(count)]))


def _merged(indices: list[Array], values: list[Array], dtype: np.dtype[np.generic]) -> tuple[Array, Array]:
    values = [as_contiguous(v, dtype) for v in values]
    if len(indices) == 2:
        return union_sum(indices[0], values[0], indices[1], values[1])
    if are_dense(indices, dtype):
        return sum_in_windows(indices, values, dtype)
    room = sum(i.size for i in indices) + 1
    out_indices, out_sums = empty(room, indices[0].dtype), empty(room, dtype)
    width = max(min(room, BLOCK // (indices[0].itemsize + dtype.itemsize)), len(indices))
    keys, bits = np.empty((2, width), indices[0].dtype), np.empty((2, width), f"u{dtype.itemsize}")
    state = (*np.zeros((3, len(indices) + 1), np.int64), keys, bits, bits.view(dtype))
    count = _merge_all(*addresses(indices, values), *state, out_indices, out_sums)
    return out_indices[:count], out_sums[:count]
