"""Auto: allgather or owners, whichever is predicted to be faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparsecoll.algorithms.auto import overlap
from sparsecoll.algorithms.auto.tune import tuning_of
from sparsecoll.algorithms.primitives.estimates import fill_in, rounds
from sparsecoll.algorithms.rows.base import RowAlgorithm, RowSum
from sparsecoll.algorithms.rows.gather import RowGather
from sparsecoll.algorithms.rows.owners import RowOwners
from sparsecoll.formats import wire_dtype
from sparsecoll.transport import network
from sparsecoll.transport.network import Tuning, given_tuning
from sparsecoll.transport.row_channel import RowChannel
from sparsecoll.vector import RowSparse, SparseVector

MIN_SECONDS = 2e-3  # predicted length of a call from which on the communicator is measured
SAMPLING_RATIO = 10  # supports are sampled if the call takes at least so many times as long


@dataclass(frozen=True)
class RowShape:
    """What the costs of a call depend on.

    Attributes:
        P: number of ranks.
        total: number of rows of all ranks together.
        row_bytes: bytes of a row on the wire.
    """

    P: int
    total: int
    row_bytes: float

    def gather(self, t: Tuning) -> float:
        """Return the predicted seconds of `RowGather`."""
        total = self.total * self.row_bytes
        return rounds(self.P) * t.alpha + t.beta * total * (self.P - 1) / self.P + total * per_byte(t)

    def owners(self, t: Tuning, union: float) -> float:
        """Return the predicted seconds of `RowOwners`, whose sum has `union` rows."""
        moved = (self.total / self.P + union) * self.row_bytes
        waits = (1 + rounds(self.P)) * t.alpha + (self.P - 2) * t.overhead
        copied = (2 * self.total / self.P + union) * self.row_bytes
        return waits + t.beta * moved * (self.P - 1) / self.P + copied * per_byte(t)


@dataclass
class RowAuto(RowAlgorithm):
    """Runs `RowGather` or `RowOwners(owner)`, whichever the alpha-beta model predicts to be faster.

    1. Predict both for the rows that the ranks have, with costs as `sparsecoll.Auto` gets them: the usual ones, or
       measured ones for a call of 2 ms and more.
    2. Owners are faster if the sum has few rows. If its possible sizes leave the choice open, and the call takes at
       least ten times as long as that, sample the rows to estimate how many are distinct (`overlap.estimate`).

    A dense sum is no choice: with every row on every rank, `RowOwners` moves what it moves, and less than a byte for
    each row.

    Args:
        owner: as in `RowOwners` (default: "hash").
    """

    name = "auto"
    reads_tuning = True

    owner: str = "hash"

    def __post_init__(self) -> None:
        RowOwners(self.owner)

    def __call__(self, channel: RowChannel, x: RowSparse, held: Sequence[int]) -> RowSum:
        owners = channel.size > 1 and self._takes_owners(channel, x, held)
        return (RowOwners(self.owner) if owners else RowGather())(channel, x, held)

    @staticmethod
    def _takes_owners(channel: RowChannel, x: RowSparse, held: Sequence[int]) -> bool:
        width = wire_dtype(x.dtype, channel.value_dtype).stored.itemsize
        shape = RowShape(channel.size, sum(held), x.d * width + 1.5)
        t = costs(channel, shape)
        gather, most = shape.gather(t), min(shape.total, x.n)
        if gather <= shape.owners(t, max(held)):
            return False
        if gather > shape.owners(t, most):
            return True
        k = round(shape.total / channel.size)
        if gather < SAMPLING_RATIO * overlap.seconds(channel.size, k, t):
            return False
        numbers = SparseVector.from_sorted_unchecked(x._indices, x.rows, x.n)
        length, _ = overlap.estimate(channel.transport, numbers, k)
        return gather > shape.owners(t, fill_in(round(max(length, k)), k, channel.size))


def costs(channel: RowChannel, shape: RowShape) -> Tuning:
    """Return the costs with which a call is predicted, the same on all ranks; the first may measure them."""
    transport = channel.transport
    given = given_tuning(transport)
    usual = network.IN_ONE_NODE if transport.one_node else network.BETWEEN_NODES
    if given is not None or shape.gather(usual) < MIN_SECONDS:
        return given or usual
    return tuning_of(transport)


def per_byte(t: Tuning) -> float:
    """Return the seconds in which a byte of a row is copied or added; `t.dense` is of three passes over 4 bytes."""
    return t.dense / 12
