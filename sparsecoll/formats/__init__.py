"""Wire formats. To add one, write a file with a Format and a line in FORMATS; the round-trip tests run over FORMATS.

`encode` writes a message, `decode` reads a message of any format, and `add_into` adds messages to a dense vector.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sparsecoll.errors import CommunicationError, check_choice
from sparsecoll.formats.auto import AutoFormat as AutoFormat
from sparsecoll.formats.base import (
    HEADER as HEADER,
    WIRE_DTYPES as WIRE_DTYPES,
    Buffer as Buffer,
    Chooser,
    Encoding as Encoding,
    Format as Format,
    WireDtype as WireDtype,
    rounded as rounded,
    wire_dtype as wire_dtype,
)
from sparsecoll.formats.bitmap import BitmapFormat as BitmapFormat
from sparsecoll.formats.codes import Codes as Codes
from sparsecoll.formats.coo import CooFormat as CooFormat
from sparsecoll.formats.dense import DenseFormat as DenseFormat
from sparsecoll.formats.densestream import DenseStreamFormat as DenseStreamFormat
from sparsecoll.formats.packed import EXPONENTS, PackedCodesFormat as PackedCodesFormat, PackedFormat as PackedFormat
from sparsecoll.formats.slots import SlotsFormat as SlotsFormat
from sparsecoll.kernels import AHEAD
from sparsecoll.kernels.memory import data_ptr, to_host
from sparsecoll.telemetry.trace import listening, span
from sparsecoll.vector import DenseVector, SparseVector

FORMATS: dict[str, Format] = {
    "coo": CooFormat(),
    "dense": DenseFormat(),
    "bitmap": BitmapFormat(),
    "packed": PackedFormat(),
    "densestream": DenseStreamFormat(),
    "slots": SlotsFormat(),
    "packed_codes": PackedCodesFormat(),
    "auto": AutoFormat(),
}

_BY_ID = {form.id: form for form in (*FORMATS.values(), EXPONENTS) if form.id}


def as_format(format: str | Format) -> Format:
    """Return the format of that name, or the object itself.

    Args:
        format: a key of FORMATS, or a Format.

    Raises:
        ValueError: No format has the name.
        TypeError: `format` is neither a name nor a Format, or receivers would not know its messages.
    """
    if isinstance(format, str):
        check_choice("format", format, FORMATS)
        format = FORMATS[format]
    if not isinstance(format, Format):
        raise TypeError(f"format: expected a name or a Format, got {type(format).__name__}")
    known = _by_id(getattr(format, "id", 0))
    if not isinstance(format, Chooser if known is None else type(known)):
        raise TypeError(
            f"format: expected an object of a class in FORMATS, got {format!r}: a format of your own needs an id that"
            " no other has, and an entry in sparsecoll.formats.FORMATS on every rank"
        )
    return format


def encode(x: SparseVector, format: str | Format = "auto", value_dtype: str | None = None) -> Buffer:
    """Return x as one self-describing message.

    Args:
        x: the vector, or RowSparse, to send.
        format: name or Format.
        value_dtype: name of the dtype to which values are rounded; None for their own.

    Returns:
        uint8 array, in the memory of x (host or GPU).

    Raises:
        ValueError: x is a RowSparse, and the format is not PackedFormat.
    """
    form = as_format(format)
    if x.width and type(form) is not PackedFormat:
        raise ValueError(f"format: expected 'packed' for rows, got {format!r}")
    return form.encode(x, value_dtype)


def decode(buffer: Buffer, length: int, width: int = 0) -> SparseVector:
    """Return the vector, or the RowSparse, in a message.

    Args:
        buffer: the message, uint8, in any format; of a RowSparse, in PackedFormat.
        length: length of the vector, or number of rows of the table.
        width: number of values in a row of a RowSparse (default: 0, for a vector).

    Raises:
        CommunicationError: The message is truncated, corrupted, or for a vector of another length or width.
    """
    form = _of(buffer)
    with span("decode", entries(buffer) if listening() else 0):
        if not width:
            return form.decode(_aligned(buffer), length)
        if not isinstance(form, PackedFormat) or form.lossy:
            raise CommunicationError(f"message: expected rows of {width} values, got a message in {form.name}")
        return form.decode(_aligned(buffer), length, width)


def entries(buffer: Buffer) -> int:
    """Return the number of entries in a message according to its header, which is not validated.

    Args:
        buffer: the message, uint8.
    """
    return int(HEADER.unpack_from(to_host(buffer[: HEADER.size]))[-1]) if buffer.size >= HEADER.size else 0


def add_into(dense: DenseVector, buffers: Iterable[Buffer]) -> None:
    """Add the vectors of all messages to `dense`, in their order and in place (DRAGONN, section 4.3).

    The cost is per entry received; no message is expanded to a dense vector.

    Args:
        dense: the sum, changed in place.
        buffers: messages, uint8, in any format.

    Raises:
        CommunicationError: A message is invalid, or has values that cannot be added to those of `dense`, as complex
            numbers to real ones; the messages before it have been added.
    """
    for buffer in buffers:
        form = _of(buffer)
        with span("decode", entries(buffer)):
            form.add_into(dense, _aligned(buffer))


def _of(buffer: Buffer) -> Format:
    if (form := _by_id(int(buffer[0])) if buffer.size else None) is None:
        raise CommunicationError(f"message: no format has the id {int(buffer[0]) if buffer.size else None}")
    return form


def _by_id(number: int) -> Format | None:
    """Return the format of that id; None if FORMATS has none, even after it was extended."""
    return _BY_ID.get(number) or next((form for form in FORMATS.values() if form.id == number > 0), None)


def _aligned(buffer: Buffer) -> Buffer:
    """Return the buffer, or a copy if it is not aligned to 8 bytes."""
    if isinstance(buffer, np.ndarray) and buffer.size >= 8:  # the address takes NumPy a microsecond
        aligned = buffer[:8].view(np.uint64).flags.aligned
    else:
        aligned = data_ptr(buffer) % 8 == 0
    return buffer if aligned else buffer.copy()


def _few() -> SparseVector:
    indices = np.arange(0, 100_000, 100, dtype=np.uint32)
    return SparseVector.from_sorted_unchecked(indices, np.ones(indices.size, np.float32), 100_000)


AHEAD += [lambda: decode(encode(_few()), 100_000), lambda: SparseVector.merge([_few()] * 8, np.dtype(np.float32))]
