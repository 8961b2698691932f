"""Algorithms for rows alone; those of `sparsecoll.algorithms` with `takes_rows` sum rows, too."""

from sparsecoll.algorithms.allgather import Allgather as RowGather
from sparsecoll.algorithms.rows.auto import RowAuto
from sparsecoll.algorithms.rows.owners import OWNERS, RowOwners

__all__ = ["OWNERS", "RowAuto", "RowGather", "RowOwners"]
