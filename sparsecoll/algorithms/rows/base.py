"""The interface of algorithms that sum rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

from sparsecoll.transport.row_channel import RowChannel
from sparsecoll.vector import RowSparse


@dataclass
class RowSum:
    """What an algorithm for rows returns.

    Attributes:
        value: the rows of all ranks combined, in the dtype of the call, the same on every rank.
        lost: returns what rounding on the wire took from the sums that this rank formed, in the accumulator dtype;
            None for nothing.
    """

    value: RowSparse
    lost: Callable[[], RowSparse] | None = None

    def contributed(self, sent: RowSparse) -> RowSparse:
        """Return this rank's share of `value`, if it has sent these rows."""
        lost = None if self.lost is None else self.lost()
        if lost is None or not lost.nnz:
            return sent
        return RowSparse.merge([sent.astype(lost.dtype), -lost], lost.dtype)


@dataclass
class RowAlgorithm(ABC):
    """Exact sum of rows: derive a dataclass of its options, and define `__call__`.

    Attributes:
        name: key in ROW_ALGORITHMS.
    """

    name: ClassVar[str]

    @abstractmethod
    def __call__(self, channel: RowChannel, x: RowSparse, held: Sequence[int]) -> RowSum:
        """Combine the rows of all ranks by the operation of the call.

        Args:
            channel: sends and receives rows in the value dtype of the call.
            x: this rank's rows, rounded as on the wire.
            held: number of rows of each rank.
        """

    def describe(self) -> str:
        """Return name and options as a string, by which ranks compare their algorithms."""
        options = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.init)
        return f"{self.name}({options})"
