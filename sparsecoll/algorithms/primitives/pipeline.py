"""Messages divided into chunks, so that one chunk is summed while the next ones are in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import chain, pairwise, repeat
from typing import Any, TypeVar

import numpy as np

from sparsecoll.formats import Buffer
from sparsecoll.transport.base import Transport
from sparsecoll.transport.channel import Channel, VectorRequest
from sparsecoll.vector import RowSparse, SparseVector

S = TypeVar("S", SparseVector, RowSparse)
Program = Generator[list[Any], Any, SparseVector]  # sends, yields its requests, and is sent what has arrived

CHUNK_BYTES = 1 << 18  # smallest chunk
MAX_CHUNKS = 16  # per message
STAGES_AHEAD = 2  # number of stages in flight while the vectors of one are summed


def chunks(size: float, one_node: bool) -> int:
    """Return the number of chunks into which to divide a message of about `size` bytes.

    It is 1 between ranks on one machine, where the processors that sum also copy the messages.
    """
    return 1 if one_node else int(min(max(size // CHUNK_BYTES, 1), MAX_CHUNKS))


def chunks_of(channel: Channel, dtype: np.dtype[Any], entries: float) -> int:
    """Return the number of chunks of a message of about so many entries, or rows.

    It is 1 for lossy formats, which round it whole.
    """
    whole = channel.size == 1 or channel.format.lossy
    size = entries * (dtype.itemsize * (channel.width or 1) + 1)
    return 1 if whole else chunks(size, channel.transport.one_node)


def run(transport: Transport, stages: Iterable[list[VectorRequest]]) -> Iterator[list[SparseVector]]:
    """Yield the vectors received in each stage, while the messages of later stages are in flight."""
    in_flight: deque[list[VectorRequest]] = deque()
    for requests in stages:
        in_flight.append(requests)
        transport.progress()
        if len(in_flight) > STAGES_AHEAD:
            yield [request.wait() for request in in_flight.popleft()]
    for requests in in_flight:
        yield [request.wait() for request in requests]
        transport.progress()


def allgather(channel: Channel, parts: Iterable[S], rounded: bool = False) -> Iterator[list[S]]:
    """Yield, for each of `parts`, those of all ranks in rank order, while the next ones are in flight.

    Args:
        channel: the call's.
        parts: of this rank, as many as on the others.
        rounded: whether they are what a receiver decodes; the own ones are then not decoded (default: False).
    """
    rank, size = channel.rank, channel.size
    own: deque[tuple[S, Buffer]] = deque()

    def stages() -> Iterator[list[VectorRequest]]:
        for part in parts:
            own.append((part, channel.encode(part)))
            for step in range(1, size):
                channel.transport.isend((rank + step) % size, own[-1][1])
            yield [channel.irecv((rank - step) % size) for step in range(1, size)]

    for received in run(channel.transport, stages()):
        part, message = own.popleft()
        vectors: list[Any] = [part if rounded else channel.decode(message)]  # of rank, rank - 1, ...
        vectors += received
        yield [vectors[(rank - source) % size] for source in range(size)]


def interleaved(transport: Transport, programs: Iterable[Program]) -> Iterator[SparseVector]:
    """Yield what programs return, in their order: while one waits for a message, the next ones compute and send.

    All ranks run the same programs, each of which yields its requests the same number of times.
    """
    waiting: list[tuple[Program, list[Any] | None]] = []  # the last one first
    for program in chain(programs, repeat(None)):
        if program is None and not waiting:
            return
        turns, waiting = [*([] if program is None else [(program, None)]), *waiting], []
        for one, requests in turns:
            try:
                waiting.append((one, one.send(requests and [request.wait() for request in requests])))
            except StopIteration as end:
                yield end.value
            transport.progress()


def regions(
    channel: Channel, x: SparseVector, edges: list[int], k: int, reduce_scatter: Callable[[SparseVector], Program]
) -> list[list[SparseVector]]:
    """Return, for each chunk, the sums of its part of each region, by rank, as every rank receives them.

    Args:
        x: this rank's entries.
        edges: P + 1 boundaries of the regions.
        k: about the number of entries of each rank, the same on all ranks.
        reduce_scatter: program that returns this rank's region of the sum of vectors.
    """
    count = chunks_of(channel, x.dtype, k / channel.size)
    pieces = x.split([*(a + (b - a) * j // count for a, b in pairwise(edges) for j in range(count)), edges[-1]])
    parts = [SparseVector.concatenate(pieces[j::count]) for j in range(count)] if count > 1 else [x]

    def sums() -> Iterator[SparseVector]:
        found = interleaved(channel.transport, map(reduce_scatter, parts))
        for _ in parts:
            with channel.phase("split"):
                region = next(found)
            yield region

    with channel.phase("gather"):
        return [channel.allgather(one) for one in sums()] if count == 1 else list(allgather(channel, sums()))
