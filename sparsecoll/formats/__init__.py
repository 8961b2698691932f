"""Wire formats. Add one: a file with a Format, a line in FORMATS; the round-trip tests run over the registry.

`encode` writes one message, `decode` reads any message, whatever format its header names.
"""

from __future__ import annotations

from sparsecoll.errors import CommunicationError
from sparsecoll.formats.auto import Auto
from sparsecoll.formats.base import HEADER, WIRE_DTYPES, Buffer, Format, rounded, wire_dtype
from sparsecoll.formats.coo import Coo
from sparsecoll.formats.dense import Dense
from sparsecoll.vector import SparseVector

FORMATS: dict[str, Format] = {"coo": Coo(), "dense": Dense(), "auto": Auto()}

_BY_ID = {form.id: form for form in FORMATS.values() if form.id}

__all__ = [
    "FORMATS",
    "HEADER",
    "WIRE_DTYPES",
    "Buffer",
    "Format",
    "decode",
    "encode",
    "rounded",
    "wire_dtype",
]


def encode(x: SparseVector, format: str = "auto", value_dtype: str | None = None) -> Buffer:
    """x as one self-describing message (uint8). Values are rounded to `value_dtype` if given."""
    return FORMATS[format].encode(x, value_dtype)


def decode(buffer: Buffer, length: int) -> SparseVector:
    """The vector in a message, for a vector of `length` coordinates.

    Raises:
        CommunicationError: truncated, corrupted, or made for another length.
    """
    form = _BY_ID.get(int(buffer[0])) if buffer.size else None
    if form is None:
        raise CommunicationError(f"message: no format has the id {int(buffer[0]) if buffer.size else None}")
    return form.decode(buffer, length)
