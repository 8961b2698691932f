"""Wire formats. Add one: a file with a Format, a line in FORMATS; the round-trip tests run over the registry.

`encode` writes one message, `decode` reads any message, whatever format its header names; `add_into` adds messages to a
dense vector.
"""

from __future__ import annotations

from collections.abc import Iterable

from sparsecoll.errors import CommunicationError
from sparsecoll.formats.auto import Auto
from sparsecoll.formats.base import HEADER, WIRE_DTYPES, Buffer, Format, rounded, wire_dtype
from sparsecoll.formats.bitmap import Bitmap
from sparsecoll.formats.coo import Coo
from sparsecoll.formats.dense import Dense
from sparsecoll.formats.densestream import DenseStream
from sparsecoll.formats.packed import Packed
from sparsecoll.formats.quantized import Quantized
from sparsecoll.formats.slots import Slots
from sparsecoll.kernels.memory import data_ptr, to_host
from sparsecoll.telemetry.trace import doing
from sparsecoll.vector import DenseVector, SparseVector

FORMATS: dict[str, Format] = {
    "coo": Coo(),
    "dense": Dense(),
    "bitmap": Bitmap(),
    "packed": Packed(),
    "densestream": DenseStream(),
    "slots": Slots(),
    "quantized": Quantized(),
    "auto": Auto(),
}

_BY_ID = {form.id: form for form in FORMATS.values() if form.id}

__all__ = [
    "FORMATS",
    "HEADER",
    "WIRE_DTYPES",
    "Auto",
    "Bitmap",
    "Buffer",
    "Coo",
    "Dense",
    "DenseStream",
    "Format",
    "Packed",
    "Quantized",
    "Slots",
    "add_into",
    "decode",
    "encode",
    "entries",
    "resolve",
    "rounded",
    "wire_dtype",
]


def resolve(format: str | Format) -> Format:
    """The format of that name, or the object itself.

    Raises:
        ValueError, TypeError: no format has the name, or neither name nor Format.
    """
    if isinstance(format, Format):
        return format
    if not isinstance(format, str):
        raise TypeError(f"format: expected a name or a Format, got {type(format).__name__}")
    if format not in FORMATS:
        raise ValueError(f"format: expected one of {', '.join(FORMATS)}, got {format!r}")
    return FORMATS[format]


def encode(x: SparseVector, format: str | Format = "auto", value_dtype: str | None = None) -> Buffer:
    """x as one self-describing message (uint8). Values are rounded to `value_dtype` if given."""
    return resolve(format).encode(x, value_dtype)


def decode(buffer: Buffer, length: int) -> SparseVector:
    """The vector in a message, for a vector of `length` coordinates.

    Raises:
        CommunicationError: truncated, corrupted, or made for another length.
    """
    form = _of(buffer)
    with doing("decode", entries(buffer)):
        return form.decode(_aligned(buffer), length)


def entries(buffer: Buffer) -> int:
    """How many entries a message holds, as its header says (unchecked)."""
    return int(HEADER.unpack_from(to_host(buffer[: HEADER.size]))[-1]) if buffer.size >= HEADER.size else 0


def add_into(dense: DenseVector, buffers: Iterable[Buffer]) -> None:
    """dense += the vectors of all messages, in their order, in place (DRAGONN's sparse decoding, section 4.3).

    Cost: per entry received; no message becomes a dense vector of its own.

    Raises:
        CommunicationError: as `decode`; the messages before are added by then.
    """
    for buffer in buffers:
        form = _of(buffer)
        with doing("decode", entries(buffer)):
            form.add_into(dense, _aligned(buffer))


def _of(buffer: Buffer) -> Format:
    form = _BY_ID.get(int(buffer[0])) if buffer.size else None
    if form is None:
        raise CommunicationError(f"message: no format has the id {int(buffer[0]) if buffer.size else None}")
    return form


def _aligned(buffer: Buffer) -> Buffer:
    """The buffer, copied if it does not begin at a multiple of 8 bytes."""
    return buffer if data_ptr(buffer) % 8 == 0 else buffer.copy()
