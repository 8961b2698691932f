"""What a wire format is, and the header that makes every message describe itself.

A message is one buffer: 16 bytes of header, then the format's own bytes.

    byte 0      format id          byte 2      index bytes (4 or 8)
    byte 1      value dtype id     byte 3      version of this layout
    bytes 4-7   zero               bytes 8-15  nnz, unsigned, little-endian
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from sparsecoll.errors import CommunicationError
from sparsecoll.kernels.reference import index_dtype
from sparsecoll.vector import DenseVector, SparseVector, cut

Buffer = NDArray[np.uint8]

HEADER = struct.Struct("<BBBBIQ")
VERSION = 1


@dataclass(frozen=True)
class WireDtype:
    """How values travel: `stored` is the dtype of the bytes; bfloat16 is kept as the upper half of a float32."""

    id: int
    name: str
    stored: np.dtype[Any]

    def pack(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values as they travel. Rounds to nearest even; finite overflow is cut to the largest finite value."""
        if self.name != "bfloat16":
            return cut(values, self.stored)
        bits = cut(values, np.dtype(np.float32)).view(np.uint32)
        rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        special = (bits & 0x7F800000) == 0x7F800000
        rounded[special] = (bits[special] >> 16).astype(np.uint16) | ((bits[special] & 0xFFFF) != 0)
        grown = ((rounded & 0x7FFF) == 0x7F80) & ~special
        rounded[grown] -= 1
        return rounded

    def unpack(self, stored: NDArray[Any]) -> NDArray[Any]:
        """The values again: float32 for bfloat16, else a view."""
        if self.name != "bfloat16":
            return stored
        return (stored.astype(np.uint32) << 16).view(np.float32)


WIRE_DTYPES = {
    name: WireDtype(number, name, np.dtype("uint16" if name == "bfloat16" else name))
    for number, name in enumerate(("float16", "float32", "float64", "int32", "int64", "bfloat16"), start=1)
}
_BY_ID = {wire.id: wire for wire in WIRE_DTYPES.values()}


def wire_dtype(x_dtype: np.dtype[Any], value_dtype: str | None) -> WireDtype:
    """The wire dtype of values of `x_dtype` when `value_dtype` was asked for (None: as they are)."""
    return WIRE_DTYPES[value_dtype or x_dtype.name]


V = TypeVar("V", bound="SparseVector | DenseVector")


def rounded(x: V, value_dtype: str | None) -> V:
    """x with its values rounded as they will travel, in x's own dtype; x itself if nothing changes."""
    wire = wire_dtype(x.dtype, value_dtype)
    if wire.name == x.dtype.name:
        return x
    values = wire.unpack(wire.pack(x.values)).astype(x.dtype)
    return x.with_values(values)  # type: ignore[return-value]


class Format(ABC):
    """One wire format: encode, decode and the exact size beforehand. Stateless; `id` stands in the header."""

    id: ClassVar[int]
    name: ClassVar[str]

    @abstractmethod
    def size(self, x: SparseVector, value_dtype: str | None = None) -> int:
        """Exactly the bytes that `encode` returns."""

    @abstractmethod
    def encode(self, x: SparseVector, value_dtype: str | None = None) -> Buffer:
        """A new buffer that holds x."""

    @abstractmethod
    def decode(self, buffer: Buffer, length: int) -> SparseVector:
        """The vector again, as views into `buffer` where possible.

        Raises:
            CommunicationError: the buffer is not a whole valid message for a vector of this length.
        """

    def _start(self, x: SparseVector, value_dtype: str | None) -> tuple[Buffer, WireDtype]:
        """A buffer of the right size with its header written, and the wire dtype."""
        wire = wire_dtype(x.dtype, value_dtype)
        buffer = np.empty(self.size(x, value_dtype), np.uint8)
        HEADER.pack_into(buffer, 0, self.id, wire.id, x.indices.dtype.itemsize, VERSION, 0, x.nnz)
        return buffer, wire

    def _opened(self, buffer: Buffer, length: int) -> tuple[WireDtype, np.dtype[Any], int]:
        """(wire dtype, index dtype, nnz) from the header, checked."""
        if buffer.size < HEADER.size:
            raise CommunicationError(f"message: expected at least {HEADER.size} bytes, got {buffer.size}")
        format_id, value_id, index_bytes, version, zero, nnz = HEADER.unpack_from(buffer)
        expected = index_dtype(length)
        if format_id != self.id or version != VERSION or zero or value_id not in _BY_ID:
            raise CommunicationError(f"message: not a {self.name} message (header {bytes(buffer[:16]).hex()})")
        if index_bytes != expected.itemsize or nnz > min(length, buffer.size):
            raise CommunicationError(
                f"message: {nnz} entries with {index_bytes}-byte indices do not fit length {length}"
                f" and {buffer.size} bytes"
            )
        return _BY_ID[value_id], expected, int(nnz)
