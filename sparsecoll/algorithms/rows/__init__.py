"""Algorithms that sum rows. To add one, write a file with a RowAlgorithm dataclass and a line in ROW_ALGORITHMS."""

from __future__ import annotations

from typing import Any

from sparsecoll.algorithms.rows.auto import RowAuto
from sparsecoll.algorithms.rows.base import RowAlgorithm
from sparsecoll.algorithms.rows.gather import RowGather
from sparsecoll.algorithms.rows.owners import OWNERS, RowOwners
from sparsecoll.errors import check_choice

ROW_ALGORITHMS: dict[str, type[RowAlgorithm]] = {"auto": RowAuto, "allgather": RowGather, "owners": RowOwners}

__all__ = ["OWNERS", "ROW_ALGORITHMS", "RowAlgorithm", "RowAuto", "RowGather", "RowOwners", "resolve_rows"]


def resolve_rows(algo: Any) -> RowAlgorithm:
    """Return a new algorithm with default options for a name, and an object as it is.

    Raises:
        ValueError: No algorithm for rows has the name.
        TypeError: `algo` is neither a name nor a RowAlgorithm.
    """
    if isinstance(algo, RowAlgorithm):
        return algo
    if not isinstance(algo, str):
        raise TypeError(
            f"algo: expected {', '.join(map(repr, ROW_ALGORITHMS))} or a RowAlgorithm for rows, got {algo!r}"
        )
    check_choice("algo", algo, ROW_ALGORITHMS)
    return ROW_ALGORITHMS[algo]()
