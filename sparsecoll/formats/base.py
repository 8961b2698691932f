"""What a wire format is, and the header that makes every message describe itself.

A message is one buffer, where the vector is (host memory or a GPU): 16 bytes of header, then the format's own bytes.

    byte 0      format id          byte 2      index bytes (4 or 8)
    byte 1      value dtype id     byte 3      version of this layout
    bytes 4-7   zero               bytes 8-15  nnz, unsigned, little-endian
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from sparsecoll.errors import CommunicationError
from sparsecoll.kernels import kernels_of
from sparsecoll.kernels.memory import asarray_like, empty, to_host
from sparsecoll.kernels.reference import index_dtype
from sparsecoll.telemetry.trace import doing
from sparsecoll.vector import DenseVector, SparseVector, saturating_cast

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
        if values.dtype == self.stored and self.name != "bfloat16":
            return values
        kernels = kernels_of(values)
        if self.name == "float16":
            return kernels.to_float16(values)  # type: ignore[no-any-return]
        if self.name == "bfloat16":
            return kernels.to_bfloat16(saturating_cast(values, np.dtype(np.float32)))  # type: ignore[no-any-return]
        return saturating_cast(values, self.stored)

    def unpack(self, stored: NDArray[Any]) -> NDArray[Any]:
        """The values again: float32 for bfloat16, else a view."""
        if self.name != "bfloat16":
            return stored
        return kernels_of(stored).from_bfloat16(stored)  # type: ignore[no-any-return]

    def unpack_as(self, stored: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
        """The values again, as `dtype`; a view where nothing changes."""
        arrived = self.unpack(stored)
        if self.name == "float16" and dtype == np.float32:
            return kernels_of(arrived).from_float16(arrived)  # type: ignore[no-any-return]
        return arrived.astype(dtype, copy=False)

    def rounded(self, values: NDArray[Any]) -> NDArray[Any]:
        """The values that arrive, in their own dtype."""
        return self.unpack_as(self.pack(values), values.dtype)


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
    return x.with_values(wire.rounded(x.values))  # type: ignore[return-value]


@dataclass(frozen=True)
class Plan:
    """A message about to be written: its exact size, and what fills a buffer of that size after the header."""

    size: int
    write: Callable[[Buffer], None]


@dataclass(frozen=True)
class Format(ABC):
    """One wire format: plan, decode. A frozen dataclass of its options; `id` stands in the header.

    Attributes:
        lossy: whether entries may be missing on arrival (`arriving` tells which come through).
    """

    id: ClassVar[int]
    name: ClassVar[str]
    lossy: ClassVar[bool] = False

    @abstractmethod
    def plan(self, x: SparseVector, wire: WireDtype) -> Plan:
        """What the message would be; writing is left to `Plan.write`."""

    @abstractmethod
    def decode(self, buffer: Buffer, length: int) -> SparseVector:
        """The vector again, as views into `buffer` where possible.

        Raises:
            CommunicationError: the buffer is not a whole valid message for a vector of this length.
        """

    def index_dtype(self, length: int) -> np.dtype[Any]:
        """dtype of the indices in a message, as its header states."""
        return index_dtype(length)

    def size(self, x: SparseVector, value_dtype: str | None = None) -> int:
        """Exactly the bytes that `encode` returns."""
        wire = wire_dtype(x.dtype, value_dtype)
        return self.fitting(x, wire).plan(x, wire).size

    def encode(self, x: SparseVector, value_dtype: str | None = None) -> Buffer:
        """A new buffer that holds x."""
        wire = wire_dtype(x.dtype, value_dtype)
        with doing("encode", x.nnz):
            return self._encoded(x, wire)

    def _encoded(self, x: SparseVector, wire: WireDtype) -> Buffer:
        form = self.fitting(x, wire)
        return form.written(form.plan(x, wire), x, wire)

    def fitting(self, x: SparseVector, wire: WireDtype) -> Format:
        """The format that x travels in: another one, if x holds explicit zeros and this one cannot carry them."""
        return self

    def written(self, plan: Plan, x: SparseVector, wire: WireDtype) -> Buffer:
        """The message of a plan."""
        buffer = empty(plan.size, np.uint8, x.values)
        header = HEADER.pack(self.id, wire.id, self.index_dtype(x.length).itemsize, VERSION, 0, x.nnz)
        buffer[: HEADER.size] = asarray_like(np.frombuffer(header, np.uint8), buffer)
        plan.write(buffer)
        return buffer

    def arriving(self, x: SparseVector, value_dtype: str | None = None) -> SparseVector:
        """What a receiver of `encode(x)` gets, in x's own dtype; x itself if nothing changes."""
        return rounded(x, value_dtype)

    def add_into(self, dense: DenseVector, buffer: Buffer) -> None:
        """dense += the vector in a message, in place."""
        dense.add_at(self.decode(buffer, dense.length))

    def _opened(self, buffer: Buffer, length: int, per_byte: int = 1) -> tuple[WireDtype, np.dtype[Any], int]:
        """(wire dtype, index dtype, nnz) from the header, checked; a byte holds at most `per_byte` entries."""
        if buffer.size < HEADER.size:
            raise CommunicationError(f"message: expected at least {HEADER.size} bytes, got {buffer.size}")
        header = to_host(buffer[: HEADER.size])
        format_id, value_id, index_bytes, version, zero, nnz = HEADER.unpack_from(header)
        expected = self.index_dtype(length)
        if format_id != self.id or version != VERSION or zero or value_id not in _BY_ID:
            raise CommunicationError(f"message: not a {self.name} message (header {header.tobytes().hex()})")
        if index_bytes != expected.itemsize or nnz > min(length, per_byte * buffer.size):
            raise CommunicationError(
                f"message: {nnz} entries with {index_bytes}-byte indices do not fit length {length}"
                f" and {buffer.size} bytes"
            )
        return _BY_ID[value_id], expected, int(nnz)

    def _check_size(self, buffer: Buffer, expected: int, nnz: int) -> None:
        if buffer.size != expected:
            raise CommunicationError(
                f"message: expected {expected} bytes for {nnz} entries in {self.name}, got {buffer.size}"
            )


def holds_zeros(x: SparseVector, wire: WireDtype) -> bool:
    """Whether an entry is zero, or becomes zero on the wire."""
    return rounded(x, wire.name).has_zeros()


def first_index(x: SparseVector) -> int:
    """The first index held; 0 if there is none."""
    return int(x.indices[0]) if x.nnz else 0
