"""ChunkedTopK: the largest values of each chunk, in about 9.6 bits each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from sparsecoll.errors import CommunicationError, NonFiniteError, check_choice, check_integer, check_number
from sparsecoll.formats.packed import PackedCodesFormat
from sparsecoll.kernels import kernels_of
from sparsecoll.kernels.keys import PLAIN, Chunks, Pass, Taken, index_dtype
from sparsecoll.kernels.memory import asarray_like, empty
from sparsecoll.kernels.reference.chunks import LARGEST
from sparsecoll.kernels.reference.rice import RICE_PAD
from sparsecoll.torch.compressors.base import ErrorFeedback, StepContext, write_mean
from sparsecoll.torch.compressors.schedule import RARE
from sparsecoll.torch.tensors.layout import Array, Layout
from sparsecoll.transport import Transport
from sparsecoll.transport.all_ranks import NEAR_RANKS, allgatherv, exchanged
from sparsecoll.vector import DenseVector

SHARED = 32  # consecutive chunks of a parameter share two magnitudes
RICE_BLOCK = 1024  # gaps that share a Rice parameter
PART = 16 << 20  # bytes of a gradient while whose messages are under way the next ones are made
HEAD = 16  # bytes: the number of entries and the first index
ENTRY = 3.6  # bits of an entry without those of the mean gap
SUMS = PackedCodesFormat(8)  # of sums
SUM = 8.1  # bits of an entry of a sum, without its index


class Region(NamedTuple):
    """A part of the bucket that one rank sums: its edges, its chunks, and the index at which each block begins."""

    start: int
    stop: int
    chunks: Chunks
    starts: Array


@dataclass
class ChunkedTopK(ErrorFeedback):
    """Sends the k largest of every `chunk` values, each as its sign and one of two magnitudes.

    1. acc = decay * residual + gradient. Each parameter is divided into chunks of consecutive values. The k values of
       largest magnitude of a chunk are taken, in proportion fewer of a shorter last one, but k of a parameter that is
       shorter than a chunk; zeros never.
    2. A value is sent as its sign and one of two magnitudes, those of least squared error for up to 32 chunks
       (Lloyd-Max); what that leaves of it stays in the residual, all in one pass. The gaps between indices are
       Rice-coded: at 64 of 4,096 an entry takes 9.6 bits, so that a message is 1/213 of the gradient in float32.
    3. With algo="allgather" every rank gets all messages and adds them in rank order. With "owners" each rank gets the
       messages for its region, adds them, and sends the sum to all: all of it in 8 bits an entry, or with `requantize`
       as in steps 1 and 2, of its own acc and the others' entries. Rounding errors of sums stay in the owner's
       residual, so that nothing is lost with decay=1.

    SparseLoCo (Sarfi and others, 2025) sends the largest 64 of 4,096 with decay=0.95 and all-gathers them, in four
    levels over 6 standard deviations, whose squared error is 3 to 4 times as large.

    Volume, for messages of m bytes: (P-1)m all-gathered; (P-1)/P (m + u) by owners, for a sum of u bytes, about
    n(1 - (1 - k/chunk)^P) entries of 9 to 13 bits; 2(P-1)/P m requantized.

    Args:
        k: number of values that are sent of a chunk (default: 64).
        chunk: number of values in a chunk (default: 4096).
        decay: factor of the residual, in [0, 1] (default: 1). Below 1, gradient mass is lost by design.
        algo: "auto" (the default) for the smaller volume by these formulas, "allgather" or "owners".
        requantize: whether sums by owners are selected and quantized again (default: False).

    Raises:
        ValueError: An option is out of range.
    """

    name = "chunktopk"
    stands_alone = True
    dense_below = 0

    k: int = 64
    chunk: int = 4096
    _: KW_ONLY
    decay: float = 1.0
    algo: str = "auto"
    requantize: bool = False

    def __post_init__(self) -> None:
        check_integer("chunk", self.chunk, 1, 2**31)
        check_integer("k", self.k, 1, self.chunk)
        check_choice("algo", self.algo, ("auto", "allgather", "owners"))
        check_number("decay", self.decay, "[0, 1]")
        self.sends_rarely = self.k < RARE * self.chunk

    def bind(self, layout: Layout, transport: Transport, context: StepContext, timeout: float | None = None) -> None:
        super().bind(layout, transport, context, timeout)
        parts = [np.arange(a, b, self.chunk) for a, b in pairwise(layout.offsets)]
        edges = np.concatenate([*parts, [layout.length]]).astype(np.int64)
        n, entries = layout.length, int(self._counts(edges).sum())
        self._by_owners = n > 0 and self._has_owners(self.size, n, entries)
        self.sends_at_once = not self._by_owners and self.size <= NEAR_RANKS
        owners = self.size if self._by_owners else 1
        cuts = np.searchsorted(edges, [n * j // owners for j in range(owners + 1)])
        self._regions = [self._region(edges[a : b + 1]) for a, b in pairwise(cuts)]

    def best_bucket(self, size: int) -> int | None:
        return PART if 1 < size <= NEAR_RANKS and not self._has_owners(size, self.chunk, self.k) else None

    def _has_owners(self, size: int, n: int, entries: int) -> bool:
        """Return whether `size` ranks sum by owners: as `algo` says, or if that takes fewer bits than all-gathering."""
        if size == 1 or self.algo != "auto":
            return size > 1 and self.algo == "owners"
        message = entries * (math.log2(n / entries) + ENTRY)  # all divided by P - 1
        if self.requantize:
            return 2 * message < size * message
        share = 1 - (1 - entries / n) ** size  # of the coordinates, in the sum
        rest = 1 - share
        gaps = max(share, -share * math.log2(share) - rest * math.log2(rest) if rest > 0 else 0)
        return message + n * (share * SUM + gaps) < size * message

    def _counts(self, edges: Array) -> Array:
        lengths = np.diff(edges)
        fewer = np.maximum(1, self.k * lengths // self.chunk)  # of the last chunk of several
        return np.where(np.isin(edges[:-1], self.layout.offsets), np.minimum(self.k, lengths), fewer)

    def _region(self, edges: Array) -> Region:
        """Return the region of these chunks, with positions that count from its start."""
        place, begins = np.arange(edges.size - 1), np.isin(edges[:-1], self.layout.offsets)
        begins[:1] = True
        blocks = np.flatnonzero((place - np.maximum.accumulate(np.where(begins, place, 0))) % SHARED == 0)
        own = edges - edges[0]
        return Region(
            int(edges[0]), int(edges[-1]), Chunks(own, np.append(blocks, place.size), self._counts(edges)), own[blocks]
        )

    def compensate(self, gradient: Array, scale: float = 1.0, source: Array | None = None) -> Any:
        """Return the memory of acc, which `compress` forms, and what holds the gradient if it is not there."""
        self._residual.trial = gradient
        return gradient, source

    def compress(self, acc: Any) -> list[Taken | None]:
        """Form acc, take what is sent to the owner of each region, and leave the rest; all of the own region."""
        values, source = acc
        taken: list[Taken | None] = []
        decay = 1.0 if self.versions.open else self.decay  # once a step
        for owner, (a, b, chunks, _) in enumerate(self._regions):
            work = Pass(None if source is None else source[a:b], add=(self._residual.current[a:b], decay))
            if self._by_owners and self.requantize and owner == self.own_rank:
                kernels_of(values).form(values[a:b], work)
                taken.append(None)
            else:
                taken.append(self._take(values, a, b, work, chunks))
        return taken

    def _take(self, values: Array, a: int, b: int, work: Pass, chunks: Chunks) -> Taken:
        wrong, *taken = kernels_of(values).chunk_topk(values[a:b], work, chunks)
        if wrong >= 0:
            name = self.layout.name_at(a + wrong)
            raise NonFiniteError(f"gradient of {name!r}: expected finite values, got NaN or infinity")
        return tuple(taken)

    def communicate(self, transport: Transport, message: list[Taken | None]) -> list[Any]:
        if not self._by_owners:
            assert message[0] is not None
            return self.combined(self.gather(transport, encode(message[0]), direct=self.sends_at_once))
        with self._agreed(transport):
            own = self._regions[self.own_rank]
            with transport.phase("split"):
                received = {self.own_rank: message[self.own_rank]}
                for source, buffer in exchanged(transport, lambda to: encode(message[to])):
                    received[source] = decode(buffer, own)
                summed = self._sum(own, [part for _, part in sorted(received.items()) if part is not None])
            with transport.phase("gather"):
                return allgatherv(transport, summed, self.size <= NEAR_RANKS)

    def _sum(self, own: Region, parts: list[Taken]) -> Array:
        """Return the message of the own region's sum, whose rounding errors become part of acc."""
        acc, (a, b, chunks, starts) = self._residual.trial, own
        kernels = kernels_of(acc)
        if self.requantize:
            kernels.chunk_sum(parts, starts, 1, acc[a:b], True)
            return encode(self._take(acc, a, b, PLAIN, chunks))
        mean = DenseVector(empty(b - a, acc.dtype, acc))
        kernels.chunk_sum(parts, starts, self.size, mean.values, False)
        message = SUMS.encode(mean.to_sparse())
        mean.subtract_at(SUMS.decode(message, b - a))
        np.multiply(mean.values, self.size, out=mean.values)
        np.add(acc[a:b], mean.values, out=acc[a:b])
        return message

    def encoded(self, message: list[Taken | None]) -> Array:
        return encode(message[0])

    def combined(self, blocks: Sequence[Array], shares: Sequence[float] | None = None) -> list[Taken]:
        parts = zip((decode(block, self._regions[0]) for block in blocks), shares or [1] * len(blocks), strict=True)
        return [
            (indices, codes, magnitudes if share == 1 else share * magnitudes)
            for (indices, codes, magnitudes), share in parts
        ]

    def add_mean(self, values: Array, reduced: list[Taken], scale: float) -> None:
        kernels_of(values).chunk_sum(reduced, self._regions[0].starts, self.size / scale, values, True)

    def update(self, out: Array, message: list[Taken | None], reduced: Any) -> None:
        kernels = kernels_of(out)
        if not self._by_owners:
            kernels.chunk_sum(reduced, self._regions[0].starts, self.size, out, False)
            return
        for region, buffer in zip(self._regions, reduced, strict=True):
            part = out[region.start : region.stop]
            if self.requantize:
                kernels.chunk_sum([decode(buffer, region)], region.starts, self.size, part, False)
            else:
                write_mean(part, SUMS.decode(buffer, part.size), 1)


def encode(taken: Taken | None) -> Array:
    """Return what was taken as a message: count and first index, magnitudes, Rice table, codes, gaps, 8 zero bytes."""
    assert taken is not None
    indices, codes, magnitudes = taken
    kernels = kernels_of(codes)
    table = kernels.rice_table(indices, RICE_BLOCK)
    coded = int(kernels.rice_offsets(table, indices.size, RICE_BLOCK)[-1])
    head = np.array([indices.size, int(indices[0]) if indices.size else 0], np.uint64).view(np.uint8)
    parts = [asarray_like(head, codes), magnitudes.reshape(-1).view(np.uint8), table.view(np.uint8), codes]
    message = empty(sum(part.size for part in parts) + coded + RICE_PAD, np.uint8, codes)
    start = 0
    for part in parts:
        message[start : start + part.size] = part
        start += part.size
    kernels.rice_encode(indices, table, RICE_BLOCK, message[start:])
    return message


def decode(message: Array, region: Region) -> Taken:
    """Return what was taken of a region.

    Raises:
        CommunicationError: The message is damaged.
    """
    blocks, length = region.starts.size, region.stop - region.start
    least = HEAD + 8 * blocks
    count, first = map(int, message[:HEAD].view(np.uint64)) if message.size >= least else (-1, 0)
    tables = least + 2 * -(-count // RICE_BLOCK)
    start = tables + -(-count // 4)
    indices = None
    if 0 <= count <= region.chunks.counts.sum() and first < max(length, 1) and start + RICE_PAD <= message.size:
        kernels, table = kernels_of(message), message[least:tables].view(np.uint16)
        magnitudes = message[HEAD:least].view(np.float32)
        coded = int(kernels.rice_offsets(table, count, RICE_BLOCK)[-1])
        if start + coded + RICE_PAD == message.size and bool(((magnitudes >= 0) & (magnitudes <= LARGEST)).all()):
            dtype = index_dtype(length)
            indices = kernels.rice_decode(table, message[start:], RICE_BLOCK, first, count, length, dtype)
    if indices is None:
        raise CommunicationError(f"message: {message.size} bytes of largest values of {length} in chunks are damaged")
    return indices, message[tables:start], magnitudes.reshape(blocks, 2)
