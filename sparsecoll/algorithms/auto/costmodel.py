"""The algorithms among which `auto` chooses, and their seconds as predicted from costs of the communicator."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from sparsecoll.algorithms.allgather import Allgather
from sparsecoll.algorithms.base import Algorithm
from sparsecoll.algorithms.dense import Dense, is_short
from sparsecoll.algorithms.densestream import DenseStream
from sparsecoll.algorithms.oktopk import OkTopk
from sparsecoll.algorithms.primitives.estimates import fill_in, oktopk_levels, rounds
from sparsecoll.algorithms.primitives.pipeline import chunks
from sparsecoll.algorithms.sparcml import SparCML
from sparsecoll.formats.costs import CODING, PACKED
from sparsecoll.transport.network import Tuning

CHOICES: dict[str, Callable[[], Algorithm]] = {
    "dense": Dense,
    "native": lambda: Dense(native=True),
    "allgather": Allgather,
    "recursive_double": lambda: SparCML(variant="recursive_double"),
    "dynamic": lambda: SparCML(variant="dynamic"),
    "halving": lambda: DenseStream(repartition="even"),
    "oktopk": OkTopk,  # for the top k of the sum; the others form the exact sum
}

# On a core with AVX-512, as perf/costs.py measures them; magnitudes matter, digits do not.
MERGE = 5.5e-9  # seconds per input entry of a sum of PARTS sparse vectors, at a density of 1 %
PARTS, PASS = 4, 0.4  # PASS: how much longer it takes for each doubling of their number
UNION = 2.2e-9  # seconds per input entry of a sum of two sparse vectors, at any density
DENSE_MERGE = 1.35e-9  # the same at high density, to which DENSE_MERGE_SPAN is added
DENSE_MERGE_SPAN = 0.14e-9  # seconds per coordinate of such a sum
CONCATENATE = 1.2e-9  # seconds per entry copied into the result, from and to memory
NATIVE_VALUES, NATIVE_ENTRIES = 0.5, 0.6  # shares of the costs of values and entries that remain where MPI adds
COLLECT = 0.6e-9  # the same of the sum of a chunk, which is still in a cache
CACHED_ENTRIES, CACHED_VALUES = 1 << 17, 1 << 18  # what is summed at once within a cache, or new memory soon at hand
UNCACHED_SUM, UNCACHED_VALUE = 1.3, 1.8  # how many times as long each takes if there are UNCACHED times as many
UNCACHED = 64
ONE_PART = 1e-9  # seconds per entry of a vector that becomes the first partial sum
STAGE_CALLS = 8  # times `Tuning.call`: what a message of a chunk costs beyond its entries, in Python and in MPI
SLOWEST = 3.0  # more is what a brief measurement shows, not the speed of copies


@dataclass(frozen=True)
class Message:
    """Predicted size of a message in bytes, and the seconds to encode and to decode it."""

    bytes: float
    encode: float
    decode: float


@dataclass(frozen=True)
class Shape:
    """The call for which a prediction is made.

    Args:
        n: number of coordinates.
        k: number of entries per rank.
        P: number of ranks.
        value_bytes: bytes of a value on the wire.
        effective_length: number of coordinates in which uniform supports would overlap as these do: n for uniform
            supports, k if all ranks have the same ones.
        skew: number of entries in the fullest of P even regions, divided by the mean.
        one_node: whether all ranks are on one machine.
        native: whether MPI's own allreduce can sum these values.
    """

    n: int
    k: int
    P: int
    value_bytes: int
    effective_length: float
    skew: float = 1.0
    one_node: bool = False
    native: bool = False

    def entries(self, ranks: float) -> float:
        """Return the expected number of entries in the sum over that many ranks."""
        return fill_in(max(int(self.effective_length), 1), self.k, ranks)

    def message(self, t: Tuning, entries: float, share: float = 1.0, sparse: bool = False) -> Message:
        """Return a message of entries in a share of the coordinates, in the fastest format (`sparse`: not dense)."""
        width, speed = self.value_bytes, _code_speed(t)
        span = self.n * share
        if entries < 1 or span < 1:
            return Message(32.0, t.call, t.call)
        density = min(entries / span, 1.0)
        bits = 1.0 if density > 0.6 else -1.02 * (math.log2(density) + (1 - density) / density * math.log2(1 - density))
        sizes = {"packed": entries * (width + bits / 8), "coo": entries * (width + (4 if self.n <= 2**32 else 8))}
        sizes["bitmap"] = entries * width + span / 8
        if not sparse:
            sizes["dense"] = span * width
        found: list[Message] = []
        for name, size in sizes.items():
            c = CODING[name]
            encode = t.call + speed * (c.encode * entries + c.encode_span * span)
            decode = t.call + speed * (c.decode * entries + c.decode_span * span)
            found.append(Message(32 + size, encode, decode))
        return min(found, key=lambda m: t.beta * m.bytes + m.encode + m.decode)

    def merging(self, t: Tuning, entries: float, share: float = 1.0, parts: int = 2) -> float:
        """Return the seconds to sum sparse vectors.

        Args:
            t: the costs.
            entries: number of entries of all of them.
            share: of the coordinates in which they are.
            parts: number of vectors.
        """
        speed = t.merge / MERGE * (1 + (UNCACHED_SUM - 1) * _uncached(entries, CACHED_ENTRIES))
        if parts <= 2:
            return t.call + speed * UNION * entries
        dense = DENSE_MERGE * entries + DENSE_MERGE_SPAN * self.n * share
        passes = 1 + PASS * math.log2(parts / PARTS)
        return t.call + speed * min(passes * MERGE * entries, dense)


def _uncached(size: float, cached: int) -> float:
    """Return 0 for what fits a cache, 1 for UNCACHED times as much, and in between by the logarithm."""
    return min(max(math.log(max(size, 1) / cached, UNCACHED), 0), 1)


def _overlapped(size: float, work: float, stages: int, t: Tuning) -> float:
    """Return the seconds of messages of `size` bytes and of work, which overlap except in the first and the last stage.

    The processor copies messages itself: only what is left of their time overlaps with work.
    """
    copies, waits = t.copy * size, (t.beta - t.copy) * size
    return copies + max(waits, work) + min(waits, work) / stages


@functools.lru_cache(maxsize=256)
def seconds(shape: Shape, t: Tuning) -> Mapping[str, float]:
    """Return the predicted seconds of each of CHOICES."""
    P, n, k = shape.P, shape.n, shape.k
    entries = CONCATENATE * (k + shape.entries(P)) * _code_speed(t)  # written to all values, and selected from them
    chunk = n * shape.value_bytes / P
    values = n * t.dense * (1 + (UNCACHED_VALUE - 1) * _uncached(n, CACHED_VALUES))
    dense = 2 * _dense_waits(shape, t) + 2 * t.beta * chunk * (P - 1) + values + entries
    calls = {
        "allgather": _allgather(shape, t),
        "dense": dense,
        "native": t.native_seconds(n * shape.value_bytes) + NATIVE_VALUES * values + NATIVE_ENTRIES * entries,
        "recursive_double": _doubling(shape, t),
        "dynamic": _split(shape, t, k * shape.skew) + _gathered(shape, t),
        "halving": _halving(shape, t) + _gathered(shape, t),
        "oktopk": _oktopk(shape, t),
    }
    if not shape.native or P == 1:
        del calls["native"]
    return MappingProxyType(
        {name: t.corrected(name, t.fixed + agreement(P, t) + value) for name, value in calls.items()}
    )


def agreement(P: int, t: Tuning) -> float:
    """Return the seconds in which the ranks compare their arguments and numbers of entries."""
    return rounds(P) * t.alpha + 2 * t.call


def _burst(shape: Shape, t: Tuning) -> float:
    """Return the seconds of P - 1 messages in flight at once."""
    return t.alpha + max(shape.P - 2, 0) * t.overhead if shape.P > 1 else 0.0


def _dense_waits(shape: Shape, t: Tuning) -> float:
    """Return the seconds of the messages of one step, without their bytes."""
    if is_short(shape.n * shape.value_bytes, shape.P):
        return rounds(shape.P) * (t.alpha + t.call)
    return _burst(shape, t) + (shape.P - 1) * t.call


def _allgather(shape: Shape, t: Tuning) -> float:
    P, k = shape.P, shape.k
    own = shape.message(t, k)
    stages = chunks(k * (shape.value_bytes + 1), shape.one_node)
    work = own.encode + (P - 1) * own.decode + stages * shape.merging(t, P * k / stages, 1 / stages, P)
    if stages > 1:
        work += (stages - 1) * (P + 1) * STAGE_CALLS * t.call + COLLECT * shape.entries(P) * _code_speed(t)
    return rounds(P) * t.alpha + _overlapped(own.bytes * (P - 1), work, stages, t)


def _split(shape: Shape, t: Tuning, entries: float) -> float:
    """Return the seconds in which the entries of every region go to its owner and are summed there."""
    P, share = shape.P, 1 / shape.P
    part = shape.message(t, entries / P, share)
    work = (P - 1) * (part.encode + part.decode) + shape.merging(t, entries, share, P)
    return _burst(shape, t) + t.beta * part.bytes * (P - 1) + work


def _gathered(shape: Shape, t: Tuning) -> float:
    """Return the seconds in which the summed regions go to all ranks."""
    P, total = shape.P, shape.entries(shape.P)
    part = shape.message(t, total / P, 1 / P)
    fullest = min(shape.skew * part.bytes, shape.message(t, shape.n / P, 1 / P).bytes)
    work = part.encode + P * part.decode + CONCATENATE * total * _code_speed(t)
    return rounds(P) * t.alpha + t.beta * fullest * (P - 1) + work


def _code_speed(t: Tuning) -> float:
    """Return the factor by which encoding and decoding take longer here than the constants say."""
    return min(t.code / t.sharing / PACKED, SLOWEST) * t.sharing


def _oktopk(shape: Shape, t: Tuning) -> float:
    """Return the seconds of a call that finds neither thresholds nor boundaries: split and reduce, sizes, gather."""
    P, k = shape.P, shape.k
    if oktopk_levels(shape.n, k, P, t) == 2:
        return _oktopk_on_grid(shape, t)
    own, part = shape.message(t, k), shape.message(t, k / P, 1 / P)
    split = P * part.encode + (P - 1) * part.decode + shape.merging(t, k, 1 / P, P)
    gather = part.encode + P * part.decode + CONCATENATE * k * _code_speed(t)
    moved = own.bytes * (P - 1) / P
    waits = _burst(shape, t) + 2 * rounds(P) * t.alpha
    stages = chunks(k * (shape.value_bytes + 1) / P, shape.one_node)
    calls = (stages - 1) * 2 * P * STAGE_CALLS * t.call
    return waits + _overlapped(moved, split + calls, stages, t) + _overlapped(moved, gather + calls, stages, t)


def _oktopk_on_grid(shape: Shape, t: Tuning) -> float:
    """Return the same for two levels: columns and rows of sqrt(P) ranks."""
    width, k = math.sqrt(shape.P), shape.k
    own, part = shape.message(t, k), shape.message(t, k / width, 1 / width)
    work = 4 * width * (part.encode + part.decode) + 2 * shape.merging(t, k, 1 / width)
    waits = 2 * (t.alpha + width * t.overhead) + 2 * rounds(shape.P) * t.alpha
    return waits + 3 * t.beta * own.bytes + work + 2 * CONCATENATE * k * _code_speed(t)


def _doubling(shape: Shape, t: Tuning) -> float:
    core = 1 << (shape.P.bit_length() - 1)
    seconds = ONE_PART * _code_speed(t) * shape.k
    if core < shape.P:
        first, last = (shape.message(t, shape.entries(ranks), sparse=True) for ranks in (1, shape.P))
        ends = t.beta * (first.bytes + last.bytes) + first.encode + first.decode + last.encode + last.decode
        seconds += 2 * t.alpha + ends + shape.merging(t, 2 * shape.k)
    for step in range(core.bit_length() - 1):
        entries = shape.entries(2**step * shape.P / core)
        sent = shape.message(t, entries, sparse=True)
        seconds += t.alpha + t.beta * sent.bytes + sent.encode + sent.decode
        seconds += shape.merging(t, 2 * entries)
    return seconds


def _halving(shape: Shape, t: Tuning) -> float:
    P, seconds, summed = shape.P, ONE_PART * _code_speed(t) * shape.k, 1
    for step in reversed(range(rounds(P))):
        regions = min(2 ** (step + 1), P) - 2**step
        share = regions / P
        entries = shape.entries(summed) * share * min(shape.skew, 1 / share)
        sent = shape.message(t, entries, share)
        seconds += t.alpha + t.beta * sent.bytes + sent.encode + sent.decode
        seconds += shape.merging(t, 2 * entries, share)
        summed *= 2
    return seconds


def effective_length(n: int, k: int, P: int, total: int) -> float:
    """Return the length at which uniform supports of k entries on each of P ranks have a sum of `total` entries."""
    low, high = float(max(k, 1)), float(max(n, k, 1))
    if total >= fill_in(int(high), k, P):
        return high
    for _ in range(25):  # bisection of the logarithm
        middle = math.sqrt(low * high)
        low, high = (middle, high) if fill_in(int(middle), k, P) < total else (low, middle)
    return high
