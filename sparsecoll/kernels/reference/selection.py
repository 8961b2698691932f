"""Selection by magnitude keys (see kernels/keys.py).

A position is an offset in an array (int64); an index is a coordinate of the long sparse vector (uint32 or uint64).
Selections break ties by larger magnitude, then by lower position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sparsecoll.kernels.keys import Addend, Array, Momentum, bits_and_mask, index_dtype

__all__ = [
    "accumulate",
    "count_at_least",
    "key_range",
    "kth_key",
    "lower_bound_key",
    "magnitude_keys",
    "moments_of",
    "nesterov",
    "random_indices",
    "select_at_least",
    "topk",
    "topk_by_key",
]

ROUNDS = 6  # of the permutation behind random_indices
MOMENT_LANES = 256  # sums over a vector are formed in so many columns, item i into column i % MOMENT_LANES,
MOMENT_ROWS = 16  # in lines of so many rows


def magnitude_keys(values: Array) -> Array:
    """keys of `values`, an unsigned array of the same item size."""
    bits, mask = bits_and_mask(values)
    keys: Array = bits & bits.dtype.type(mask)
    return keys


def count_at_least(values: Array, key: int) -> int:
    """How many values have a key >= `key`."""
    return int(np.count_nonzero(magnitude_keys(values) >= key))


def key_range(values: Array) -> tuple[int, int]:
    """(smallest key, largest key); (0, 0) for no values."""
    keys = magnitude_keys(values)
    return (int(keys.min()), int(keys.max())) if keys.size else (0, 0)


def accumulate(values: Array, add: Addend, out: Array | None = None) -> None:
    """values += scale * addend, in the dtype of values; the product is rounded before the sum.

    Args:
        out: takes the sums instead of `values`, which then do not change; of the same dtype.
    """
    values = moved(values, out)
    with np.errstate(over="ignore", invalid="ignore"):
        values += values.dtype.type(add[1]) * add[0].astype(values.dtype, copy=False)


def nesterov(velocity: Array, gradient: Array, factor: float, new_velocity: Array, out: Array) -> None:
    """new_velocity = factor * (velocity + gradient), out = gradient + new_velocity.

    Args:
        velocity, gradient, new_velocity, out: of one dtype and length; `out` may be `gradient`, no others overlap.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(velocity, gradient, out=new_velocity)
        np.multiply(new_velocity, out.dtype.type(factor), out=new_velocity)
        np.add(gradient, new_velocity, out=out)


def begun(
    values: Array,
    out: Array | None,
    momentum: Momentum | None,
    add: Callable[..., None] = accumulate,
    add_nesterov: Callable[..., None] = nesterov,
) -> tuple[Array, Array | None]:
    """Form the new velocity, by kernels; return what replaces the values, and where it is to be moved, if anywhere."""
    if momentum is None:
        return values, out
    velocity, factor, new_velocity, is_nesterov = momentum
    target = values if out is None else out
    if is_nesterov:
        add_nesterov(velocity, values, factor, new_velocity, target)
        return target, None
    add(values, (velocity, factor), new_velocity)
    return new_velocity, target


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
            largest = np.fmax.reduce(np.abs(x), initial=0.0)
            lines.append([_folded(x), _folded(x * x), _folded(np.abs(x)), largest])
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


def moved(values: Array, out: Array | None) -> Array:
    """The values, or `out` with a copy of them."""
    if out is None:
        return values
    out[:] = values
    return out


def select_at_least(
    values: Array,
    key: int,
    expected: int = 0,
    *,
    indices: Array | None = None,
    add: Addend | None = None,
    out: Array | None = None,
    moments: Array | None = None,
    clear: bool = False,
    momentum: Momentum | None = None,
) -> tuple[Array, Array]:
    """The entries with a key >= `key`: (their `indices`, or positions if None; their values), ascending.

    Args:
        expected: a guess of their number.
        add: first values += scale * addend, in place.
        out: takes the place of `values`, which then do not change; of the same dtype.
        moments: float64[4], filled with the moments of the values after that.
        clear: values taken are zero in `values` afterwards.
        momentum: the values are a gradient, which this replaces before all else.
    """
    values = moved(*begun(values, out, momentum))
    if add is not None:
        accumulate(values, add)
    if moments is not None:
        moments[:] = moments_of(values)
    return taken(values, np.flatnonzero(magnitude_keys(values) >= key), indices, clear)


def taken(values: Array, positions: Array, indices: Array | None, clear: bool = False) -> tuple[Array, Array]:
    taken = values[positions]
    if clear:
        values[positions] = 0
    return positions.astype(index_dtype(values.size)) if indices is None else indices[positions], taken


def lower_bound_key(values: Array, k: int, add: Addend | None = None) -> int:
    """A key that at least k of `values + scale * addend` are likely to reach. Any key is right; this one is certain."""
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


def topk(
    values: Array,
    k: int,
    *,
    indices: Array | None = None,
    add: Addend | None = None,
    out: Array | None = None,
    clear: bool = False,
    momentum: Momentum | None = None,
) -> tuple[Array, Array]:
    """The entries of the k largest magnitudes, ties by lower position; all if k >= n. As `select_at_least`."""
    values = moved(*begun(values, out, momentum))
    if add is not None:
        accumulate(values, add)
    order = np.lexsort((np.arange(values.size), np.invert(magnitude_keys(values))))
    return taken(values, np.sort(order[:k]), indices, clear)
