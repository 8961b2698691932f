"""Auto: gather or owners, whichever is predicted to be faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparsecoll.algorithms.rows.base import RowAlgorithm
from sparsecoll.algorithms.rows.gather import RowGather
from sparsecoll.algorithms.rows.owners import RowOwners
from sparsecoll.transport.row_channel import RowChannel
from sparsecoll.vector import RowSparse


@dataclass
class RowAuto(RowAlgorithm):
    """Runs `RowGather` or `RowOwners`."""

    name = "auto"

    def __call__(self, channel: RowChannel, x: RowSparse, held: Sequence[int]) -> RowSparse:
        chosen = RowGather() if channel.size <= 2 else RowOwners()
        return chosen(channel, x, held)
