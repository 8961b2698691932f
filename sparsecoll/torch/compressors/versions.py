"""An array of state, or an object in its place, whose changes take effect only when a step has succeeded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch

from sparsecoll.torch.tensors.device import Array


class Versions:
    """Three versions of an array: after the last step, after the last reduction, and of the current reduction.

    Most of the time they are the same array. It may be any object that nobody changes, such as a RowSparse.

    Args:
        array: the first version.
        places: returns the slices of named parameters in the array. The default returns none: `exclude`, and `rollback`
            of some parameters, change nothing.

    Attributes:
        base: after the last step of the optimizer; this version is saved.
        current: after the reductions since then.
        trial: of the current reduction, or None.
    """

    def __init__(self, array: Any, places: Callable[[Collection[str]], list[slice]] = lambda names: []) -> None:
        self.base = self.current = array
        self.trial: Any = None
        self._places = places

    def keep(self) -> list[Array]:
        """Accept the trial version; return arrays that are no longer needed."""
        if self.trial is None:
            return []
        freed = [] if self.current is self.base else [self.current]
        self.current, self.trial = self.trial, None
        return freed

    def drop(self) -> list[Array]:
        """Discard the trial version; return arrays that are no longer needed."""
        freed, self.trial = [] if self.trial is None else [self.trial], None
        return freed

    def exclude(self, names: Collection[str]) -> list[Array]:
        """Restore the trial version of these parameters; return arrays that are no longer needed: none."""
        if self.trial is not None:
            for part in self._places(names):
                self.trial[part] = self.current[part]
        return []

    def commit(self) -> list[Array]:
        """Accept the current version after the optimizer's step; return arrays that are no longer needed."""
        freed = [] if self.current is self.base else [self.base]
        self.base = self.current
        return freed

    def rollback(self, names: Collection[str] | None = None) -> list[Array]:
        """Return to the last step, for all or the named parameters; return arrays that are no longer needed."""
        if self.current is self.base:
            return []
        if names is not None:
            for part in self._places(names):
                self.current[part] = self.base[part]
            return []
        freed, self.current = [self.current], self.base
        return freed


class Rates(Versions):
    """The learning rates at which the residuals of a bucket's parameters are kept, if residuals follow them.

    What waits is then applied at the rate of the step in which it came. They are those of the last step in which they
    were above 0, and 0 before the first one.

    Args:
        names: of the parameters.
        of: returns their learning rates in this step; None in a loop that does not know them.

    Raises:
        ValueError: `of` is None.
    """

    def __init__(self, names: Sequence[str], of: Callable[[Sequence[str]], list[float]] | None) -> None:
        if of is None:
            raise ValueError(
                "follow_lr: expected False in a loop that does not know the learning rate, got True: use"
                " DistributedOptimizer, or SparseSGD without momentum, whose residual follows the rate by itself"
            )
        super().__init__(np.zeros(len(names)), lambda some: [slice(i, i + 1) for i, n in enumerate(names) if n in some])
        self._names, self._of = names, of

    def factors(self) -> list[float]:
        """Return, by parameter, the factors of the residuals in a reduction: 1 where an earlier one has applied it."""
        pairs = list(zip(self._of(self._names), self.current.tolist(), strict=True))
        self.trial = np.array([now or kept for now, kept in pairs])
        return [kept / now if kept and now else 1.0 for now, kept in pairs]

    def state(self) -> dict[str, torch.Tensor]:
        """Return the rates after the last step by parameter name; views, not copies."""
        return dict(zip(self._names, torch.from_numpy(self.base), strict=True))
