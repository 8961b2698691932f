"""An array of state, or an object in its place, whose changes take effect only when a step has succeeded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sparsecoll.torch.tensors.device import Array


class Versions:
    """Three versions of an array: after the last step, after the last reduction, and of the current reduction.

    Most of the time they are the same array. With `keep`, `drop`, `commit` and a `rollback` of everything it may be any
    object that nobody changes, such as a RowSparse.

    Attributes:
        base: after the last step of the optimizer; this version is saved.
        current: after the reductions since then.
        trial: of the current reduction, or None.
    """

    def __init__(self, array: Any) -> None:
        self.base = self.current = array
        self.trial: Any = None

    def keep(self) -> list[Array]:
        """Accept the trial version; return arrays that are no longer needed."""
        if self.trial is None:
            return []
        freed = [] if self.current is self.base else [self.current]
        self.current, self.trial = self.trial, None
        return freed

    def drop(self) -> list[Array]:
        """Forget the trial version; returns arrays that are of no further use."""
        freed, self.trial = [] if self.trial is None else [self.trial], None
        return freed

    def exclude(self, parts: Iterable[slice]) -> None:
        """Restore the trial version of these parts."""
        if self.trial is not None:
            for part in parts:
                self.trial[part] = self.current[part]

    def commit(self) -> list[Array]:
        """Accept the current version after the optimizer's step; return arrays that are no longer needed."""
        freed = [] if self.current is self.base else [self.base]
        self.base = self.current
        return freed

    def rollback(self, parts: Iterable[slice] | None = None) -> list[Array]:
        """Return to the last step, everywhere or in some parts; return arrays that are no longer needed."""
        if self.current is self.base:
            return []
        if parts is not None:
            for part in parts:
                self.current[part] = self.base[part]
            return []
        freed, self.current = [self.current], self.base
        return freed
