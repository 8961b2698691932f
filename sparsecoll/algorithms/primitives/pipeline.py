"""Messages divided into chunks, so that one chunk is summed while the next ones are in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from sparsecoll.formats import Buffer
from sparsecoll.transport.base import Transport
from sparsecoll.transport.channel import Channel, VectorRequest
from sparsecoll.vector import SparseVector

CHUNK_BYTES = 1 << 18  # smallest chunk
MAX_CHUNKS = 16  # per message
STAGES_AHEAD = 2  # number of stages in flight while the vectors of one are summed


def chunks(size: float, one_node: bool) -> int:
    """Return the number of chunks into which to divide a message of about `size` bytes.

    It is 1 between ranks on one machine, where the processors that sum also copy the messages.
    """
    return 1 if one_node else int(min(max(size // CHUNK_BYTES, 1), MAX_CHUNKS))


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


def allgather(channel: Channel, parts: Iterable[SparseVector]) -> Iterator[list[SparseVector]]:
    """Yield, for each of `parts`, those of all ranks in rank order, while the next ones are in flight."""
    rank, size = channel.rank, channel.size
    own: deque[Buffer] = deque()

    def stages() -> Iterator[list[VectorRequest]]:
        for part in parts:
            own.append(channel.encode(part))
            for step in range(1, size):
                channel.transport.isend((rank + step) % size, own[-1])
            yield [channel.irecv((rank - step) % size) for step in range(1, size)]

    for arrived in run(channel.transport, stages()):
        vectors = [channel.decode(own.popleft()), *arrived]  # those of rank, rank - 1, ...
        yield [vectors[(rank - source) % size] for source in range(size)]
