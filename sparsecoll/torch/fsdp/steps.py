"""What becomes of residuals after a back-propagation: a step commits them, a skipped one rolls them back."""

from __future__ import annotations

import logging

import torch

from sparsecoll.torch.buckets import Buckets
from sparsecoll.torch.calls import mean_of
from sparsecoll.torch.fsdp.groups import Group, Shard
from sparsecoll.torch.replica import Replica
from sparsecoll.torch.tensors import version
from sparsecoll.transport import Transport

logger = logging.getLogger(__name__)


class Steps:
    """Decides whether the reductions of the last back-propagation were used by a step of an optimizer.

    Args:
        groups: the parameters that FSDP reduces together.
        replica: as in `ShardedReductions`.
        node: transport of the ranks over which parameters are sharded.
        buckets: whose state is committed or rolled back.
        warns: whether rank 0 tells that gradients were thrown away, which a GradScaler does on purpose.

    Attributes:
        pending: whether there are reduced gradients that no step has used.
    """

    def __init__(self, groups: list[Group], replica: Replica, node: Transport, buckets: Buckets, warns: bool) -> None:
        self._groups, self._replica, self._node, self._buckets = groups, replica, node, buckets
        self._warns = warns and replica.transport.rank == node.rank == 0
        self._marks: list[int] = []  # versions after the last reduction, also of frozen parameters: freezing is no step
        self.pending = False

    def accept(self) -> None:
        """Accept the reductions of a back-propagation, which have succeeded on all ranks."""
        self._buckets.keep()
        self.pending = True
        self._marks = self._versions()

    def settle(self) -> None:
        """Commit if parameters have changed, roll back if gradients were thrown away; else they add up. Collective."""
        if not self.pending or self.commit_if_updated() or not self._thrown_away():
            return
        self.rollback()
        if self._warns:
            self._warns = False
            logger.warning(
                "gradients were discarded without a step of an optimizer, so residuals were restored to their values"
                " before it. If your loop updates the parameters by itself, do so in place, not through p.data"
            )

    def commit_if_updated(self) -> bool:
        """Commit what is pending if parameters have changed since the last reduction; return whether they have."""
        updated = self._marks != self._versions()
        if self.pending and updated:
            self._commit()
        return updated

    def stepped(self) -> None:
        """Commit what is pending, because an optimizer has stepped, and compare replicas if that is due."""
        if not self.pending:
            return
        self._commit()
        if self._node is not self._replica.transport:
            self._replica.params = {shard.name: shard.local for group in self._groups for shard in group.shards}
            self._replica.compare_if_due()

    def pass_over(self) -> None:
        """Let the versions of parameters that an optimizer has just written to, without a change, tell of no step."""
        if self.pending:
            self._marks = self._versions()

    def rollback(self) -> None:
        """Return to the state before the back-propagation."""
        self._buckets.drop()
        self._buckets.rollback()
        self.pending = False

    def _commit(self) -> None:
        self._buckets.commit()
        self._replica.context.step += 1
        self.pending = False

    def _versions(self) -> list[int]:
        return [version(shard.param) for group in self._groups for shard in group.parameters]

    def _thrown_away(self) -> bool:
        """Return whether gradients are None or zero on all ranks that share the parameters. Collective.

        A rank alone cannot tell: its part may be empty, or no entry that was sent lies in it.
        """
        here = all(_gone(shard) for group in self._groups for shard in group.shards)
        return mean_of(self._node, float(here), self._replica.options.timeout) == 1.0


def _gone(shard: Shard) -> bool:
    """Return whether the gradient of a shard was thrown away: None, or zero everywhere."""
    gradient: torch.Tensor | None = shard.param.grad
    if gradient is None:
        return True
    values = gradient.to_local().view(-1)  # type: ignore[attr-defined]
    return not values[:1024].any() and not values.any()
