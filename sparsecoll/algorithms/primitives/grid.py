"""Reduce-scatter and allgather of regions in two levels: O(sqrt P) messages for any P instead of P - 1.

Rank r is in row r // w and column r % w of a grid with w = ceil(sqrt P) columns; the last row may be shorter. Regions
are numbered column by column. First, the ranks of a row exchange the entries of whole columns and sum them; then the
ranks of a column exchange these sums by region. A column that the last row lacks is served by another row, in turn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparsecoll.algorithms.base import Loss, check_region
from sparsecoll.transport.channel import Channel
from sparsecoll.vector import SparseVector


@dataclass(frozen=True)
class Grid:
    """The ranks of a communicator in rows and columns.

    Args:
        size: number of ranks, at least 1.
    """

    size: int

    @property
    def width(self) -> int:
        """Number of columns."""
        return math.isqrt(self.size - 1) + 1

    @property
    def rows(self) -> int:
        """Number of rows, the last one included, which may be shorter."""
        return -(-self.size // self.width)

    @property
    def rest(self) -> int:
        """Number of ranks in the last row."""
        return self.size - (self.rows - 1) * self.width

    def column(self, number: int) -> list[int]:
        """Return the ranks of a column, in the order of their regions."""
        return list(range(number, self.size, self.width))

    def row(self, number: int) -> list[int]:
        """Return the ranks of a row."""
        return list(range(number * self.width, min((number + 1) * self.width, self.size)))

    def first_region(self, column: int) -> int:
        """Return the number of the first region of a column; P for the number after the last one."""
        return column * (self.rows - 1) + min(column, self.rest)

    def order(self) -> list[int]:
        """Return the ranks in the order of their regions."""
        return [rank for column in range(self.width) for rank in self.column(column)]

    def receiver(self, rank: int, column: int) -> int:
        """Return the rank to which `rank` sends the entries of a column: of its row, if that has the column."""
        row = rank // self.width
        same = row * self.width + column
        return same if same < self.size else (rank % self.width + column) % (self.rows - 1) * self.width + column

    def senders(self, rank: int) -> list[int]:
        """Return the ranks that send this one the entries of its column, in the order in which they do so."""
        row, column = divmod(rank, self.width)
        own = self.row(row)
        start = own.index(rank)
        last = self.row(self.rows - 1) if column >= self.rest else []
        return [
            *reversed(own[:start]),
            *reversed(own[start + 1 :]),
            *(r for r in last if self.receiver(r, column) == rank and r not in own),
        ]


def reduce_scatter(channel: Channel, x: SparseVector, edges: list[int], loss: Loss) -> tuple[SparseVector, int]:
    """Return this rank's region of the sum, in the accumulator dtype, and the number of entries that were added.

    Args:
        edges: P + 1 boundaries of the regions, in the order of `Grid.order`.
        loss: records what rounding removes from the sums of rows.
    """
    grid, rank = Grid(channel.size), channel.rank
    row, column = divmod(rank, grid.width)
    firsts = [grid.first_region(number) for number in range(grid.width + 1)]
    parts = x.split([edges[first] for first in firsts])
    for step in range(1, grid.width):
        number = (column + step) % grid.width
        channel.isend(grid.receiver(rank, number), parts[number])
    low, high = edges[firsts[column]], edges[firsts[column + 1]]
    arrived = [check_region(channel.recv(source), low, high, source) for source in grid.senders(rank)]
    load = parts[column].nnz + sum(part.nnz for part in arrived)
    total = channel.merge([parts[column], *arrived], partial=True)
    members = grid.column(column)
    regions = total.split(edges[firsts[column] : firsts[column + 1] + 1])
    for step in range(1, len(members)):
        to = (row + step) % len(members)
        channel.isend(members[to], loss.round(regions[to]))
    low, high = edges[firsts[column] + row], edges[firsts[column] + row + 1]
    sources = [members[(row - step) % len(members)] for step in range(1, len(members))]
    own = [regions[row], *(check_region(channel.recv(source), low, high, source) for source in sources)]
    return channel.merge(own, partial=True), load + sum(part.nnz for part in own[1:])


def allgather(channel: Channel, mine: SparseVector) -> SparseVector:
    """Return the entries of all ranks, each of which has those of its region: of a column first, then of all.

    The ranks of a shorter last row receive the result from the row above.
    """
    grid, rank = Grid(channel.size), channel.rank
    row, column = divmod(rank, grid.width)
    own = SparseVector.concatenate(channel.group(grid.column(column)).allgather(mine))
    short = grid.rest < grid.width
    if short and row == grid.rows - 1:
        return channel.recv(rank - grid.width)
    value = SparseVector.concatenate(channel.group(grid.row(row)).allgather(own))
    if short and row == grid.rows - 2 and column < grid.rest:
        channel.isend(rank + grid.width, value)
    return value
