"""Residuals that follow the learning rate: what waits is applied at the rate of the step in which it came."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence


class Rates:
    """The learning rates of a bucket's parameters, in the last step and in this one.

    Args:
        names: of the parameters.
        of: returns their learning rates in this step; None in a loop that does not know them.
        known: name -> learning rate of the last step, of all buckets; it outlives them.

    Raises:
        ValueError: `of` is None.

    Attributes:
        last: learning rates in the last step in which they were above 0; 0 before the first one.
    """

    def __init__(
        self, names: Sequence[str], of: Callable[[Sequence[str]], list[float]] | None, known: dict[str, float]
    ) -> None:
        if of is None:
            raise ValueError(
                "follow_lr: expected False in a loop that does not know the learning rate, got True: use"
                " DistributedOptimizer, or SparseSGD without momentum, whose residual follows the rate by itself"
            )
        self._names, self._of, self._known = names, of, known
        self.last = [known.get(name, 0.0) for name in names]
        self._kept = self._trial = self.last  # of the last reduction that was accepted, and of the one under way

    def factors(self) -> list[float]:
        """Return, by parameter, the factors of the residuals in a reduction: 1 where an earlier one has applied it."""
        pairs = list(zip(self._of(self._names), self._kept, strict=True))
        self._trial = [now or kept for now, kept in pairs]
        return [kept / now if kept and now else 1.0 for now, kept in pairs]

    def stay(self, names: Collection[str]) -> None:
        """The residuals of these parameters are as they were after the last step."""
        self._kept, self._trial = (
            [
                before if name in names else rate
                for name, rate, before in zip(self._names, rates, self.last, strict=True)
            ]
            for rates in (self._kept, self._trial)
        )

    def keep(self) -> None:
        """The reduction was accepted."""
        self._kept = self._trial

    def drop(self) -> None:
        """The reduction was not accepted."""
        self._trial = self._kept

    def commit(self) -> None:
        """The optimizer has stepped."""
        self.last = self._kept
        self._known.update(zip(self._names, self.last, strict=True))

    def load(self, last: list[float]) -> None:
        """Take the rates of the last step from a checkpoint."""
        self.last = self._kept = self._trial = last
