"""Messages that describe their content: a vector, rows or an array, its shape and dtype, and the type it had.

Where ranks send vectors of different lengths or types, or a receiver has none of its own, the message of the vector's
format is followed by a description (JSON) and by the description's size in 8 bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from sparsecoll.collectives import convert
from sparsecoll.collectives.convert.back import Back
from sparsecoll.collectives.options import PACKED, CallOptions
from sparsecoll.errors import CommunicationError
from sparsecoll.formats import Buffer, decode
from sparsecoll.kernels.memory import asarray_like, to_host
from sparsecoll.transport import Transport
from sparsecoll.vector import RowSparse, SparseVector, dtype_of

SIZE_BYTES = 8


def rows_of(options: CallOptions, x: Any) -> tuple[RowSparse, Back] | None:
    """Return x as rows for calls that only move data: types of rows, a dense array as one row; None for other types.

    Types of other libraries that consist of rows are vectors in calls that ask for a format of vectors.
    """
    block = convert.to_block(x)
    return convert.to_rows(x) if block is None and (options.format == "auto" or isinstance(x, RowSparse)) else block


def packed(options: CallOptions, x: Any) -> Buffer:
    """Return the caller's x as one message."""
    return pack(options, *options.to_entries(x, sums=False, converted=rows_of(options, x)))


def pack(options: CallOptions, entries: SparseVector, back: Back) -> Buffer:
    """Return a vector, or rows, as one message."""
    fields = [entries.shape if entries.width else entries.length, entries.dtype.name, convert.to_text(back)]
    text = json.dumps(fields, ensure_ascii=False).encode("utf-8", "surrogatepass")
    end = np.frombuffer(text + len(text).to_bytes(SIZE_BYTES, "little"), np.uint8)
    form = PACKED if entries.width else options.wire_format
    message = form.encode(entries, options.wire_dtype, room=end.size)
    message[message.size - end.size :] = asarray_like(end, message)
    return message


def unpack(message: Buffer) -> Any:
    """Return the vector, or the rows, in a message, of the type that the sender gave.

    Raises:
        CommunicationError: The message is not a complete, valid one.
    """
    size = int.from_bytes(to_host(message[-SIZE_BYTES:]).tobytes(), "little")
    start = message.size - SIZE_BYTES - size
    try:
        shape, dtype, kind = json.loads(to_host(message[max(start, 0) : message.size - SIZE_BYTES]).tobytes())
        back = convert.from_text(kind)
        length, width = map(int, shape if isinstance(shape, list) else (shape, 0))
    except (ValueError, TypeError, KeyError) as error:
        raise CommunicationError(f"message: {message.size} bytes do not end with a description of a vector") from error
    return back(decode(message[:start], length, width).astype(dtype_of(dtype)))


def pack_all(options: CallOptions, xs: Sequence[Any], ranks: Sequence[int]) -> list[Buffer]:
    """Return a message for each of several vectors of the caller.

    Raises:
        ValueError, TypeError: x or an option is invalid; the text names the vector.
    """
    if len(xs) != len(ranks):
        raise ValueError(f"x: expected a list of {len(ranks)} vectors, one for each rank, got {len(xs)}")
    messages = []
    for rank, x in zip(ranks, xs, strict=True):
        try:
            messages.append(packed(options, x))
        except (ValueError, TypeError) as error:
            raise type(error)(str(error).replace("x:", f"x[{rank}]:", 1)) from error
    return messages


def exchange_messages(transport: Transport, messages: dict[int, Buffer], sources: Iterable[int]) -> dict[int, Buffer]:
    """Send messages[j] to each rank j, in the order rank + 1, rank + 2, ..., and return those of the sources, by rank.

    A message of a rank to itself is returned as it is.
    """
    rank, size = transport.rank, transport.size
    with transport.phase("exchange"):
        for to in sorted(messages.keys() - {rank}, key=lambda to: (to - rank) % size):
            transport.isend(to, messages[to])
        requests = {source: transport.irecv(source) for source in sources if source != rank}
        arrived = {s: requests[s].wait() if s in requests else messages[s] for s in sources}
        transport.waitall()
    return arrived
