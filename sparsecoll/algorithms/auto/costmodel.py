"""The algorithms among which `auto` chooses, and a prediction of their seconds."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

from sparsecoll.algorithms.allgather import Allgather
from sparsecoll.algorithms.base import Algorithm
from sparsecoll.algorithms.dense import Dense, is_short
from sparsecoll.algorithms.densestream import DenseStream
from sparsecoll.algorithms.oktopk import OkTopk
from sparsecoll.algorithms.primitives.estimates import OVERHEAD, fill_in, rounds
from sparsecoll.algorithms.primitives.pipeline import chunks
from sparsecoll.algorithms.sparcml import SparCML
from sparsecoll.formats.auto import CODING
from sparsecoll.transport.network import Network

CHOICES: dict[str, Callable[[], Algorithm]] = {
    "dense": Dense,
    "allgather": Allgather,
    "recursive_double": lambda: SparCML(variant="recursive_double"),
    "dynamic": lambda: SparCML(variant="dynamic"),
    "halving": lambda: DenseStream(repartition="even"),
    "oktopk": OkTopk,  # for the top k of the sum; the others form the exact sum
}
ALL = tuple(CHOICES)
EXACT = tuple(name for name in CHOICES if name != "oktopk")

# Sums of data that are in no cache, as in calls, on a core with AVX-512.
# Magnitudes matter, digits do not; together they choose well at the points of docs/benchmarks.md.
CALL = 100e-6  # seconds to encode, decode or sum a message, however short: Python and kernels in cold caches
MERGE = 7e-9  # seconds per input entry of a sum of sparse vectors, at a density of 1 %
PARTS, PASS = 4, 0.4  # MERGE is that of PARTS vectors; PASS: how much longer it takes for each doubling of their number
UNION = 3e-9  # seconds per input entry of a sum of two sparse vectors, at any density
DENSE_MERGE = 1.8e-9  # the same at high density, to which DENSE_MERGE_SPAN is added
DENSE_MERGE_SPAN = 0.2e-9  # seconds per coordinate of such a sum
CONCATENATE = 1.2e-9  # seconds per entry copied into the result
VALUE = 1e-9  # seconds per value of a dense vector: filled from a sparse one, added, and converted to sparse again
CODED = 0.7  # bytes that the coded exponent of a value saves (format packed)
STAGE_CALLS = 2.5  # times CALL: what a message of a chunk costs beyond its entries, in Python and in MPI


@dataclass(frozen=True)
class Message:
    """Predicted size of a message in bytes, and the seconds to encode and to decode it."""

    bytes: float
    encode: float
    decode: float


@dataclass(frozen=True)
class Shape:
    """The call for which a prediction is made: uniform supports are assumed.

    Args:
        n: number of coordinates.
        k: number of entries per rank.
        P: number of ranks.
        value_bytes: bytes of a value on the wire.
        one_node: whether all ranks are on one machine.
        network: the costs of messages.
    """

    n: int
    k: int
    P: int
    value_bytes: int
    one_node: bool
    network: Network

    def entries(self, ranks: float) -> float:
        """Return the expected number of entries in the sum over that many ranks."""
        return fill_in(self.n, self.k, ranks)

    def waits(self, messages: int) -> float:
        """Return the seconds of so many messages in flight at once, without their bytes."""
        return self.network.alpha + (messages - 1) * OVERHEAD if messages else 0.0

    def message(self, entries: float, share: float = 1.0) -> Message:
        """Return a message of entries in a share of the coordinates, in the fastest format."""
        width, span = self.value_bytes, self.n * share
        if entries < 1 or span < 1:
            return Message(32.0, CALL, CALL)
        density = min(entries / span, 1.0)
        bits = 1.0 if density > 0.6 else -1.02 * (math.log2(density) + (1 - density) / density * math.log2(1 - density))
        sizes = {
            "packed": entries * (width + bits / 8 - (CODED if width <= 4 and density <= 0.5 else 0.0)),
            "coo": entries * (width + (4 if self.n <= 2**32 else 8)),
            "bitmap": entries * width + span / 8,
            "dense": span * width,
        }
        found: list[Message] = []
        for name, size in sizes.items():
            c = CODING[name]
            encode = CALL + c.encode * entries + c.encode_span * span
            decode = CALL + c.decode * entries + c.decode_span * span
            found.append(Message(32 + size, encode, decode))
        return min(found, key=lambda m: self.network.beta * m.bytes + m.encode + m.decode)

    def merging(self, entries: float, share: float = 1.0, parts: int = 2) -> float:
        """Return the seconds to sum sparse vectors."""
        if parts <= 2:
            return CALL + UNION * entries
        dense = DENSE_MERGE * entries + DENSE_MERGE_SPAN * self.n * share
        return CALL + min((1 + PASS * math.log2(parts / PARTS)) * MERGE * entries, dense)


@functools.lru_cache(maxsize=1024)
def fastest(
    n: int,
    k: int,
    P: int,
    value_bytes: int,
    one_node: bool,
    network: Network,
    choices: tuple[str, ...] = EXACT,
    early: bool = False,
) -> str:
    """Return the choice that is predicted to be the fastest.

    Args:
        early: whether an allgather sends its entries together with the arguments, which saves it half of the messages.
    """
    times = seconds(Shape(n, k, P, value_bytes, one_node, network))
    if early:
        times["allgather"] -= rounds(P) * network.alpha
    return min(choices, key=lambda name: times[name])


def seconds(shape: Shape) -> dict[str, float]:
    """Return the predicted seconds of each of CHOICES, without the comparison of arguments."""
    return {
        "dense": _dense(shape),
        "allgather": _allgather(shape),
        "recursive_double": _doubling(shape),
        "dynamic": _by_regions(shape, 1, *_split(shape)),
        "halving": _by_regions(shape, rounds(shape.P), *_halving(shape)),
        "oktopk": _oktopk(shape),
    }


def _overlapped(link: float, work: float, stages: int, steps: int = 1) -> float:
    """Return the seconds of messages and of work, which overlap except in the first and the last stage of each step."""
    return max(link, work) + min(link, work) * min(steps / stages, 1)


def _dense(shape: Shape) -> float:
    P, size = shape.P, shape.n * shape.value_bytes
    waits = rounds(P) * (shape.network.alpha + CALL) if is_short(size, P) else shape.waits(P - 1) + (P - 1) * CALL
    entries = CALL + CONCATENATE * (shape.k + shape.entries(P))  # written to all values, and selected from them
    return 2 * waits + 2 * shape.network.beta * size * (P - 1) / P + VALUE * shape.n + entries


def _allgather(shape: Shape) -> float:
    P, k = shape.P, shape.k
    own = shape.message(k)
    stages = chunks(k * (shape.value_bytes + 1), shape.one_node)
    work = own.encode + (P - 1) * own.decode + stages * shape.merging(P * k / stages, 1 / stages, P)
    work += (stages - 1) * (P + 1) * STAGE_CALLS * CALL
    return rounds(P) * shape.network.alpha + _overlapped(shape.network.beta * own.bytes * (P - 1), work, stages)


def _by_regions(shape: Shape, steps: int, waits: float, link: float, work: float) -> float:
    """Return the seconds in which regions are summed, in steps of the given seconds, and their sums go to all ranks."""
    P, total = shape.P, shape.entries(shape.P)
    part = shape.message(total / P, 1 / P)
    stages = chunks(shape.k * (shape.value_bytes + 1) / P, shape.one_node)
    link += shape.network.beta * part.bytes * (P - 1)
    work += part.encode + P * part.decode + CONCATENATE * total + (stages - 1) * 2 * P * STAGE_CALLS * CALL
    return waits + rounds(P) * shape.network.alpha + _overlapped(link, work, stages, steps + 1)


def _split(shape: Shape) -> tuple[float, float, float]:
    """Return the seconds of waits, links and work in which the entries of every region are summed by its owner."""
    P, share = shape.P, 1 / shape.P
    part = shape.message(shape.k / P, share)
    work = (P - 1) * (part.encode + part.decode) + shape.merging(shape.k, share, P)
    return shape.waits(P - 1), shape.network.beta * part.bytes * (P - 1), work


def _halving(shape: Shape) -> tuple[float, float, float]:
    """Return the same by recursive halving."""
    P, link, work, summed = shape.P, 0.0, 0.0, 1
    for step in reversed(range(rounds(P))):
        share = (min(2 ** (step + 1), P) - 2**step) / P
        entries = shape.entries(summed) * share
        message = shape.message(entries, share)
        link += shape.network.beta * message.bytes
        work += message.encode + message.decode + shape.merging(2 * entries, share)
        summed *= 2
    return rounds(P) * shape.network.alpha, link, work


def _doubling(shape: Shape) -> float:
    """Return the seconds of recursive doubling, in which little overlaps: each step waits for the sums of the last."""
    core = 1 << (shape.P.bit_length() - 1)
    sent, work = list[Message](), 0.0
    if core < shape.P:
        sent += [shape.message(shape.entries(ranks)) for ranks in (1, shape.P)]
        work += shape.merging(2 * shape.k)
    for step in range(core.bit_length() - 1):
        entries = shape.entries(2**step * shape.P / core)
        sent.append(shape.message(entries))
        work += shape.merging(2 * entries) + CALL + CONCATENATE * entries
    link = len(sent) * shape.network.alpha + shape.network.beta * sum(message.bytes for message in sent)
    return link + work + sum(message.encode + message.decode for message in sent)


def _oktopk(shape: Shape) -> float:
    """Return the seconds of a call that finds neither thresholds nor boundaries: split and reduce, sizes, gather."""
    P, k, beta = shape.P, shape.k, shape.network.beta
    own, part = shape.message(k), shape.message(k / P, 1 / P)
    split = P * part.encode + (P - 1) * part.decode + shape.merging(k, 1 / P, P)
    gather = part.encode + P * part.decode + CONCATENATE * k
    moved = beta * own.bytes * (P - 1) / P
    waits = shape.waits(P - 1) + 2 * rounds(P) * shape.network.alpha
    stages = chunks(k * (shape.value_bytes + 1) / P, shape.one_node)
    calls = (stages - 1) * 2 * P * STAGE_CALLS * CALL
    return waits + _overlapped(moved, split + calls, stages) + _overlapped(moved, gather + calls, stages)
