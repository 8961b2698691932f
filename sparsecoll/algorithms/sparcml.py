"""SparCML (Renggli and others, "SparCML: High-Performance Sparse Communication for Machine Learning", SC 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from sparsecoll.algorithms.base import Algorithm, Loss, Reduction
from sparsecoll.algorithms.primitives import partition, pipeline
from sparsecoll.algorithms.primitives.estimates import fill_in, rounds
from sparsecoll.errors import check_choice
from sparsecoll.formats import FORMATS
from sparsecoll.select import Vector
from sparsecoll.transport.channel import Channel
from sparsecoll.transport.network import Network, check_model
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
    call asks for. Long vectors are divided into chunks, as in `DenseStream`.

    Volume in words of COO, where K is the number of entries of the sum: recursive_double between 2k log2 P and 2k(P-1),
    or 2k(floor(log2 P) + 1) and 2kP if P is not a power of two; split_allgather 2k(P-1)/P + 2K(P-1)/P, between
    4k(P-1)/P and 2k(P-1)(1 + 1/P); dynamic at most (2k + n)(P-1)/P (Ok-Topk, Table 1, TopkDSA). Messages:
    log2 P (plus 2 if P is not a power of two), or P - 1 + log2 P; per chunk as many, or 2(P - 1). Memory: the entries.

    Args:
        k: as in `sparsecoll.Algorithm`.
        selector: as in `sparsecoll.Algorithm`.
        variant: "auto" (the default), "recursive_double", "split_allgather" or "dynamic".
        network: the alpha and beta by which "auto" chooses; None, the default, for 50 us and 1 Gb/s.

    Raises:
        ValueError: `variant` is none of these.
        TypeError: `network` is not a Network.
    """

    name = "sparcml"
    semantics = "exact_sum"
    takes_ops = True

    variant: str = "auto"
    network: Network | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("variant", self.variant, VARIANTS)
        check_model("network", self.network)

    def __call__(self, channel: Channel, x: SparseVector, k: int) -> Reduction:
        variant = self.variant
        if variant == "auto":
            times = sparcml_seconds(x.length, k, channel.size, self.network or Network())
            variant = min(times, key=lambda name: times[name])
        if variant == "recursive_double":
            return self._recursive_double(channel.with_format(channel.format.sparse()), x, k)
        return self._split_allgather(channel, x, k, variant == "dynamic")

    # SSAR_Recursive_double

    def _recursive_double(self, channel: Channel, x: SparseVector, k: int) -> Reduction:
        rank, size = channel.rank, channel.size
        core, loss = 1 << (size.bit_length() - 1), Loss(channel)

        def summed(part: SparseVector) -> pipeline.Program:
            if rank >= core:
                channel.isend(rank - core, part)
                for _ in range(core.bit_length()):
                    yield []  # the steps of the others
                received: list[SparseVector] = yield [channel.irecv(rank - core)]
                return received[0].astype(x.dtype)
            beyond = yield [channel.irecv(rank + core)] if rank + core < size else []
            total, distance = channel.merge([part, *beyond], partial=True), 1
            while distance < core:
                partner = rank ^ distance
                sent = loss.round(total, own=rank % distance == 0)  # `distance` ranks have this sum: the first records
                channel.isend(partner, sent)
                [theirs] = yield [channel.irecv(partner)]
                total = channel.merge([sent, theirs] if rank < partner else [theirs, sent], partial=True)
                distance *= 2
            value: SparseVector = total
            if size > core or total.dtype != x.dtype:  # some ranks receive the result, rounded
                value = loss.round(total, x.dtype, own=rank == 0)
            if rank + core < size:
                channel.isend(rank + core, value)
            return value

        chunks = pipeline.chunks_of(channel, x.dtype, k)
        parts = x.split([x.length * j // chunks for j in range(chunks + 1)])
        with channel.phase("exchange"):
            value = SparseVector.concatenate(list(pipeline.interleaved(channel.transport, map(summed, parts))))
        return Reduction(value, x if rank >= core else partial(loss.subtract_from, x))

    # SSAR_Split_allgather, DSAR_Split_allgather

    def _split_allgather(self, channel: Channel, x: SparseVector, k: int, dynamic: bool) -> Reduction:
        form = channel.format.sparse_or(FORMATS["dense"]) if dynamic else channel.format.sparse()
        channel = channel.with_format(form)
        rank, size = channel.rank, channel.size
        edges, totals = partition.boundaries(channel.transport, x, "even"), list[SparseVector]()

        def summed(part: SparseVector) -> pipeline.Program:
            regions = part.split(edges)
            for step in range(1, size):
                to = (rank + step) % size
                channel.isend(to, regions[to])
            others = yield [channel.irecv(source) for source in range(size) if source != rank]
            totals.append(channel.merge([*others[:rank], regions[rank], *others[rank:]], partial=True))
            return totals[-1].astype(x.dtype)

        chunks = pipeline.regions(channel, x, edges, k, summed)
        value = SparseVector.concatenate([chunk[owner].astype(x.dtype) for owner in range(size) for chunk in chunks])

        def contributed() -> Vector:
            arrived = SparseVector.concatenate([chunk[rank] for chunk in chunks])
            return Loss(channel, SparseVector.concatenate(totals).rounding_error(arrived)).subtract_from(x)

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
