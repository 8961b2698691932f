"""The interface of algorithms that sum rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

from sparsecoll.transport.row_channel import RowChannel
from sparsecoll.vector import RowSparse


@dataclass
class RowAlgorithm(ABC):
    """Exact sum of rows: derive a dataclass of its options, and define `__call__`.

    Attributes:
        name: key in ROW_ALGORITHMS.
    """

    name: ClassVar[str]

    @abstractmethod
    def __call__(self, channel: RowChannel, x: RowSparse, held: Sequence[int]) -> RowSparse:
        """Return the rows of all ranks combined by the operation of the call, in x's dtype, the same on every rank.

        Args:
            channel: sends and receives rows in the value dtype of the call.
            x: this rank's rows, rounded as on the wire.
            held: number of rows of each rank.
        """

    def describe(self) -> str:
        """Return name and options as a string, by which ranks compare their algorithms."""
        options = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.init)
        return f"{self.name}({options})"
