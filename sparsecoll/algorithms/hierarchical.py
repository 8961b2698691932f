"""Hierarchical: any algorithm between nodes, with one rank per node; inside a node vectors are summed at that rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparsecoll.algorithms.base import Algorithm, Loss, Reduction, reduced
from sparsecoll.algorithms.spardl import SparDL
from sparsecoll.formats import FORMATS
from sparsecoll.select import Vector, topk
from sparsecoll.transport.all_ranks import joined, node_members, separated
from sparsecoll.transport.channel import Channel
from sparsecoll.vector import SparseVector


@dataclass
class Hierarchical(Algorithm):
    """The result of `inner`, of which each node sends the sum of its ranks once.

    1. Inside: every rank sends its entries to the first rank of its node (through shared memory, as COO, since encoding
       costs more than sending there), which sums them in rank order.
    2. Between: the first ranks run `inner` on the sums of their nodes.
    3. Inside: the first rank sends the result to every rank of its node, with one bit for each entry that the rank
       sent: whether it contributed. What rounding or truncation removed from the node's sum stays with the first rank.

    Nodes are told by host name and boot id; on the simulator by `ranks_per_node`.

    Volume between nodes: that of `inner`, where P is the number of nodes and k the number of entries of a node's sum
    (at most k times the ranks of the node). Inside: 2k words from each other rank to the first one, and the result
    back. Memory: the entries of a node.

    Args:
        k: as in `sparsecoll.Algorithm`; None, the default, for that of `inner`.
        selector: as in `sparsecoll.Algorithm`.
        inner: name or object of the algorithm between nodes (default: "auto", the exact sum).

    Raises:
        ValueError: `inner` is an unknown name.
    """

    name = "hierarchical"

    inner: str | Algorithm = field(default="auto", compare=False)  # its state is that of _between
    _between: Algorithm = field(init=False, repr=False)
    _calls: int = field(default=0, init=False, repr=False)
    _leaders: list[int] = field(default_factory=list, init=False, repr=False)  # the first ranks of the nodes

    def __post_init__(self) -> None:
        super().__post_init__()
        from sparsecoll.algorithms import as_algorithm

        self._between = as_algorithm(self.inner)
        self.k = self._between.k if self.k is None else self.k

    @property
    def semantics(self) -> str:  # type: ignore[override]
        """The semantics of `inner`."""
        return self._between.semantics

    @property
    def takes_ops(self) -> bool:  # type: ignore[override]
        """Whether `inner` takes operations other than the sum."""
        return self._between.takes_ops

    def select(self, x: Vector, k: int, ranks: int = 1) -> SparseVector:
        """Select with this object's selector or, without one, as `inner` does; the top k if `inner` selects none."""
        if self.selector is not None:
            return super().select(x, k)
        blocks = isinstance(self._between, SparDL)  # which are those of the nodes
        entries = Algorithm.select(self._between, x, k) if blocks else self._between.select(x, k, ranks)
        return topk(x, k) if entries is x else entries

    def replicated_state(self) -> tuple[int, int]:
        """Return the number of calls: only some ranks have the state of `inner`, and none has one for an exact sum."""
        return (0, 0) if self.semantics == "exact_sum" else (self._calls, 0)

    def __call__(self, channel: Channel, x: SparseVector, k: int) -> Reduction:
        self._calls += 1
        with channel.phase("nodes"):
            nodes = node_members(channel.transport)
        leaders = [members[0] for members in nodes]
        if self._leaders not in ([], leaders):  # a loaded state of other nodes, of which the new first ranks have none
            self._between.reset()
        self._leaders = leaders
        mine = next(members for members in nodes if channel.rank in members)
        if channel.rank != mine[0]:
            with channel.phase("inside"):
                channel.with_format(FORMATS["coo"]).isend(mine[0], x)
                message, bits = separated(channel.transport.recv(mine[0]), 2)
            return Reduction(channel.decode(message).astype(x.dtype), x.select_mask(bits))
        with channel.phase("inside"):
            parts = [x, *(channel.recv(rank) for rank in mine[1:])]
            total = channel.merge(parts, partial=True)
            entering = channel.round(total)
        reduction = reduced(self._between, channel.group(leaders), entering, k)
        value = reduction.value.to_sparse()
        result = value.astype(x.dtype)
        contributed = reduction.contributed.to_sparse() if channel.op.sums else entering
        with channel.phase("inside"):
            message = FORMATS["coo"].encode(result)
            for rank, part in zip(mine[1:], parts[1:], strict=True):
                channel.transport.isend(rank, joined([message, part.mask_of(contributed)]))

        def share() -> Vector:
            loss = Loss(channel, total.intersect(contributed), -contributed)
            if channel.rank == leaders[0] and value.dtype != x.dtype:  # of the ranks, one records it
                loss.add(value.rounding_error(result))
            return loss.subtract_from(x.intersect(contributed))

        return Reduction(result, share)
