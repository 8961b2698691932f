"""The alpha-beta network and each algorithm's closed-form volume, citing paper and equation.

Volumes are words (4 bytes) received by a rank, own part excluded, for COO with float32 values and 32-bit indices.
"""

from __future__ import annotations

import bisect
import functools
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType


@dataclass(frozen=True)
class Network:
    """A message of m bytes costs alpha + beta * m seconds; a rank sends and receives one message at a time.

    Args:
        alpha: seconds per message.
        beta: seconds per byte (8e-9 for 1 Gb/s).
    """

    alpha: float = 50e-6
    beta: float = 8e-9

    def __post_init__(self) -> None:
        if self.alpha < 0 or self.beta < 0:
            raise ValueError(f"Network: expected alpha >= 0 and beta >= 0, got {self.alpha} and {self.beta}")


@dataclass(frozen=True)
class Costs:
    """What computation costs on the simulator: seconds per amount of each kind of work (see `trace`), and per piece.

    Args:
        select: value looked at.
        encode, decode, merge: entry.
        crowded, window: entry and coordinate, where a sum costs less so (many entries in few coordinates).
        dense: value of a dense vector.
        call: piece of work, however small.
    """

    select: float = 0.0
    encode: float = 0.0
    decode: float = 0.0
    merge: float = 0.0
    crowded: float = 0.0
    window: float = 0.0
    dense: float = 0.0
    call: float = 0.0

    def seconds(self, kind: str, amount: int, span: int = 0) -> float:
        """Of one piece of work on so many items, spread over so many coordinates."""
        if kind == "wait":
            return 0.0
        seconds = amount * float(getattr(self, kind))
        if kind == "merge" and self.window:
            seconds = min(seconds, amount * self.crowded + span * self.window)
        return self.call + seconds

    def tuning(self, network: Network) -> Tuning:
        """What `sparsecoll.tune` would measure on this network with these costs.

        Further messages, which the simulator takes for free, cost a hundredth here: 2P of them are no good idea.
        """
        code = self.encode + self.decode
        return Tuning(network.alpha, network.alpha / 100, network.beta, self.call, self.merge, code, 3 * self.dense)


def dense_words(n: int, P: int) -> float:
    """2n(P-1)/P: reduce-scatter and allgather (Ok-Topk, Table 1, Dense)."""
    return 2 * n * (P - 1) / P


def allgather_words(k: int, P: int) -> float:
    """2k(P-1): every rank receives every other rank's k entries (Ok-Topk, Table 1, TopkA)."""
    return 2 * k * (P - 1)


def oktopk_words(k: int, P: int) -> tuple[float, float]:
    """(lower, upper) = (2k(P-1)/P, 6k(P-1)/P) (Ok-Topk, Theorem 3.1 and equation (3))."""
    return 2 * k * (P - 1) / P, 6 * k * (P - 1) / P


def fill_in(n: int, k: float, ranks: float) -> float:
    """Entries of the sum of `ranks` uniform, independent supports of k of n: n(1 - (1 - k/n)^ranks)."""
    if n == 0:
        return 0.0
    return n * -math.expm1(ranks * math.log1p(-min(k / n, 1 - 1e-12)))


def rounds(P: int) -> int:
    """ceil(log2 P)."""
    return (P - 1).bit_length()


def gtopk_words(k: int, P: int) -> float:
    """4k log2 P (Ok-Topk, Table 1, gTopk): 2k a level into and out of the root."""
    return 4 * k * rounds(P)


def sparcml_words(n: int, k: int, P: int) -> tuple[float, float]:
    """(lower, upper) of split and dynamic gather: (4k(P-1)/P, (2k + n)(P-1)/P) (Ok-Topk, Table 1, TopkDSA)."""
    return min(4 * k, 2 * k + n) * (P - 1) / P, (2 * k + n) * (P - 1) / P


def densestream_words(k: int, P: int) -> tuple[float, float]:
    """(lower, upper) of equation (6) of DenseStream, in words of COO (2 an entry): 2 * 2k(P-1)/P and more."""
    return 4 * k * (P - 1) / P, 2 * k * ((math.log2(P) / 2 + 1) * P - 1)


def spardl_words(k: int, P: int, teams: int = 1) -> float:
    """Two steps of T - 1 blocks of k/T entries, T = P/d, and log2 d or d - 1 blocks between d teams, which divides P.

    4k(P-1)/P for one team. Derived in docs/algorithms.md.
    """
    width, between = P // teams, teams - 1 if teams & (teams - 1) else rounds(teams)
    return 2 * k / width * (2 * (width - 1) + between)


def sparcml_seconds(n: int, k: int, P: int, network: Network) -> dict[str, float]:
    """Seconds of each variant of `sparcml` at uniform fill-in, COO with float32: alpha per message, beta per byte."""
    log, share = rounds(P), (P - 1) / P
    doubling = sum(fill_in(n, k, 2**t) for t in range(log))
    split = (P - 1 + log) * network.alpha + network.beta * 8 * k * share
    return {
        "recursive_double": log * network.alpha + network.beta * 8 * doubling,
        "split_allgather": split + network.beta * 8 * fill_in(n, k, P) * share,
        "dynamic": split + network.beta * min(8 * fill_in(n, k, P), 4 * n) * share,
    }


@dataclass(frozen=True)
class Tuning:
    """What `sparsecoll.tune` measures on a communicator: seconds per ...

    Args:
        alpha: message that is waited for.
        overhead: further message sent and received meanwhile.
        beta: byte, while every rank sends.
        call: encoding, decoding or summing, however few the entries.
        merge: entry that goes into a sum of sparse vectors, at 1 % density.
        code: entry encoded and decoded in the format packed.
        dense: value of a dense vector that is made from a sparse one, added to, and made sparse again.
        calls: for each algorithm whole calls of growing size, each as (seconds by the figures above, seconds measured).
    """

    alpha: float = 50e-6
    overhead: float = 1e-6
    beta: float = 8e-9
    call: float = 10e-6
    merge: float = 5e-9
    code: float = 5e-9
    dense: float = 2e-9
    calls: dict[str, list[tuple[float, float]]] = field(default_factory=dict, hash=False)

    def corrected(self, name: str, seconds: float) -> float:
        """A prediction, times measured over predicted of the calls of about that length (log-linear between two)."""
        calls = self.calls.get(name)
        if not calls:
            return seconds
        at = min(max(seconds, calls[0][0]), calls[-1][0])
        after = bisect.bisect_left(calls, (at, 0.0))
        (lower, low), (upper, high) = calls[max(after - 1, 0)], calls[after]
        share = math.log(at / lower) / math.log(upper / lower) if upper > lower else 0.0
        return seconds * math.exp((1 - share) * math.log(low / lower) + share * math.log(high / upper))

    def save(self, path: str | Path) -> None:
        """Write them as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Tuning:
        """Read what `save` wrote.

        Raises:
            OSError, ValueError: no such file; not these numbers.
        """
        try:
            saved = json.loads(Path(path).read_text())
            calls = {name: [(float(a), float(b)) for a, b in rows] for name, rows in saved.pop("calls", {}).items()}
            missing = {f.name for f in fields(cls)} - {"calls"} - set(saved)
            if missing:
                raise ValueError(f"missing: {', '.join(sorted(missing))}")
            return cls(**{name: float(value) for name, value in saved.items()}, calls=calls)
        except (TypeError, AttributeError, ValueError) as error:
            names = ", ".join(f.name for f in fields(cls))
            raise ValueError(f"{path}: expected the numbers {names} ({error})") from None


# What `auto` assumes until a call is worth measuring for; magnitudes matter, digits do not.
IN_ONE_NODE = Tuning(20e-6, 5e-6, 3e-10, 20e-6, 6e-9, 6e-9, 6e-10)
BETWEEN_NODES = Tuning(50e-6, 5e-6, 1e-9, 20e-6, 6e-9, 6e-9, 6e-10)  # 10 Gb/s


@dataclass(frozen=True)
class Coding:
    """Seconds to encode and to decode, per entry and per coordinate spanned, where packed takes PACKED an entry."""

    encode: float
    decode: float
    encode_span: float = 0.0
    decode_span: float = 0.0


PACKED = 4.8e-9
CODING = {  # on a core with AVX-512; magnitudes matter, digits do not
    "coo": Coding(0.3e-9, 0.15e-9),
    "dense": Coding(2.9e-9, 0.6e-9, 0.17e-9, 0.16e-9),
    "bitmap": Coding(1.0e-9, 0.9e-9, 0.0, 0.08e-9),
    "packed": Coding(3.0e-9, 1.8e-9),
    "densestream": Coding(10e-9, 10e-9),
}
MERGE = 5.5e-9  # an entry at 1 % density; a crowded sum takes CROWDED an entry and WINDOW a coordinate
CROWDED, WINDOW = 1.35e-9, 0.14e-9
FRONT = 1.6  # calls that the front door takes: arguments and counters
COPY = 1.0e-9  # an entry copied into the whole
PIECE, MOST_PIECES = 1 << 18, 16  # bytes that a piece has at least


def pieces(size: float, one_node: bool) -> int:
    """How many pieces to cut a message of about `size` bytes into, which are summed while others travel; 1: none.

    Between ranks on one machine it is not worth while: the processors that sum also carry the messages.
    """
    return 1 if one_node else int(min(max(size // PIECE, 1), MOST_PIECES))


SHORT = 1 << 15  # bytes of a chunk below which the dense sum goes in few messages rather than in many at once


def short(size: float, P: int) -> bool:
    """Whether a dense vector of `size` bytes is summed in 2 ceil(log2 P) messages."""
    return P > 3 and size < SHORT * P


@dataclass(frozen=True)
class Message:
    """So many entries over so many coordinates in some format: bytes, and seconds to encode and to decode them."""

    bytes: float
    encode: float
    decode: float


@dataclass(frozen=True)
class Shape:
    """What a prediction is made for: n coordinates, k entries a rank, P ranks, bytes of a value on the wire.

    Args:
        reach: coordinates among which the supports look uniform: n if they are, k if all ranks have the same ones.
        skew: entries of the fullest of P even regions over their mean.
        one_node: whether all ranks are on one machine.
    """

    n: int
    k: int
    P: int
    value_bytes: int
    reach: float
    skew: float = 1.0
    one_node: bool = False

    def entries(self, ranks: float) -> float:
        """Expected entries of the sum of that many ranks."""
        return fill_in(max(int(self.reach), 1), self.k, ranks)

    def message(self, t: Tuning, entries: float, share: float = 1.0, sparse: bool = False) -> Message:
        """Entries over a share of the coordinates in the format with the least time (`sparse`: COO or packed)."""
        width, speed = self.value_bytes, t.code / PACKED
        span = self.n * share
        if entries < 1 or span < 1:
            return Message(32.0, t.call, t.call)
        density = min(entries / span, 1.0)
        bits = 1.0 if density > 0.6 else -1.02 * (math.log2(density) + (1 - density) / density * math.log2(1 - density))
        sizes = {"packed": entries * (width + bits / 8), "coo": entries * (width + (4 if self.n <= 2**32 else 8))}
        if not sparse:
            sizes |= {"bitmap": entries * width + span / 8, "dense": span * width}
        found: list[Message] = []
        for name, size in sizes.items():
            c = CODING[name]
            encode = t.call + speed * (c.encode * entries + c.encode_span * span)
            decode = t.call + speed * (c.decode * entries + c.decode_span * span)
            found.append(Message(32 + size, encode, decode))
        return min(found, key=lambda m: t.beta * m.bytes + m.encode + m.decode)

    def merging(self, t: Tuning, entries: float, share: float = 1.0) -> float:
        """Seconds to sum sparse vectors that hold so many entries together, over a share of the coordinates."""
        return t.call + t.merge / MERGE * min(MERGE * entries, CROWDED * entries + WINDOW * self.n * share)


def _overlapped(network: float, work: float, stages: int) -> float:
    """Seconds for both, which go on at the same time but for the first and the last of the stages."""
    return max(network, work) + min(network, work) / stages


@functools.lru_cache(maxsize=256)
def exact_seconds(shape: Shape, t: Tuning) -> Mapping[str, float]:
    """Predicted seconds of the ways to an exact sum, by name: those that `auto` chooses among."""
    P, n, k = shape.P, shape.n, shape.k
    pattern = 2 * rounds(P) * t.alpha + t.beta * n / 4 * (P - 1) / P  # a bit a coordinate, for sparse vectors
    seconds = {
        "allgather": _allgather(shape, t),
        "dense": 2 * _dense_waits(shape, t) + 2 * t.beta * n * shape.value_bytes * (P - 1) / P + n * t.dense + pattern,
        "recursive_double": _doubling(shape, t),
        "dynamic": _split(shape, t, k * shape.skew) + _gathered(shape, t),
        "halving": _halving(shape, t) + _gathered(shape, t),
    }
    agreed = {name: _agreement(shape, t) + value for name, value in seconds.items()}
    return MappingProxyType({name: t.corrected(name, value) + FRONT * t.call for name, value in agreed.items()})


def _agreement(shape: Shape, t: Tuning) -> float:
    return rounds(shape.P) * t.alpha + 2 * t.call


def _burst(shape: Shape, t: Tuning) -> float:
    """P - 1 messages at once."""
    return t.alpha + max(shape.P - 2, 0) * t.overhead if shape.P > 1 else 0.0


def _dense_waits(shape: Shape, t: Tuning) -> float:
    return rounds(shape.P) * t.alpha if short(shape.n * shape.value_bytes, shape.P) else _burst(shape, t)


def _allgather(shape: Shape, t: Tuning) -> float:
    P, k = shape.P, shape.k
    own = shape.message(t, k)
    stages = pieces(k * (shape.value_bytes + 1), shape.one_node)
    work = own.encode + P * own.decode + shape.merging(t, P * k) + (stages - 1) * (P + 2) * t.call
    return rounds(P) * t.alpha + _overlapped(t.beta * (P - 1) * own.bytes, work, stages)


def _split(shape: Shape, t: Tuning, entries: float) -> float:
    """Everybody's part of a region that `entries` fall into goes to its owner, who sums them."""
    P, share = shape.P, 1 / shape.P
    part = shape.message(t, entries / P, share)
    work = P * part.encode + (P - 1) * part.decode + shape.merging(t, entries, share)
    return _burst(shape, t) + t.beta * (P - 1) * part.bytes + work


def _gathered(shape: Shape, t: Tuning) -> float:
    """The summed regions go to everybody."""
    P, total = shape.P, shape.entries(shape.P)
    part = shape.message(t, total / P, 1 / P)
    fullest = min(shape.skew * part.bytes, shape.message(t, shape.n / P, 1 / P).bytes)
    return rounds(P) * t.alpha + t.beta * (P - 1) * fullest + part.encode + P * part.decode + COPY * total * _speed(t)


def _speed(t: Tuning) -> float:
    return t.code / PACKED


def oktopk_seconds(shape: Shape, t: Tuning) -> float:
    """Predicted seconds of `oktopk` between its searches: split and reduce, sizes, gather."""
    P, k = shape.P, shape.k
    own, part = shape.message(t, k), shape.message(t, k / P, 1 / P)
    split = P * part.encode + (P - 1) * part.decode + shape.merging(t, k, 1 / P)
    gather = part.encode + P * part.decode + COPY * k * _speed(t)
    moved = t.beta * own.bytes * (P - 1) / P
    waits = _agreement(shape, t) + _burst(shape, t) + 2 * rounds(P) * t.alpha
    stages = pieces(k * (shape.value_bytes + 1) / P, shape.one_node)
    calls = (stages - 1) * 2 * P * t.call
    seconds = waits + _overlapped(moved, split + calls, stages) + _overlapped(moved, gather + calls, stages)
    return t.corrected("oktopk", seconds) + FRONT * t.call


def _doubling(shape: Shape, t: Tuning) -> float:
    core = 1 << (shape.P.bit_length() - 1)
    seconds = 0.0
    if core < shape.P:
        first, last = (shape.message(t, shape.entries(ranks), sparse=True) for ranks in (1, shape.P))
        ends = t.beta * (first.bytes + last.bytes) + first.encode + first.decode + last.encode + last.decode
        seconds += 2 * t.alpha + ends + shape.merging(t, 2 * shape.k)
    for step in range(core.bit_length() - 1):
        held = shape.entries(2**step * shape.P / core)
        sent = shape.message(t, held, sparse=True)
        seconds += t.alpha + t.beta * sent.bytes + sent.encode + sent.decode + shape.merging(t, 2 * held)
    return seconds


def _halving(shape: Shape, t: Tuning) -> float:
    P, seconds, summed = shape.P, 0.0, 1
    for step in reversed(range(rounds(P))):
        regions = min(2 ** (step + 1), P) - 2**step
        share = regions / P
        held = shape.entries(summed) * share * min(shape.skew, 1 / share)
        sent = shape.message(t, held, share)
        seconds += t.alpha + t.beta * sent.bytes + sent.encode + sent.decode + shape.merging(t, 2 * held, share)
        summed *= 2
    return seconds


def reach(n: int, k: int, P: int, total: int) -> float:
    """The number of coordinates at which uniform supports of k on each of P ranks would fill in to `total` entries."""
    low, high = float(max(k, 1)), float(max(n, k, 1))
    if total >= fill_in(int(high), k, P):
        return high
    for _ in range(25):  # bisection of the logarithm
        middle = math.sqrt(low * high)
        low, high = (middle, high) if fill_in(int(middle), k, P) < total else (low, middle)
    return high
