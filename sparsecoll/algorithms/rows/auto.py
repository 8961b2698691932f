"""Auto: allgather or owners, whichever is predicted to be faster."""

from __future__ import annotations

from dataclasses import dataclass

from sparsecoll.algorithms.allgather import Allgather
from sparsecoll.algorithms.base import Reduction
from sparsecoll.algorithms.primitives.estimates import OVERHEAD, rounds
from sparsecoll.algorithms.rows.owners import RowAlgorithm, RowOwners
from sparsecoll.formats import wire_dtype
from sparsecoll.transport.channel import Channel
from sparsecoll.transport.network import Network
from sparsecoll.vector import RowSparse

BYTE = 5e-11  # seconds to copy or add a byte of a row
DISTINCT = 0.8  # of the rows of all ranks together, as ids by Zipf's law have them between 4 and 16 ranks


def gather_seconds(P: int, total: float, network: Network) -> float:
    """Return the predicted seconds of `Allgather` for rows of `total` bytes on all ranks together."""
    return rounds(P) * network.alpha + total * (network.beta * (P - 1) / P + BYTE)


def owners_seconds(P: int, total: float, union: float, network: Network) -> float:
    """Return the predicted seconds of `RowOwners`, whose sum has rows of `union` bytes."""
    waits = (1 + rounds(P)) * network.alpha + (P - 2) * OVERHEAD
    return waits + (total / P + union) * (network.beta * (P - 1) / P + BYTE) + total / P * BYTE


@dataclass
class RowAuto(RowAlgorithm):
    """Runs `RowGather` or `RowOwners(owner)`, whichever the alpha-beta model predicts to be faster.

    It assumes that four fifths of the rows of all ranks together are distinct, as ids that follow Zipf's law are on few
    ranks, and the costs of messages that `sparsecoll.Auto` assumes. So long calls on 6 ranks and more go to owners.
    Pass `RowOwners` where all ranks have nearly the same rows.

    A dense sum is no choice: with every row on every rank, `RowOwners` moves what it moves, and less than a byte for
    each row.

    Args:
        owner: as in `RowOwners` (default: "hash").
    """

    name = "auto"

    owner: str = "hash"

    def __post_init__(self) -> None:
        RowOwners(self.owner)

    def __call__(self, channel: Channel, x: RowSparse, k: int) -> Reduction:  # type: ignore[override]
        row_bytes = x.d * wire_dtype(x.dtype, channel.value_dtype).stored.itemsize + 1.5
        P, total, network = channel.size, sum(channel.held) * row_bytes, channel.transport.network
        union = min(max(DISTINCT * total, k * row_bytes), x.n * row_bytes)
        gathers = P == 1 or gather_seconds(P, total, network) <= owners_seconds(P, total, union, network)
        chosen = Allgather() if gathers else RowOwners(self.owner)
        return chosen(channel, x, k)  # type: ignore[arg-type]
