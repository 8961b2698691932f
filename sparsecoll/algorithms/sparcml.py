"""SparCML (Renggli and others, "SparCML: High-Performance Sparse Communication for Machine Learning", SC 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from sparsecoll.algorithms.base import Algorithm, Loss, Reduction
from sparsecoll.algorithms.primitives import partition
from sparsecoll.algorithms.primitives.estimates import fill_in, rounds
from sparsecoll.errors import check_choice
from sparsecoll.formats import FORMATS
from sparsecoll.select import Vector
from sparsecoll.transport.channel import Channel
from sparsecoll.transport.network import Network
from sparsecoll.vector import SparseVector

VARIANTS = ("auto", "recursive_double", "split_allgather", "dynamic")


@dataclass
class SparCML(Algorithm):
    """Exact sum, with three schedules for any P (section 5.3 of the paper).

    "recursive_double" (SSAR_Recursive_double): in step t, ranks at a distance of 2^t exchange their partial sums. Ranks
    beyond the largest power of two send their vector to another rank first and receive the result from it.

    "split_allgather" (SSAR_Split_allgather): each rank sends to every other rank the entries in that rank's region
    (equal widths, P - 1 messages); the summed regions are gathered as sparse streams.

    "dynamic" (DSAR_Split_allgather): as split_allgather, but a region is sent densely as soon as that is smaller.

    "auto": the variant with the shortest time in the alpha-beta model, at the fill-in of uniform supports.

    "recursive_double" and "split_allgather" never send dense windows; otherwise messages are in the format that the
    call asks for.

    Volume in words of COO, where K is the number of entries of the sum: recursive_double between 2k log2 P and 2k(P-1),
    or 2k(floor(log2 P) + 1) and 2kP if P is not a power of two; split_allgather 2k(P-1)/P + 2K(P-1)/P, between
    4k(P-1)/P and 2k(P-1)(1 + 1/P); dynamic at most (2k + n)(P-1)/P (Ok-Topk, Table 1, TopkDSA). Messages:
    log2 P (plus 2 if P is not a power of two), or P - 1 + log2 P. Memory: the entries.

    Args:
        k: as in `sparsecoll.Algorithm`.
        selector: as in `sparsecoll.Algorithm`.
        variant: "auto" (the default), "recursive_double", "split_allgather" or "dynamic".
        network: the alpha and beta by which "auto" chooses; None, the default, for 50 us and 1 Gb/s.

    Raises:
        ValueError: `variant` is none of these.
    """

    name = "sparcml"
    semantics = "exact_sum"
    takes_ops = True

    variant: str = "auto"
    network: Network | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("variant", self.variant, VARIANTS)

    def __call__(self, channel: Channel, x: SparseVector, k: int) -> Reduction:
        variant = self.variant
        if variant == "auto":
            times = sparcml_seconds(x.length, k, channel.size, self.network or Network())
            variant = min(times, key=lambda name: times[name])
        if variant == "recursive_double":
            return self._recursive_double(channel.with_format(channel.format.sparse()), x)
        return self._split_allgather(channel, x, k, variant == "dynamic")

    # SSAR_Recursive_double

    def _recursive_double(self, channel: Channel, x: SparseVector) -> Reduction:
        rank, size = channel.rank, channel.size
        core = 1 << (size.bit_length() - 1)
        loss = Loss(channel)
        with channel.phase("exchange"):
            if rank >= core:
                channel.isend(rank - core, x)
                return Reduction(channel.recv(rank - core).astype(x.dtype), x)
            total = channel.merge([x], partial=True)
            if rank + core < size:
                total = channel.merge([total, channel.recv(rank + core)], partial=True)
            distance = 1
            while distance < core:
                partner = rank ^ distance
                sent = loss.round(total, own=rank % distance == 0)  # `distance` ranks have this sum: the first records
                channel.isend(partner, sent)
                theirs = channel.recv(partner)
                pair = [sent, theirs] if rank < partner else [theirs, sent]
                total = channel.merge(pair, partial=True)
                distance *= 2
            value = total.astype(x.dtype)
            if size > core:  # some ranks receive the result, rounded
                value = loss.round(value, own=rank == 0)
            if rank + core < size:
                channel.isend(rank + core, value)
        return Reduction(value, partial(loss.subtract_from, x))

    # SSAR_Split_allgather, DSAR_Split_allgather

    def _split_allgather(self, channel: Channel, x: SparseVector, k: int, dynamic: bool) -> Reduction:
        form = channel.format.sparse_or(FORMATS["dense"]) if dynamic else channel.format.sparse()
        channel = channel.with_format(form)
        with channel.phase("split"):
            regions = x.split(partition.boundaries(channel.transport, x, "even"))
            total = channel.merge(channel.exchange(regions.__getitem__), partial=True)
        with channel.phase("gather"):
            gathered = channel.allgather(total.astype(x.dtype), k)
            value = SparseVector.concatenate([part.astype(x.dtype) for part in gathered])

        def contributed() -> Vector:
            arrived = gathered[channel.rank].astype(total.dtype)
            return Loss(channel, SparseVector.merge([total, -arrived], total.dtype).drop_zeros()).subtract_from(x)

        return Reduction(value, contributed)


def sparcml_seconds(n: int, k: int, P: int, network: Network) -> dict[str, float]:
    """Return predicted seconds of each variant for uniform supports, in COO with float32."""
    log, share = rounds(P), (P - 1) / P
    doubling = sum(fill_in(n, k, 2**t) for t in range(log))
    split = (P - 1 + log) * network.alpha + network.beta * 8 * k * share
    return {
        "recursive_double": log * network.alpha + network.beta * 8 * doubling,
        "split_allgather": split + network.beta * 8 * fill_in(n, k, P) * share,
        "dynamic": split + network.beta * min(8 * fill_in(n, k, P), 4 * n) * share,
    }
