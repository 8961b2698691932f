"""The interface of wire formats, and the header by which every message describes itself.

A message is one buffer, in the memory of the vector (host or GPU): a header of 16 bytes, then the format's own bytes.

    byte 0      format id          byte 2      index bytes (4 or 8)
    byte 1      value dtype id     byte 3      version of this layout
    bytes 4-7   values in a row    bytes 8-15  nnz, unsigned, little-endian

An entry of one value has zero in bytes 4-7; only PackedFormat has messages of rows.
"""

from __future__ import annotations

import functools
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from sparsecoll.errors import CommunicationError
from sparsecoll.kernels import kernels_of
from sparsecoll.kernels.keys import index_dtype
from sparsecoll.kernels.memory import asarray_like, empty, to_host
from sparsecoll.telemetry.trace import span
from sparsecoll.vector import DenseVector, RowSparse, SparseVector, saturating_cast
from sparsecoll.vector.values import can_add

Buffer = NDArray[np.uint8]

HEADER = struct.Struct("<BBBBIQ")
VERSION = 1
MARGIN_BYTES = 1 << 20


@dataclass(frozen=True)
class WireDtype:
    """The dtype of values on the wire.

    Attributes:
        id: number in the header of a message.
        name: one of `vector.VALUE_DTYPES`.
        stored: NumPy dtype of the stored bytes; uint16, the upper half of a float32, for bfloat16, and uint8 for bool.
    """

    id: int
    name: str
    stored: np.dtype[Any]

    def pack(self, values: NDArray[Any]) -> NDArray[Any]:
        """Convert values for the wire: round to nearest even; finite values saturate at the largest finite value."""
        if values.dtype == self.stored and self.name not in STORED_AS:
            return values
        if values.dtype.name == self.name:  # bool, bfloat16
            return values.view(self.stored)
        kernels = kernels_of(values)
        if self.name == "float16":
            return kernels.to_float16(values)  # type: ignore[no-any-return]
        if self.name == "bfloat16":
            wide = saturating_cast(values, np.dtype(np.float32))
            if values.dtype == np.float16:  # which holds no more: a larger value would come back as infinity
                wide = np.where(np.isinf(wide), wide, np.clip(wide, -HALF_LIMIT, HALF_LIMIT))
            return kernels.to_bfloat16(wide)  # type: ignore[no-any-return]
        return saturating_cast(values, self.stored)

    def unpack(self, stored: NDArray[Any]) -> NDArray[Any]:
        """Convert stored values back: to float32 for bfloat16, to bool, otherwise a view."""
        if self.name == "bool":
            return stored != 0  # type: ignore[no-any-return]
        return kernels_of(stored).from_bfloat16(stored) if self.name == "bfloat16" else stored

    def unpack_as(self, stored: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Convert stored values back to `dtype`; a view if nothing changes."""
        arrived = self.unpack(stored)
        if self.name == "float16" and dtype == np.float32:
            return kernels_of(arrived).from_float16(arrived)  # type: ignore[no-any-return]
        return arrived.astype(dtype, copy=False)

    def rounded(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the values as a receiver gets them, in their own dtype."""
        return self.unpack_as(self.pack(values.reshape(-1)), values.dtype).reshape(values.shape)


HALF_LIMIT = np.float32(65280)  # the largest bfloat16 that is a float16, too
STORED_AS = {"bfloat16": "uint16", "bool": "uint8"}
_NAMES = (  # their ids in messages: 1, 2, ...
    *("float16", "float32", "float64", "int32", "int64", "bfloat16", "bool", "int8", "int16"),
    *("uint8", "uint16", "uint32", "uint64", "complex64", "complex128"),
)
WIRE_DTYPES = {
    name: WireDtype(number, name, np.dtype(STORED_AS.get(name, name))) for number, name in enumerate(_NAMES, start=1)
}
_BY_ID = {wire.id: wire for wire in WIRE_DTYPES.values()}


@functools.cache
def wire_dtype(x_dtype: np.dtype[Any], value_dtype: str | None) -> WireDtype:
    """Return the dtype on the wire.

    Args:
        x_dtype: dtype of the values.
        value_dtype: name of the dtype that the caller asked for; None for the values' own.
    """
    return WIRE_DTYPES[value_dtype or x_dtype.name]


V = TypeVar("V", bound="SparseVector | RowSparse | DenseVector")


def rounded(x: V, value_dtype: str | None) -> V:
    """Return x with its values rounded as on the wire, in x's own dtype; x itself if nothing changes.

    Args:
        x: a SparseVector, RowSparse or DenseVector.
        value_dtype: name of the dtype on the wire; None for x's own.
    """
    if value_dtype is None or value_dtype == x.dtype.name:
        return x
    return x.with_values(wire_dtype(x.dtype, value_dtype).rounded(x.values))  # type: ignore[return-value]


@dataclass(frozen=True)
class Encoding:
    """How to encode a message.

    Attributes:
        size: exact size in bytes, header included.
        write: function that fills a buffer of this size, except for the header.
    """

    size: int
    write: Callable[[Buffer], None]


@dataclass(frozen=True)
class Format(ABC):
    """A wire format: derive a frozen dataclass of its options, and define `plan` and `decode`.

    Attributes:
        id: number in the header of a message; 1 to 255.
        name: key in FORMATS.
        lossy: whether entries may be missing on arrival, or their values may differ from those of the dtype on the
            wire (default: False). Algorithms that encode partial sums refuse lossy formats.
    """

    id: ClassVar[int]
    name: ClassVar[str]
    lossy: ClassVar[bool] = False

    @abstractmethod
    def plan(self, x: SparseVector, wire: WireDtype) -> Encoding:
        """Return the plan of a message: its exact size, and how to write it.

        Args:
            x: the vector to send.
            wire: dtype of its values on the wire.
        """

    def least_size(self, x: SparseVector, wire: WireDtype) -> int:
        """Return a number of bytes that a message of x takes at least, without a plan: those of the values."""
        return HEADER.size + x.nnz * wire.stored.itemsize

    def most_bytes(self, length: int, entry: int) -> int:
        """Return how long a message of a vector can be: receivers refuse a longer one before they take memory for it.

        Args:
            length: length of the vector.
            entry: bytes of an index and a value.
        """
        return MARGIN_BYTES + 4 * length * entry

    @abstractmethod
    def decode(self, buffer: Buffer, length: int) -> SparseVector:
        """Return the vector in a message, as views into `buffer` where possible.

        Args:
            buffer: the message, uint8.
            length: length of the vector.

        Raises:
            CommunicationError: The buffer is not a complete, valid message for a vector of this length.
        """

    def index_dtype(self, length: int) -> np.dtype[Any]:
        """Return the dtype of the indices in a message for a vector of this length."""
        return index_dtype(length)

    def size(self, x: SparseVector, value_dtype: str | None = None) -> int:
        """Return the exact number of bytes that `encode` returns."""
        return self.planned(x, wire_dtype(x.dtype, value_dtype))[1].size

    def encode(self, x: SparseVector, value_dtype: str | None = None, room: int = 0) -> Buffer:
        """Return x as a new message, uint8.

        Args:
            x: the vector to send.
            value_dtype: name of the dtype on the wire; None for x's own.
            room: bytes that are left for the caller to write at the end (default: 0); `decode` takes the message
                without them.
        """
        wire = wire_dtype(x.dtype, value_dtype)
        with span("encode", x.nnz):
            form, plan = self.planned(x, wire)
            return form._written(plan, x, wire, room)

    def planned(self, x: SparseVector, wire: WireDtype) -> tuple[Format, Encoding]:
        """Return the format that encodes x, this one or another, and the plan of its message."""
        form = self.fitting(x, wire)
        return form, form.plan(x, wire)

    def fitting(self, x: SparseVector, wire: WireDtype) -> Format:
        """Return this format, or another one if x has explicit zeros and this format cannot represent them."""
        return self

    def _written(self, plan: Encoding, x: SparseVector, wire: WireDtype, room: int) -> Buffer:
        buffer = empty(plan.size + room, np.uint8, x.values)
        header = (self.id, wire.id, self.index_dtype(x.length).itemsize, VERSION, x.width, x.nnz)
        if isinstance(buffer, np.ndarray):
            HEADER.pack_into(buffer, 0, *header)
        else:
            buffer[: HEADER.size] = asarray_like(np.frombuffer(HEADER.pack(*header), np.uint8), buffer)
        plan.write(buffer[: plan.size])
        return buffer

    def roundtrip(self, x: SparseVector, value_dtype: str | None = None) -> SparseVector:
        """Return what a receiver of `encode(x)` gets, in x's own dtype; x itself if nothing changes.

        The result counts as contributed, and is then encoded, which must not change it again. By default, a lossy
        format encodes and decodes x, and others round the values as on the wire.
        """
        if not self.lossy:
            return rounded(x, value_dtype)
        form, plan = self.planned(x, wire := wire_dtype(x.dtype, value_dtype))
        return form.decode(form._written(plan, x, wire, 0), x.length).astype(x.dtype)

    def sparse(self) -> Format:
        """Return the format for messages that are sparse in any case: `auto` then chooses coo, bitmap or packed."""
        return self

    def sparse_or(self, dense: Format) -> Format:
        """Return a format that encodes as `sparse()` does, or in the format `dense` if that takes fewer bytes."""
        return Smaller(self.sparse(), dense)

    def add_into(self, dense: DenseVector, buffer: Buffer) -> None:
        """Add the vector in a message to `dense`, in place.

        Raises:
            CommunicationError: The message is invalid, or its values cannot be added to those of `dense`, as complex
                numbers to real ones.
        """
        y = self.decode(buffer, dense.length)
        self._check_addition(y.dtype, dense)
        dense.add_at(y)

    def _check_addition(self, dtype: np.dtype[Any], dense: DenseVector) -> None:
        """Raise CommunicationError unless values of `dtype`, in a message, can be added to those of `dense`."""
        if not can_add(dtype, dense.dtype):
            raise CommunicationError(f"message: expected values that can be added to {dense.dtype}, got {dtype}")

    def read_header(
        self, buffer: Buffer, length: int, per_byte: int = 1, width: int = 0
    ) -> tuple[WireDtype, np.dtype[Any], int]:
        """Return (wire dtype, index dtype, nnz) from the header of a message; for `decode`.

        Args:
            buffer: the message.
            length: length of the vector.
            per_byte: the largest number of entries in a byte of a message (default: 1), so that a damaged number of
                entries is noticed before memory is allocated for them.
            width: number of values in a row (default: 0, an entry has one value).

        Raises:
            CommunicationError: The header is incomplete, of another format, or does not fit the length and the size of
                the message.
        """
        if buffer.size < HEADER.size:
            raise CommunicationError(f"message: expected at least {HEADER.size} bytes, got {buffer.size}")
        header = to_host(buffer[: HEADER.size])
        format_id, value_id, index_bytes, version, values, nnz = HEADER.unpack_from(header)
        expected = self.index_dtype(length)
        if format_id != self.id or version != VERSION or values != width or value_id not in _BY_ID:
            raise CommunicationError(f"message: not a {self.name} message (header {header.tobytes().hex()})")
        if index_bytes != expected.itemsize or nnz > min(length, per_byte * buffer.size):
            found = f"{nnz} entries with {index_bytes}-byte indices"
            raise CommunicationError(f"message: {found} do not fit length {length} and {buffer.size} bytes")
        return _BY_ID[value_id], expected, int(nnz)

    def check_size(self, buffer: Buffer, expected: int, nnz: int) -> None:
        """Raise CommunicationError unless a message of `nnz` entries has the expected size in bytes; for `decode`."""
        if (size := buffer.size) != expected:
            raise CommunicationError(f"message: expected {expected} bytes for {nnz} entries in {self.name}, got {size}")


class Chooser(Format):
    """A format that encodes each message in one of several others, whose header the message has."""

    id = 0

    @abstractmethod
    def planned(self, x: SparseVector, wire: WireDtype) -> tuple[Format, Encoding]: ...

    def plan(self, x: SparseVector, wire: WireDtype) -> Encoding:
        return self.planned(x, wire)[1]

    def decode(self, buffer: Buffer, length: int) -> SparseVector:
        raise TypeError(f"{self.name} has no messages of its own: use sparsecoll.formats.decode")


@dataclass(frozen=True)
class Smaller(Chooser):
    """Chooses the format that takes fewer bytes, the first one if both take as many."""

    name = "smaller"

    first: Format
    second: Format

    def planned(self, x: SparseVector, wire: WireDtype) -> tuple[Format, Encoding]:
        return min(self.first.planned(x, wire), self.second.planned(x, wire), key=lambda planned: planned[1].size)


def index_and_value_bytes(start: int, count: int, index: np.dtype[Any], wire: WireDtype) -> tuple[slice, slice]:
    """Return the bytes from `start` on of `count` indices and of as many values; the wider ones come first, aligned."""
    widths = (index.itemsize, wire.stored.itemsize)
    middle = start + count * max(widths)
    parts = (slice(start, middle), slice(middle, start + count * sum(widths)))
    return parts if widths[0] >= widths[1] else (parts[1], parts[0])


def holds_zeros(x: SparseVector, wire: WireDtype) -> bool:
    """Return whether an entry is zero or is rounded to zero on the wire."""
    return rounded(x, wire.name).has_zeros()


def nonzeros_of(values: NDArray[Any], nnz: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return positions and values of what is not zero; raise CommunicationError unless that is nnz values."""
    positions, nonzeros = kernels_of(values).select_at_least(values, 1, nnz)
    if positions.size != nnz:
        raise CommunicationError(f"message: expected {nnz} dense values other than zero, got {positions.size}")
    return positions, nonzeros


def first_index(x: SparseVector) -> int:
    """Return the first index; 0 if there is no entry."""
    return int(x.indices[0]) if x.nnz else 0
