"""The contract of wire formats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from sparsecoll.errors import CommunicationError
from sparsecoll.formats import Buffer, Format, decode, rounded
from sparsecoll.formats.base import Chooser
from sparsecoll.testing.cases import case_of, check_class, expect
from sparsecoll.vector import VALUE_DTYPES, DenseVector, SparseVector

EXTREMES = np.array([0, 1, 127, 128, 255], np.uint8)
WIDE = 10**6  # formats whose size is that of the span are not tried beyond
SHAPES = ((0, 1, 0), (0, 1, 1), (5, 64, 64), (0, 1000, 40), (2**33, 9000, 300), (0, 20_000, 3000))  # start, span, nnz


def check_format(form: Format) -> None:
    """Check the contract of wire formats; takes about a second.

    A message has the size that `plan` gives, and `decode` returns its entries: those of the vector, or, if the format
    is lossy, those of `roundtrip`, which a second round trip does not change. All dtypes but bfloat16 are tried,
    vectors that are empty, dense or longer than 2^32, values rounded to float16 and bfloat16, and damaged messages,
    which must raise CommunicationError or give a valid vector. `plan` may refuse dtypes by TypeError or ValueError.

    Args:
        form: an object of the class; it need not be in FORMATS.

    Raises:
        AssertionError: The contract is broken; the text names the case.
        TypeError: The class has no name, or its options are not the fields of a dataclass.
    """
    expect(isinstance(form, Format), f"format: expected a Format object, got {form!r}")
    check_class("format", form)
    expect(isinstance(form, Chooser) or 0 < form.id < 256, f"format: expected an id from 1 to 255, got {form.id}")
    taken, rng = 0, np.random.default_rng(0)
    for x, wire in _vectors(rng):
        with case_of(f"{x.nnz} entries of {x.dtype} in {x.length}, value_dtype={wire}"):
            try:
                message = form.encode(x, wire)
            except (TypeError, ValueError):
                continue
            taken += 1
            check_message(form, x, wire)
            for _ in range(20):
                _damaged(form, damaged(rng, message, message[::-1]), x.length)
    expect(taken, f"{form!r} refuses vectors of every dtype")


def _vectors(rng: np.random.Generator) -> Iterator[tuple[SparseVector, str | None]]:
    for dtype in VALUE_DTYPES[:-1]:  # without bfloat16
        for start, span, nnz in SHAPES:
            values = rng.integers(1, 2**10, nnz) * rng.choice([-1, 1], nnz) / (8 if np.dtype(dtype).kind in "fc" else 1)
            indices = start + np.sort(rng.choice(span, nnz, replace=False))
            x = SparseVector(indices, values.astype(dtype), start + span + int(rng.integers(9)))
            yield x, None
            if x.dtype.kind == "f":
                yield from ((x, wire) for wire in ("float16", "bfloat16"))


def _decoded(form: Format, message: Buffer, length: int) -> SparseVector:
    own = not isinstance(form, Chooser) and message.size and message[0] == form.id
    return form.decode(message, length) if own else decode(message, length)


def check_message(form: Format, x: SparseVector, wire: str | None = None) -> None:
    """Raise AssertionError unless the message of x, with values as `wire`, has the size and the entries it should."""
    message = form.encode(x, wire)
    expect(message.dtype == np.uint8 and message.size == form.size(x, wire), "expected as many bytes as planned")
    y, expected = _decoded(form, message, x.length), form.roundtrip(x, wire)
    kinds = (y.length, y.indices.dtype, expected.dtype)
    expect(kinds == (x.length, x.indices.dtype, x.dtype), f"expected length and dtypes of x, got {kinds}")
    if not form.lossy:
        np.testing.assert_array_equal(expected.indices, x.indices)
        np.testing.assert_array_equal(expected.values, rounded(x, wire).values)
    again = form.roundtrip(expected, wire)
    for got in (y, again):
        np.testing.assert_array_equal(got.indices, expected.indices)
        np.testing.assert_array_equal(got.values.astype(x.dtype), expected.values)
    if x.length < WIDE and x.dtype.kind != "c":
        dense = DenseVector(np.ones(x.length))
        if message[0] == form.id:
            form.add_into(dense, message)
        else:  # as another format, which it has chosen
            dense.add_at(y)
        np.testing.assert_array_equal(dense.values, 1 + expected.to_dense().astype(float))


def damaged(rng: np.random.Generator, message: Buffer, other: Buffer) -> Buffer:
    """Return a copy of a message with something wrong: cut, grown, spliced with another one, or with other bytes."""
    kind, buffer = rng.integers(0, 8), message.copy()
    if kind == 0 or not buffer.size:
        return rng.integers(0, 256, rng.integers(0, 80), np.uint8)
    if kind == 1:
        return buffer[: rng.integers(0, buffer.size)]
    if kind == 2:
        return np.concatenate([buffer, rng.integers(0, 256, rng.integers(1, 20), np.uint8)])
    if kind == 3:  # the head of one on the body of another
        return np.concatenate([buffer[:16], other[16:]])
    if kind == 4:  # a field of the header
        buffer[rng.integers(0, min(buffer.size, 32))] = rng.choice(EXTREMES)
    elif kind == 5:  # eight bytes to an extreme
        offset = rng.integers(0, buffer.size)
        buffer[offset : offset + 8] = rng.choice(EXTREMES)
    else:
        offsets = rng.integers(0, buffer.size, 1 if kind == 6 else 5)
        buffer[offsets] ^= np.uint8(1) << rng.integers(0, 8, offsets.size).astype(np.uint8)
    return buffer


def _damaged(form: Format, buffer: Buffer, length: int) -> None:
    try:
        with np.errstate(all="ignore"):  # values are as damaged as the rest
            y = _decoded(form, buffer, length)
    except CommunicationError:
        return
    check_vector(y, length)


def check_vector(x: Any, length: int) -> None:
    """Raise AssertionError unless x is a valid vector of that length."""
    expect(isinstance(x, SparseVector) and x.length == length, f"expected a SparseVector of length {length}, got {x!r}")
    expect(x.indices.shape == x.values.shape, "expected as many values as indices")
    if x.nnz:
        expect((x.indices[1:] > x.indices[:-1]).all() and int(x.indices[-1]) < length, "indices out of order or range")
