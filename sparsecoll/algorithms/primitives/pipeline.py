"""Messages divided into chunks, so that one is summed while the next ones travel."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from sparsecoll.formats import Buffer
from sparsecoll.transport.base import Transport
from sparsecoll.transport.channel import Channel, VectorRequest
from sparsecoll.vector import SparseVector

CHUNK_BYTES, MAX_CHUNKS = 1 << 18, 16  # bytes that a piece has at least
AHEAD = 2  # stages in flight beside the one that is worked on


def chunks(size: float, one_node: bool) -> int:
    """Return the number of chunks into which to divide a message of about `size` bytes.

    It is 1 between ranks on one machine, where the processors that sum also copy the messages.
    """
    return 1 if one_node else int(min(max(size // CHUNK_BYTES, 1), MAX_CHUNKS))


def run(transport: Transport, stages: Iterable[list[VectorRequest]]) -> Iterator[list[SparseVector]]:
    """Yield the vectors received in each stage, while the messages of later stages are in flight.

    Args:
        transport: the transport of the messages.
        stages: iterator that, in each step, sends the messages of the next stage and yields its receives.
    """
    travelling: deque[list[VectorRequest]] = deque()
    for requests in stages:
        travelling.append(requests)
        transport.progress()
        if len(travelling) > AHEAD:
            yield [request.wait() for request in travelling.popleft()]
    for requests in travelling:
        yield [request.wait() for request in requests]
        transport.progress()


def allgather(channel: Channel, parts: Iterable[SparseVector]) -> Iterator[list[SparseVector]]:
    """For each of `parts` those of all ranks, in rank order, while the next ones travel; as many on every rank."""
    rank, size = channel.rank, channel.size
    own: deque[Buffer] = deque()

    def stages() -> Iterator[list[VectorRequest]]:
        for part in parts:
            own.append(channel.encode(part))
            for step in range(1, size):
                channel.transport.isend((rank + step) % size, own[-1])
            yield [channel.irecv((rank - step) % size) for step in range(1, size)]

    for arrived in run(channel.transport, stages()):
        vectors = [channel.decode(own.popleft()), *arrived]  # of rank, rank - 1, ...
        yield [vectors[(rank - source) % size] for source in range(size)]
