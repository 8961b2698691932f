"""An array of state whose changes take effect only when a step is known to be good."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sparsecoll.torch.device import Array


class Versions:
    """One array as of the last step, as of the last reduction, and as of the reduction under way.

    Most of the time they are one and the same array.

    Attributes:
        base: as of the last step of the optimizer; what is saved.
        current: after the reductions since then.
        trial: what the reduction under way makes of it, or None.
    """

    def __init__(self, array: Array) -> None:
        self.base = self.current = array
        self.trial: Array | None = None

    def keep(self) -> list[Array]:
        """The trial version is good; returns arrays that are of no further use."""
        if self.trial is None:
            return []
        freed = [] if self.current is self.base else [self.current]
        self.current, self.trial = self.trial, None
        return freed

    def drop(self) -> None:
        """Forget the trial version."""
        self.trial = None

    def exclude(self, parts: Iterable[slice]) -> None:
        """The trial version of these parts is what it was."""
        if self.trial is not None:
            for part in parts:
                self.trial[part] = self.current[part]

    def commit(self) -> list[Array]:
        """The step is taken; returns arrays that are of no further use."""
        freed = [] if self.current is self.base else [self.base]
        self.base = self.current
        return freed

    def rollback(self, parts: Iterable[slice] | None = None) -> list[Array]:
        """Return to the last step, everywhere or in some parts; returns arrays that are of no further use."""
        if self.current is self.base:
            return []
        if parts is not None:
            for part in parts:
                self.current[part] = self.base[part]
            return []
        freed, self.current = [self.current], self.base
        return freed

    def scale(self, factor: float) -> None:
        """Multiply by a factor, in place."""
        for array in {id(a): a for a in (self.base, self.current)}.values():
            np.multiply(array, factor, out=array)
