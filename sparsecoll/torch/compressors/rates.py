"""Residuals that follow the learning rate: what waits is applied at the rate of the step in which it came."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch

from sparsecoll.torch.compressors.versions import Versions


class Rates:
    """The learning rates at which the residuals of a bucket's parameters are kept.

    They are those of the last step in which they were above 0, and 0 before the first one.

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
        self._names, self._of = names, of
        self._rates = Versions(np.zeros(len(names)))

    def factors(self) -> list[float]:
        """Return, by parameter, the factors of the residuals in a reduction: 1 where an earlier one has applied it."""
        pairs = list(zip(self._of(self._names), self._rates.current.tolist(), strict=True))
        self._rates.trial = np.array([now or kept for now, kept in pairs])
        return [kept / now if kept and now else 1.0 for now, kept in pairs]

    def _parts(self, names: Collection[str]) -> list[slice]:
        return [slice(i, i + 1) for i, name in enumerate(self._names) if name in names]

    def exclude(self, names: Collection[str]) -> None:
        """These parameters take no part in the current reduction."""
        self._rates.exclude(self._parts(names))

    def keep(self) -> None:
        """The reduction was accepted."""
        self._rates.keep()

    def drop(self) -> None:
        """The reduction was not accepted."""
        self._rates.drop()

    def commit(self) -> None:
        """The optimizer has stepped."""
        self._rates.commit()

    def rollback(self, names: Collection[str] | None) -> None:
        """The residuals of all parameters, or of these, are as they were after the last step."""
        self._rates.rollback(None if names is None else self._parts(names))

    def state(self) -> dict[str, torch.Tensor]:
        """Return the rates after the last step by parameter name; views, not copies."""
        return dict(zip(self._names, torch.from_numpy(self._rates.base), strict=True))
