"""ARC-Top-K (Chen, Ma, Li, He, Dong, Yuan, "An All-Reduce Compatible Top-K Compressor for Communication-Efficient
Distributed Learning", 2025): the ranks agree by a sketch on the rows that all of them send.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsecoll.algorithms.base import Reduction
from sparsecoll.algorithms.dense import Dense
from sparsecoll.algorithms.primitives.agreed import AtAgreedIndices, sum_at
from sparsecoll.errors import NonFiniteError
from sparsecoll.kernels.keys import index_dtype, is_float
from sparsecoll.kernels.memory import asarray_like
from sparsecoll.select import Vector
from sparsecoll.select.randomk import mix
from sparsecoll.transport.channel import Channel
from sparsecoll.vector import DenseVector, SparseVector, accumulator_dtype

CUT = 1 << 32  # tells this random number from the words of the signs
LONGEST = 1 << 26  # values of a sketch; it would be longer for few entries of very long vectors


@dataclass
class ARCTopK(AtAgreedIndices):
    """The exact sum of all ranks' values in the rows of a matrix whose sums are estimated to be the largest.

    1. The vector is treated as a matrix with rows of c values (`columns`). Each rank multiplies it by the same random
       matrix of s columns (`sketch`) of -1 and 1, another one in each call.
    2. The ranks sum these sketches of n/c rows, as `dense` does. The norm of a row of the sum estimates the norm of
       the same row of the sum of all vectors.
    3. All ranks choose k entries, those of the k/c rows of largest estimated norm, and sum the values that they have
       there, as `dense` does. No indices are sent, and nothing is gathered. If c does not divide k, a part of the
       smallest of these rows is omitted, a different part in each call, so that no entry stays in the residual for
       ever.

    The rows are chosen by the sum over all ranks, unlike in `cltk`, which follows one rank, but as whole rows: the
    result approximates the top k if large entries are neighbours, as in the gradients of a layer's units. x may be
    dense or sparse.

    Volume: 2(m + s ceil(n/c))(P-1)/P words, where m <= k is the number of entries chosen. Memory: k
    entries and the sketch.

    Args:
        k: as in `sparsecoll.Algorithm`.
        selector: must be None: the selection is part of the algorithm.
        columns: number of values in a row; None, the default, for s n/k, with which the sketch is as long as what is
            chosen, but at most k.
        sketch: number s of random projections of each row (default: 4); fewer, without `columns`, if the sketch would
            otherwise be longer than k.

    Raises:
        ValueError: An option is out of range; or, on every rank, a value is NaN, which has no order, or k is so small
            that the sketch would have more than 2^26 values.
    """

    name = "arctopk"

    columns: int | None = None
    sketch: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse_selector()
        if self.sketch < 1 or (self.columns is not None and self.columns < 1):
            raise ValueError(f"columns, sketch: expected at least 1, got {self.columns} and {self.sketch}")

    def __call__(self, channel: Channel, x: Vector, k: int) -> Reduction:
        indices = self._agreed(channel, x, k) if k and x.length else asarray_like(np.empty(0, np.int64), x.values)
        with channel.phase("values"):
            reduction = sum_at(channel, x, indices.astype(index_dtype(x.length)))
        if isinstance(x, SparseVector):
            assert isinstance(reduction.value, SparseVector)
            reduction.value = reduction.value.drop_zeros()  # where no rank has an entry
        self._calls += 1
        return reduction

    def _agreed(self, channel: Channel, x: Vector, k: int) -> NDArray[np.int64]:
        """Return the indices of the k entries that all ranks send, ascending."""
        columns, sketch = self._shape(x.length, k)
        rows = -(-x.length // columns)
        if rows * sketch > LONGEST:
            raise ValueError(
                f"k: expected more than {k} of {x.length} entries with algo='arctopk', whose sketch would have"
                f" {rows * sketch} values: use columns=, or algo='exdyna'"
            )
        with channel.phase("sketch"):
            own = _sketch(x, rows, random_signs(self._calls, columns, sketch))
            total = Dense()(channel, own, 0).value
            assert isinstance(total, DenseVector)
            chosen, weakest = _largest(total.values.reshape(rows, sketch), -(-k // columns))
        inside = asarray_like(np.tile(np.arange(columns), chosen.size), chosen)
        indices = np.repeat(chosen * columns, columns) + inside
        entries: NDArray[np.int64] = indices[indices < x.length]
        left_out = entries.size - k
        if left_out <= 0:
            return entries
        start = weakest * columns  # only the last row may be shorter, so that those before it are whole
        length = min(columns, entries.size - start)
        gap = mix(self._calls, CUT) % length
        window = asarray_like((gap + np.arange(left_out)) % length, chosen) + start
        keep = asarray_like(np.ones(entries.size, np.bool_), chosen)
        keep[window] = False
        kept: NDArray[np.int64] = entries[keep]
        return kept

    def _shape(self, n: int, k: int) -> tuple[int, int]:
        """Return the length of a row and the number of its projections."""
        if self.columns is not None:
            return self.columns, self.sketch
        sketch = max(1, min(self.sketch, k * k // n)) if n else 1
        return max(1, min(k, -(-sketch * n // max(k, 1)))), sketch


def random_signs(call: int, columns: int, sketch: int) -> NDArray[np.int8]:
    """Return a matrix of `columns` rows and `sketch` columns of -1 and 1, the same on every rank; another per call."""
    words = np.array([mix(call, i) for i in range(-(-columns * sketch // 64))], np.uint64)
    bits = np.unpackbits(words.astype("<u8").view(np.uint8))[: columns * sketch]
    return (2 * bits.astype(np.int8) - 1).reshape(columns, sketch)


def _sketch(x: Vector, rows: int, signs: NDArray[np.int8]) -> DenseVector:
    """Return the products of the rows of x with the columns of `signs`, row by row."""
    columns, count = signs.shape
    dtype = accumulator_dtype(x.dtype) if is_float(x.dtype) or x.dtype.kind == "c" else np.dtype(np.float64)
    sums = DenseVector.zeros(rows * count, dtype, x)
    if isinstance(x, DenseVector):
        matrix, whole = asarray_like(signs.astype(dtype), x.values), x.length // columns
        table = sums.values.reshape(rows, count)
        table[:whole] = np.dot(x.values[: whole * columns].reshape(whole, columns).astype(dtype, copy=False), matrix)
        if whole < rows:
            rest = x.values[whole * columns :].astype(dtype, copy=False)
            table[whole] = np.dot(rest, matrix[: rest.size])
        return sums
    at, values = x.indices.astype(np.int64), x.values.astype(dtype)
    factors = asarray_like(signs, values)[at % columns]
    for j in range(count):
        sums.scatter_add((at // columns * count + j).astype(np.uint64), values * factors[:, j])
    return sums


def _largest(table: NDArray[Any], count: int) -> tuple[NDArray[np.int64], int]:
    """Return the numbers of the `count` rows of largest norm, ascending, and the position of the smallest among them.

    They are the same for the same bits on any CPU.

    Raises:
        NonFiniteError: A value is NaN.
    """
    with np.errstate(over="ignore"):
        norms = sum(np.square(np.abs(table[:, j]).astype(np.float64)) for j in range(table.shape[1]))
    if bool(np.isnan(norms).any()):
        raise NonFiniteError(
            "x: expected values that can be ordered by magnitude, got NaN, or infinities of both signs"
        )
    top = DenseVector(norms).topk(count)
    return top.indices.astype(np.int64), int(top.values.argmin())
