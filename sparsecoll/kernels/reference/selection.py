"""Selection by magnitude keys (see kernels/keys.py).

A position is an offset in an array (int64); an index is a coordinate of the long sparse vector (uint32 or uint64).
Selections break ties by larger magnitude, then by lower position.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsecoll.kernels.keys import PLAIN, Array, Pass, bits_and_mask, index_dtype

__all__ = ["count_at_least", "form", "key_range", "kth_key", "lower_bound_key", "magnitude_keys", "moments_of"]
__all__ += ["random_indices", "select_at_least", "topk", "topk_by_key"]

ROUNDS = 6  # of the permutation behind random_indices
MOMENT_LANES = 256  # sums over a vector are formed in so many columns, item i into column i % MOMENT_LANES,
MOMENT_ROWS = 16  # in lines of so many rows


def magnitude_keys(values: Array) -> Array:
    """keys of `values`, an unsigned array of the same item size."""
    bits, mask = bits_and_mask(values)
    return bits & bits.dtype.type(mask)  # type: ignore[no-any-return]


def count_at_least(values: Array, key: int) -> int:
    """How many values have a key >= `key`."""
    return int(np.count_nonzero(magnitude_keys(values) >= key))


def key_range(values: Array) -> tuple[int, int]:
    """(smallest key, largest key); (0, 0) for no values."""
    keys = magnitude_keys(values)
    return (int(keys.min()), int(keys.max())) if keys.size else (0, 0)


def form(values: Array, work: Pass) -> None:
    """Do what `work` does before anything is selected. Each product, and each sum, is rounded."""
    source, momentum, add, _ = work
    if source is not None:
        values[:] = source
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if momentum is not None:
            velocity, factor, new_velocity, nesterov = momentum
            typed = values.dtype.type(factor)
            if nesterov:
                np.add(velocity, values, out=new_velocity)
                np.multiply(new_velocity, typed, out=new_velocity)
                np.add(values, new_velocity, out=values)
            else:
                np.add(values, typed * velocity, out=new_velocity)
                values[:] = new_velocity
        if add is not None:
            values += values.dtype.type(add[1]) * add[0].astype(values.dtype, copy=False)


def moments_of(values: Array) -> Array:
    """float64: sum of x, of x^2, of |x|, and the largest |x| (NaN passed over). Their order of additions is fixed.

    Complex numbers count by their magnitudes.

    A line is MOMENT_ROWS rows of MOMENT_LANES items: its columns are added from the first row on, then by halves. The
    sums of all lines are added in the same way.
    """
    lines, size = [], MOMENT_ROWS * MOMENT_LANES
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, values.size, size):
            line = values[start : start + size]
            x = (np.abs(line) if line.dtype.kind == "c" else line).astype(np.float64)
            lines.append([_folded(x), _folded(x * x), _folded(np.abs(x)), np.fmax.reduce(np.abs(x), initial=0.0)])
    return moments_of_lines(np.array(lines).reshape(-1, 4))


def moments_of_lines(lines: Array) -> Array:
    """The moments of a vector from those of its lines, (lines, 4)."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.array([*(_folded(column) for column in lines.T[:3]), lines[:, 3].max(initial=0.0)])


def _folded(terms: Array) -> Any:
    columns = np.zeros(MOMENT_LANES)
    for start in range(0, terms.size, MOMENT_LANES):
        row = terms[start : start + MOMENT_LANES]
        columns[: row.size] += row
    while columns.size > 1:
        half = columns.size // 2
        columns = columns[:half] + columns[half:]
    return columns[0]


def select_at_least(
    values: Array,
    key: int,
    expected: int = 0,
    *,
    indices: Array | None = None,
    moments: Array | None = None,
    work: Pass = PLAIN,
) -> tuple[Array, Array]:
    """The entries with a key >= `key`: (their `indices`, or positions if None; their values), ascending.

    Args:
        expected: a guess of their number.
        moments: float64[4], filled with the moments of the values.
        work: other work of the same pass.
    """
    form(values, work)
    if moments is not None:
        moments[:] = moments_of(values)
    return taken(values, np.flatnonzero(magnitude_keys(values) >= key), indices, work.clear)


def taken(values: Array, positions: Array, indices: Array | None, clear: bool = False) -> tuple[Array, Array]:
    taken = values[positions]
    if clear:
        values[positions] = 0
    return positions.astype(index_dtype(values.size)) if indices is None else indices[positions], taken


def lower_bound_key(values: Array, k: int, work: Pass = PLAIN) -> int:
    """A key that at least k values probably reach after `work`; any key is allowed, and all values reach this one."""
    return 0


def random_indices(length: int, count: int, key: int) -> Array:
    """`count` different indices below `length`, ascending: what a keyed permutation does to 0 .. count-1.

    A Feistel network of ROUNDS rounds on 2h bits (2^2h >= length, at most four times as many), applied again to
    what falls beyond `length` (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", cycle walking).
    """
    count = min(count, length)
    half = max(1, (max(length - 1, 1).bit_length() + 1) // 2)
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    chosen = np.arange(count, dtype=np.uint64)
    beyond = np.ones(count, bool)
    while beyond.any():
        left, right = chosen[beyond] >> shift, chosen[beyond] & mask
        for number in range(ROUNDS):
            left, right = right, left ^ (_scrambled(right, key, number) & mask)
        chosen[beyond] = (left << shift) | right
        beyond = chosen >= np.uint64(length)
    return np.sort(chosen.astype(index_dtype(length)))


def _scrambled(x: Array, key: int, number: int) -> Array:
    with np.errstate(over="ignore"):
        z = (x + np.uint64(key) + np.uint64(number) * np.uint64(0xD1B54A32D192ED03)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return z ^ (z >> np.uint64(31))


def kth_key(values: Array, k: int) -> tuple[int, int]:
    """(key of the k-th largest magnitude, how many values with exactly that key belong to the top k); 1 <= k <= n."""
    ordered = np.sort(magnitude_keys(values))[::-1]
    key = int(ordered[k - 1])
    return key, k - int(np.count_nonzero(ordered > key))


def topk_by_key(values: Array, key: int, ties: int, *, indices: Array | None = None) -> tuple[Array, Array]:
    """All entries above `key` and the first `ties` entries equal to it, as `select_at_least` returns them."""
    keys = magnitude_keys(values)
    chosen = keys > key
    chosen[np.flatnonzero(keys == key)[:ties]] = True
    return taken(values, np.flatnonzero(chosen), indices)


def topk(values: Array, k: int, *, indices: Array | None = None, work: Pass = PLAIN) -> tuple[Array, Array]:
    """The entries of the k largest magnitudes, ties by lower position; all if k >= n. As `select_at_least`."""
    form(values, work)
    order = np.lexsort((np.arange(values.size), np.invert(magnitude_keys(values))))
    return taken(values, np.sort(order[:k]), indices, work.clear)
