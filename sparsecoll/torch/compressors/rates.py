"""Residuals that follow the learning rate: what waits is applied at the rate of the step in which it came."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence


class Rates:
    """The learning rates of a bucket's parameters, in the last step and in this one.

    Args:
        names: of the parameters.
        of: returns their learning rates in this step; None in a loop that does not know them.

    Raises:
        ValueError: `of` is None.

    Attributes:
        last: learning rates in the last step in which they were above 0; 0 before the first one.
    """

    def __init__(self, names: Sequence[str], of: Callable[[Sequence[str]], list[float]] | None) -> None:
        if of is None:
            raise ValueError(
                "follow_lr: expected False in a loop that does not know the learning rate, got True: use"
                " DistributedOptimizer, or SparseSGD without momentum, whose residual follows the rate by itself"
            )
        self._names, self._of = names, of
        self.last = [0.0] * len(names)
        self._now = self.last

    def factors(self, first: bool) -> list[float]:
        """Return, by parameter, the factors of the residuals in a reduction.

        Args:
            first: whether it is the first one since the last step; others find residuals that follow already.
        """
        pairs = list(zip(self._of(self._names), self.last, strict=True))
        self._now = [now or last for now, last in pairs]
        return [last / now if first and last and now else 1.0 for now, last in pairs]

    def stay(self, names: Collection[str]) -> None:
        """The residuals of these parameters are as they were after the last step."""
        known = zip(self._names, self._now, self.last, strict=True)
        self._now = [last if name in names else now for name, now, last in known]

    def commit(self) -> None:
        """The optimizer has stepped."""
        self.last = self._now
