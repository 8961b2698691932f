"""Messages among all ranks: small arrays gathered, summed and spread, for any number of ranks."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsecoll.errors import CommunicationError
from sparsecoll.formats import Buffer
from sparsecoll.kernels.memory import asarray_like, empty, to_host
from sparsecoll.transport.base import Transport

DIRECT_RANKS = 3  # up to which P - 1 messages are as many as ceil(log2 P)
NEAR_RANKS = 8  # up to which the delay of ceil(log2 P) successive messages takes longer than P - 1 at once


def _raw(array: NDArray[Any]) -> Buffer:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


@contextlib.contextmanager
def _limited(transport: Transport, size: int) -> Iterator[None]:
    """Context manager: messages that are received have `size` bytes at most."""
    outer, transport.room = transport.room, size
    try:
        yield
    finally:
        transport.room = outer


def _recv(transport: Transport, source: int, size: int) -> Buffer:
    """Return the next message from `source`, which must have `size` bytes."""
    with _limited(transport, size):
        message = transport.recv(source)
    if message.size != size:
        raise CommunicationError(f"message from rank {source}: expected {size} bytes, got {message.size}")
    return message


def allgather(transport: Transport, row: NDArray[Any]) -> NDArray[Any]:
    """Return every rank's `row` (1-D, m items of the same dtype on all ranks) as a (P, m) array in rank order.

    Bruck's algorithm: ceil(log2 P) messages, m(P-1) items received.
    """
    rank, size = transport.rank, transport.size
    gathered = np.empty((size, row.size), row.dtype)
    gathered[0] = row
    have = 1
    while have < size:
        count = min(have, size - have)
        transport.isend((rank - have) % size, _raw(gathered[:count].copy()))
        received = _recv(transport, (rank + have) % size, gathered[:count].nbytes)
        gathered[have : have + count] = received.view(row.dtype).reshape(count, row.size)
        have += count
    return np.concatenate([gathered[size - rank :], gathered[: size - rank]])


def barrier(transport: Transport) -> None:
    """Wait until all ranks have come here."""
    allgather(transport, np.zeros(1, np.uint8))
    transport.waitall()


def node_members(transport: Transport) -> list[list[int]]:
    """Return the ranks on each node, ascending; nodes are ordered by their first rank. The first call is collective."""
    if transport.nodes is None:
        machines, members = transport.machines(), dict[int, list[int]]()
        if machines is None:
            machines = allgather(transport, np.array([transport.node()]))[:, 0].tolist()
        for rank, machine in enumerate(machines):
            members.setdefault(machine, []).append(rank)
        transport.nodes = list(members.values())
    return transport.nodes


def allgatherv(transport: Transport, block: Buffer, direct: bool = False) -> list[Buffer]:
    """Return every rank's `block`, of any size, in rank order.

    Bruck's algorithm (recursive doubling for any P): ceil(log2 P) messages. Each block of another rank is received
    padded to a multiple of 8 bytes, with 8 bytes for its size; up to three ranks exchange blocks as they are, which
    takes as many messages.

    Args:
        transport: the ranks.
        block: this rank's.
        direct: whether every rank sends its block to every other one, without copies, in P - 1 messages; the same on
            all ranks (default: False).
    """
    rank, size = transport.rank, transport.size
    blocks = [block]
    if direct or size <= DIRECT_RANKS:
        for step in range(1, size):
            transport.isend((rank - step) % size, block)
        requests = [transport.irecv((rank + step) % size) for step in range(1, size)]
        blocks += [request.wait() for request in requests]
    while len(blocks) < size:
        have = len(blocks)
        count = min(have, size - have)
        transport.isend((rank - have) % size, joined(blocks[:count]))
        blocks += separated(transport.recv((rank + have) % size), count)
    return blocks[size - rank :] + blocks[: size - rank]


def exchanged(transport: Transport, message: Callable[[int], Buffer]) -> Iterator[tuple[int, Buffer]]:
    """Send message(j) to every other rank j, and yield each other rank and its message in the order of their arrival.

    P - 1 messages, each of which is made when it is sent.
    """
    rank, size = transport.rank, transport.size
    for step in range(1, size):
        to = (rank + step) % size
        transport.isend(to, message(to))
    for step in range(1, size):
        source = (rank - step) % size
        yield source, transport.recv(source)


def joined(blocks: Sequence[Buffer]) -> Buffer:
    """Return one message of buffers: the sizes, then each buffer, padded to a multiple of 8 bytes."""
    sizes = [block.size for block in blocks]
    padded, start = [(size + 7) // 8 * 8 for size in sizes], 8 * len(sizes)
    message = empty(start + sum(padded), np.uint8, blocks[0] if blocks else None)
    message[:start] = asarray_like(np.frombuffer(struct.pack(f"{len(sizes)}q", *sizes), np.uint8), message)
    for block, size, room in zip(blocks, sizes, padded, strict=True):
        end = start + size
        message[start:end] = block
        start += room
        if end < start:
            message[end:start] = 0
    return message


def separated(message: Buffer, count: int) -> list[Buffer]:
    """Return views of the buffers in a message of `joined`; raise CommunicationError unless it has `count` of them."""
    start = 8 * count
    sizes = struct.unpack_from(f"{count}q", to_host(message[:start])) if message.size >= start else (-1,)
    blocks = []
    for size in sizes:
        if size < 0:
            break
        blocks.append(message[start : start + size])
        start += size + -size % 8
    if len(blocks) != count or start != message.size:
        raise CommunicationError(f"message: {message.size} bytes do not hold {count} blocks")
    return blocks


def sum_counts(
    transport: Transport, counts: NDArray[Any], combine: Callable[..., object] = np.add, halves: bool = True
) -> NDArray[Any]:
    """Return the element-wise sum of the ranks' integer arrays, in their own dtype.

    Recursive halving, then recursive doubling (Rabenseifner) among the largest power of two of ranks; each other rank
    first sends its array to a partner, which sends the sum back. Received: at most 3m items in 2 log2 P + 2 messages.
    Short arrays are not halved if m log2 P items are fewer: they take log2 P + 2 messages.

    Args:
        transport: the ranks.
        counts: array of m items, of the same size on all ranks.
        combine: ufunc to use instead of adding, such as `np.bitwise_or`, or a function that is called like one:
            combine(a, b, out=a). The order must not matter.
        halves: whether arrays may be halved (default: True).
    """
    rank, size = transport.rank, transport.size
    core = 1 << (size.bit_length() - 1)
    whole = not halves or counts.size * core.bit_length() < 2 * core
    total = np.zeros(counts.size if whole else -(-counts.size // core) * core, counts.dtype)
    total[: counts.size] = counts
    if rank >= core:
        transport.isend(rank - core, _raw(total))
        return _recv(transport, rank - core, total.nbytes).view(counts.dtype)[: counts.size]
    if rank + core < size:
        combine(total, _recv(transport, rank + core, total.nbytes).view(counts.dtype), out=total)
    steps, own, distance = [], total, core // 2
    while distance and whole:
        transport.isend(rank ^ distance, _raw(total.copy()))
        combine(total, _recv(transport, rank ^ distance, total.nbytes).view(counts.dtype), out=total)
        distance //= 2
    while distance:
        lower, upper = own[: own.size // 2], own[own.size // 2 :]
        own, other = (upper, lower) if rank & distance else (lower, upper)
        transport.isend(rank ^ distance, _raw(other.copy()))
        combine(own, _recv(transport, rank ^ distance, own.nbytes).view(counts.dtype), out=own)
        steps.append((rank ^ distance, own, other))
        distance //= 2
    for partner, own, other in reversed(steps):
        transport.isend(partner, _raw(own.copy()))
        other[:] = _recv(transport, partner, other.nbytes).view(counts.dtype)
    if rank + core < size:
        transport.isend(rank + core, _raw(total.copy()))
    return total[: counts.size]


def disseminate(
    transport: Transport, row: NDArray[Any], combine: Callable[..., object], direct: bool = False
) -> NDArray[Any]:
    """Return the rows of all ranks combined, the same on every rank.

    Dissemination: ceil(log2 P) messages of m items for any P, in which a row may be combined more than once. They go to
    the same ranks as those of `allgather`: a rank in a call that gathers receives a message of another size rather than
    wait for one. `sum_counts` counts every row once.

    Args:
        transport: the ranks.
        row: array of m items, of the same size and dtype on all ranks.
        combine: as in `sum_counts`; repetition must not matter, either, as of a maximum.
        direct: whether every rank sends its row to every other one, in P - 1 messages at once (default: False).
    """
    rank, size, distance = transport.rank, transport.size, 1
    total = row.copy()
    for step in range(1, size) if direct else ():
        transport.isend((rank - step) % size, _raw(row.copy()))
    for step in range(1, size) if direct else ():
        combine(total, _recv(transport, (rank + step) % size, total.nbytes).view(row.dtype), out=total)
    while distance < size and not direct:
        transport.isend((rank - distance) % size, _raw(total.copy()))
        combine(total, _recv(transport, (rank + distance) % size, total.nbytes).view(row.dtype), out=total)
        distance *= 2
    return total


FEW_RANKS = 64  # up to here a row of every rank is gathered, which takes the fewest messages


def sums_and_maxima(transport: Transport, row: Sequence[int]) -> tuple[list[int], list[int], NDArray[np.uint64] | None]:
    """Return the sum and the maximum over the ranks of each of a few unsigned numbers (sums modulo 2^64).

    With few ranks all rows are gathered, and returned as the third item, a (P, m) array. With more, recursive doubling
    combines them in log2 P messages of 2m numbers (and 2 more messages if P is not a power of two).
    """
    mine = np.array(row, np.uint64)
    if transport.size <= FEW_RANKS:
        rows = allgather(transport, mine)
        return rows.sum(axis=0, dtype=np.uint64).tolist(), rows.max(axis=0).tolist(), rows

    def combine(a: NDArray[Any], b: NDArray[Any], out: NDArray[Any]) -> None:
        np.add(a[: mine.size], b[: mine.size], out=out[: mine.size])
        np.maximum(a[mine.size :], b[mine.size :], out=out[mine.size :])

    both = sum_counts(transport, np.tile(mine, 2), combine, halves=False).tolist()
    return both[: mine.size], both[mine.size :], None


def spread(transport: Transport, message: Buffer, root: int = 0) -> Buffer:
    """Return the root's message, of any size, on every rank (binomial tree); the other ranks' is ignored."""
    rank, size = transport.rank, transport.size
    relative, distance = (rank - root) % size, 1
    while distance < size:
        if relative & distance:
            message = transport.recv((rank - distance) % size)
            break
        distance *= 2
    distance //= 2
    while distance:
        if relative + distance < size:
            transport.isend((rank + distance) % size, message)
        distance //= 2
    transport.waitall()
    return message


def broadcast(transport: Transport, array: NDArray[Any], root: int = 0) -> NDArray[Any]:
    """Return a new array with the root's values; shape and dtype must be the same on all ranks (binomial tree)."""
    with _limited(transport, array.nbytes):
        data = spread(transport, _raw(array), root)
    if data.size != array.nbytes:
        raise CommunicationError(f"broadcast on rank {transport.rank}: expected {array.nbytes} bytes, got {data.size}")
    return data.view(array.dtype).reshape(array.shape).copy()
