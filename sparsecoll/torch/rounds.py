"""The message that ranks exchange at the end of a reduction."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsecoll.errors import CommunicationError
from sparsecoll.torch.layout import has_rows, takes_part
from sparsecoll.torch.tensors import Named
from sparsecoll.transport import Transport
from sparsecoll.transport.collectives import allgather

CHANGED = 1  # a gradient has changed after it was sent: the reduction has to be made again
JOINED = 2  # this rank has run out of data
SUSPECT = 4  # this rank's parameters may differ from the others'
REPLACED = 8  # this rank's model has other buffers than before


@dataclass
class Round:
    """The messages of all ranks combined; the same on every rank.

    Attributes:
        steps: taken by each rank before this one.
        flags: any rank's.
        joined: the ranks that have run out of data.
        used, rows, dense, trainable: parameters of which any rank has a gradient, one of rows (or a module that says
            so), a dense one, and that take part.
        modules: by module with buffers, whether any rank has changed them.
        alike: whether all ranks that have data have the same `checksum`.
    """

    steps: list[int]
    flags: int
    joined: list[int]
    used: set[str]
    rows: set[str]
    dense: set[str]
    trainable: set[str]
    modules: list[bool]
    alike: bool = True

    @property
    def over(self) -> bool:
        """Whether no rank has data."""
        return 0 < len(self.joined) == len(self.steps)

    @property
    def furthest(self) -> int:
        """The lowest of the ranks that have taken the most steps."""
        return int(np.argmax(self.steps))

    @property
    def root(self) -> int:
        """The lowest rank that has data, or 0 if none has."""
        return min(set(range(len(self.steps))) - set(self.joined), default=0)


NOTHING = Round([], 0, [], set(), set(), set(), set(), [])


class Row:
    """The message of one rank, of its parameters and their gradients as they are now.

    Args:
        steps: taken by this rank before this one.
        flags: of this rank.
        params: by name, the same names in the same order on all ranks.
        modules: by module with buffers, whether they have changed.
        trainable: which parameters take part; None, the default: those that want a gradient or have one.
        checksum: of options that must be the same on all ranks.
        sparse: ids of the parameters whose modules say that their gradients are sparse.
    """

    def __init__(
        self,
        steps: int,
        flags: int,
        params: Named,
        modules: Sequence[bool] = (),
        trainable: Sequence[bool] | None = None,
        checksum: int = 0,
        sparse: Collection[int] = (),
    ) -> None:
        here, tensors = not flags & JOINED, list(params.values())
        used = [here and p.grad is not None for p in tensors]
        rows = [has_rows(p.grad) or id(p) in sparse for p in tensors]
        dense = [p.grad is not None and not has_rows(p.grad) for p in tensors]
        taking = [takes_part(p) for p in tensors] if trainable is None else trainable
        self._names = list(params)
        self._head = np.array([steps, flags, checksum], np.int64)
        self._bits = np.array([*used, *rows, *dense, *taking, *(here and changed for changed in modules)], np.uint8)

    def exchange(self, transport: Transport) -> Round:
        """Exchange rows and combine them. Collective; called within a CollectiveCall.

        Raises:
            CommunicationError: ranks have taken other numbers of steps.
        """
        names, head, bits = self._names, self._head, self._bits
        rows = allgather(transport, np.concatenate([head.view(np.uint8), np.packbits(bits)]))
        transport.waitall()
        heads = np.ascontiguousarray(rows[:, : head.nbytes]).view(np.int64)
        steps, flags = heads[:, 0].tolist(), heads[:, 1]
        active = heads[(flags & JOINED) == 0]
        if len(set(active[:, 0].tolist())) > 1:
            raise CommunicationError(
                f"steps: expected every rank to take or skip the same ones, got {_counted(steps)}: decide on"
                " all ranks alike whether to skip a step, by the mean gradients or by a value summed over the ranks"
            )
        anywhere = np.unpackbits(np.bitwise_or.reduce(rows[:, head.nbytes :], axis=0), count=bits.size).astype(bool)
        used, rows, dense, trainable, modules = np.split(anywhere, np.arange(1, 5) * len(names))

        def named(marks: NDArray[Any]) -> set[str]:
            return {names[i] for i in np.flatnonzero(marks).tolist()}

        joined = np.flatnonzero(flags & JOINED).tolist()
        flag = int(np.bitwise_or.reduce(flags))
        alike = len(set(active[:, 2].tolist())) < 2
        return Round(
            steps, flag, joined, named(used), named(rows), named(dense), named(trainable), modules.tolist(), alike
        )


def _counted(steps: list[int]) -> str:
    shown = ", ".join(f"{taken} on rank {rank}" for rank, taken in enumerate(steps[:8]))
    return f"{shown}{', ...' if len(steps) > 8 else ''} so far"
