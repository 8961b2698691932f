"""Messages of rows: one coded index for each row, and the values of all rows as one block.

    16 bytes    header as of other formats; bytes 4-7 have d
    values      r * d values, padded to a multiple of 8 bytes
    rows        a message of `PackedIndices`: the gaps between the rows, Rice-coded

Size in bytes: 50 + r * d * value bytes (padded) + 2 for each block of rows + the coded gaps.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsecoll.errors import CommunicationError
from sparsecoll.formats.base import _BY_ID, HEADER, VERSION, Buffer, WireDtype, wire_dtype
from sparsecoll.formats.packed import PackedIndices
from sparsecoll.kernels.keys import index_dtype
from sparsecoll.kernels.memory import asarray_like, empty, to_host
from sparsecoll.telemetry.trace import span
from sparsecoll.vector import RowSparse, SparseVector
from sparsecoll.vector.row_arrays import cast, taken

ID = 11  # in the header; no format of SparseVector has it
INDICES = PackedIndices()


def encode_rows(x: RowSparse, value_dtype: str | None = None, positions: Any = None, room: int = 0) -> Buffer:
    """Return rows as one self-describing message, uint8.

    Args:
        x: the rows.
        value_dtype: name of the dtype on the wire; None, the default, for x's own.
        positions: of the rows that are sent, ascending; None, the default, for all.
        room: bytes that are left for the caller to write at the end (default: 0).
    """
    wire = wire_dtype(x.dtype, value_dtype)
    positions = None if positions is None else asarray_like(positions, x.values)
    numbers = x.rows if positions is None else x.rows[positions]
    with span("encode", int(numbers.size)):
        coded = encode_numbers(numbers, x.n, x.values)
        block = int(numbers.size) * x.d * wire.stored.itemsize
        start = HEADER.size + _padded(block)
        buffer = empty(start + coded.size + room, np.uint8, x.values)
        header = HEADER.pack(ID, wire.id, index_dtype(x.n).itemsize, VERSION, x.d, int(numbers.size))
        buffer[: HEADER.size] = asarray_like(np.frombuffer(header, np.uint8), buffer)
        stored = buffer[HEADER.size : HEADER.size + block].view(wire.stored)
        _write_values(x, wire, positions, stored)
        buffer[HEADER.size + block : start] = 0
        buffer[start : start + coded.size] = coded
    return buffer


def _write_values(x: RowSparse, wire: WireDtype, positions: Any, stored: Any) -> None:
    if positions is None:
        stored[:] = wire.pack(x.values.reshape(-1))
    elif wire.name == x.dtype.name:
        taken(x.values.view(wire.stored), positions, stored.reshape(-1, x.d))
    else:
        stored[:] = wire.pack(taken(x.values, positions).reshape(-1))


def decode_rows(buffer: Buffer, n: int, d: int) -> RowSparse:
    """Return the rows in a message of a table of shape (n, d), as views into `buffer` where possible.

    Values that are bfloat16 on the wire become float32, others have the dtype of the message.

    Raises:
        CommunicationError: The buffer is not a complete, valid message for such a table.
    """
    if buffer.size < HEADER.size:
        raise CommunicationError(f"message: expected at least {HEADER.size} bytes, got {buffer.size}")
    header = to_host(buffer[: HEADER.size])
    kind, value_id, index_bytes, version, width, count = HEADER.unpack_from(header)
    if kind != ID or version != VERSION or value_id not in _BY_ID or index_bytes != index_dtype(n).itemsize:
        raise CommunicationError(f"message: not a message of rows (header {header.tobytes().hex()})")
    if width != d or count > n:
        raise CommunicationError(f"message: {count} rows of {width} values do not fit a table of shape ({n}, {d})")
    wire = _BY_ID[value_id]
    block = count * d * wire.stored.itemsize
    start = HEADER.size + _padded(block)
    if buffer.size < start:
        raise CommunicationError(f"message: {buffer.size} bytes are too few for {count} rows of {d} values")
    with span("decode", count):
        numbers = decode_numbers(buffer[start:], n)
        if numbers.size != count:
            raise CommunicationError(f"message: {numbers.size} indices where the header says {count} rows")
        stored = buffer[HEADER.size : HEADER.size + block].view(wire.stored)
        return RowSparse.from_sorted_unchecked(numbers, wire.unpack(stored).reshape(count, d), n)


def rounded_rows(x: RowSparse, value_dtype: str | None) -> RowSparse:
    """Return x with its values rounded as on the wire, in x's own dtype; x itself if nothing changes."""
    wire = wire_dtype(x.dtype, value_dtype)
    if wire.name == x.dtype.name:
        return x
    narrow = wire.unpack(wire.pack(x.values.reshape(-1))).reshape(x.values.shape)
    return x.with_values(cast(narrow, x.dtype))


def encode_numbers(numbers: Any, n: int, like: Any) -> Buffer:
    """Return ascending, unique row numbers below n as one message, in the memory that the array `like` is in."""
    marks = empty(int(numbers.size), np.uint8, like).view(np.bool_)  # not sent: their memory says where to encode
    return INDICES.encode(SparseVector.from_sorted_unchecked(numbers.astype(index_dtype(n)), marks, n))


def decode_numbers(message: Buffer, n: int) -> Any:
    """Invert `encode_numbers`, as int64; raise CommunicationError for anything else."""
    return INDICES.decode(message, n).indices.astype(np.int64)


def pack_values(values: Any, value_dtype: str | None) -> Buffer:
    """Return 1-D values as a message of nothing else."""
    return wire_dtype(values.dtype, value_dtype).pack(values).view(np.uint8)


def unpack_values(message: Buffer, count: int, dtype: np.dtype[Any], value_dtype: str | None) -> Any:
    """Invert `pack_values` for `count` values of `dtype`; bfloat16 becomes float32, others have the wire's dtype.

    Raises:
        CommunicationError: The message has another size.
    """
    wire = wire_dtype(dtype, value_dtype)
    if message.size != count * wire.stored.itemsize:
        raise CommunicationError(f"message: expected {count} values of {wire.name}, got {message.size} bytes")
    return wire.unpack(message.view(wire.stored))


def _padded(size: int) -> int:
    return -(-size // 8) * 8
