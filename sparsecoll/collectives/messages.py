"""Messages that say what is in them: a vector, rows or an array, its shape and dtype, and the type it had.

Where ranks send vectors of different lengths or types, or a receiver has none of its own, the message of the vector's
format is followed by a description (JSON) and by the description's size in 8 bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from sparsecoll.collectives import convert
from sparsecoll.collectives.convert.back import Back
from sparsecoll.collectives.options import CallOptions
from sparsecoll.errors import CommunicationError
from sparsecoll.formats import Buffer, decode
from sparsecoll.formats.rows import decode_rows, encode_rows
from sparsecoll.kernels.memory import asarray_like, to_host
from sparsecoll.vector import RowSparse, SparseVector, dtype_of

SIZE_BYTES = 8


def rows_of(options: CallOptions, x: Any) -> tuple[RowSparse, Back] | None:
    """Return what calls that only move data send as rows: types of rows, and a dense array as one row; None for others.

    Types of other libraries that consist of rows are vectors in calls that ask for a format of vectors.
    """
    block = convert.to_block(x)
    return convert.to_rows(x) if block is None and (options.format == "auto" or isinstance(x, RowSparse)) else block


def packed(options: CallOptions, x: Any) -> Buffer:
    """Return what the caller sends as one message."""
    rows = rows_of(options, x)
    if rows is None:
        return pack(options, *options.to_entries(x, sums=False))
    options.check_rows(rows[0])
    return pack_rows(options, *rows)


def pack(options: CallOptions, entries: SparseVector, back: Back) -> Buffer:
    """Return a vector as one message.

    Args:
        options: the format and the value dtype.
        entries: the vector.
        back: converts it to the caller's type.
    """
    end = _description([entries.length, entries.dtype.name, convert.to_text(back)])
    message = options.wire_format.encode(entries, options.wire_dtype, room=end.size)
    message[message.size - end.size :] = asarray_like(end, message)
    return message


def pack_rows(options: CallOptions, x: RowSparse, back: Back) -> Buffer:
    """Return rows as one message; arguments as of `pack`."""
    end = _description([x.shape, x.dtype.name, convert.to_text(back)])
    message = encode_rows(x, options.wire_dtype, room=end.size)
    message[message.size - end.size :] = asarray_like(end, message)
    return message


def _description(fields: list[Any]) -> Buffer:
    text = json.dumps(fields, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return np.frombuffer(text + len(text).to_bytes(SIZE_BYTES, "little"), np.uint8)


def unpack(message: Buffer) -> Any:
    """Return the vector, or the rows, in a message, of the type that the sender gave.

    Raises:
        CommunicationError: The message is not a complete, valid one.
    """
    size = int.from_bytes(to_host(message[-SIZE_BYTES:]).tobytes(), "little")
    start = message.size - SIZE_BYTES - size
    try:
        text = to_host(message[max(start, 0) : message.size - SIZE_BYTES]).tobytes()
        shape, dtype, kind = json.loads(text)
        back = convert.from_text(kind)
        length = shape if isinstance(shape, int) else None
        n, d = (0, 0) if length is not None else shape
    except (ValueError, TypeError, KeyError) as error:
        raise CommunicationError(f"message: {message.size} bytes do not end with a description of a vector") from error
    if length is None:
        return back(decode_rows(message[:start], n, d).astype(dtype_of(dtype)))
    return back(decode(message[:start], length).astype(dtype_of(dtype)))


def pack_all(options: CallOptions, xs: Sequence[Any], ranks: Sequence[int]) -> list[Buffer]:
    """Return a message for each of several vectors of the caller.

    Args:
        options: the format and the value dtype.
        xs: the vectors.
        ranks: the rank to which each one goes, for error messages.

    Raises:
        ValueError, TypeError: x or an option is invalid; the text names the vector.
    """
    messages = []
    for rank, x in zip(ranks, xs, strict=True):
        try:
            messages.append(packed(options, x))
        except (ValueError, TypeError) as error:
            raise type(error)(str(error).replace("x:", f"x[{rank}]:", 1)) from error
    return messages
