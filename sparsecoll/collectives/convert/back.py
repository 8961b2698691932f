"""Conversion of results back to the caller's types, as data that one rank can send to others."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sparsecoll.vector import SparseVector


@dataclass(frozen=True)
class Back:
    """Converts a result to a caller's type: derive a dataclass whose fields are JSON values, and register it."""

    def __call__(self, y: Any) -> Any:
        """Return the vector, or the RowSparse, itself, which is the result for these and for dense types."""
        return y

    def of_part(self, part: SparseVector) -> tuple[SparseVector, Back]:
        """Return some of the caller's entries and a Back that holds no more than they need."""
        return part, self

    def fields(self) -> dict[str, Any]:
        """Return the fields by name, as JSON values."""
        return asdict(self)

    @classmethod
    def of_fields(cls, fields: dict[str, Any]) -> Back:
        """Invert `fields`."""
        return cls(**fields)


@dataclass(frozen=True)
class ToTriple(Back):
    """Returns a tuple (indices, values, length)."""

    def __call__(self, y: SparseVector) -> Any:
        return y.indices, y.values, y.length
