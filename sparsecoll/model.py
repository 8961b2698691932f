"""The alpha-beta network and each algorithm's closed-form volume, citing paper and equation.

Volumes are words (4 bytes) received by a rank, own part excluded, for COO with float32 values and 32-bit indices.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path


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


def spardl_words(k: int, P: int) -> float:
    """4k(P-1)/P: P - 1 blocks of k/P entries in each of the two steps (derived in docs/algorithms.md)."""
    return 4 * k * (P - 1) / P


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
        merge: entry that goes into a sum of sparse vectors.
        code: entry encoded and decoded in the format packed.
        add: value of a dense vector, read from a message, added, and written.
    """

    alpha: float = 50e-6
    overhead: float = 1e-6
    beta: float = 8e-9
    merge: float = 5e-9
    code: float = 5e-9
    add: float = 1e-9

    def save(self, path: str | Path) -> None:
        """Write the six numbers as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Tuning:
        """Read what `save` wrote.

        Raises:
            OSError, ValueError: no such file; not the six numbers.
        """
        try:
            return cls(**{name: float(value) for name, value in json.loads(Path(path).read_text()).items()})
        except (TypeError, AttributeError) as error:
            raise ValueError(
                f"{path}: expected the numbers alpha, overhead, beta, merge, code, add ({error})"
            ) from None


@dataclass(frozen=True)
class Shape:
    """What a prediction is made for: n coordinates, k entries a rank, P ranks, bytes of a value on the wire.

    Args:
        reach: coordinates among which the supports look uniform: n if they are, k if all ranks have the same ones.
        skew: entries of the fullest of P even regions over their mean.
    """

    n: int
    k: int
    P: int
    value_bytes: int
    reach: float
    skew: float = 1.0

    def entries(self, ranks: float) -> float:
        """Expected entries of the sum of that many ranks."""
        return fill_in(max(int(self.reach), 1), self.k, ranks)

    def bytes(self, entries: float, sparse: bool = False) -> float:
        """Bytes of so many entries over the whole vector in the smallest format (`sparse`: of COO and packed)."""
        if entries < 1 or self.n == 0:
            return 32.0
        density = min(entries / self.n, 1.0)
        if density < 0.3:  # Rice: about 1.02 times the entropy; then a bitmap
            bits = -1.02 * (math.log2(density) + (1 - density) / density * math.log2(1 - density))
        else:
            bits = 1 / density
        size = entries * (self.value_bytes + min(bits / 8, 4.0))
        return size if sparse else min(size, self.n * self.value_bytes)


def exact_seconds(shape: Shape, t: Tuning) -> dict[str, float]:
    """Predicted seconds of the ways to an exact sum, by name: those that `auto` chooses among."""
    P, k, log, share = shape.P, shape.k, rounds(shape.P), (shape.P - 1) / shape.P
    merge, total = t.merge + t.code, shape.entries(P)
    gathered = log * t.alpha + t.code * total
    burst = t.alpha + max(P - 2, 0) * t.overhead  # P - 1 messages at once
    split = burst + t.beta * shape.skew * share * shape.bytes(k) + (t.merge + 2 * t.code) * k * shape.skew
    summed = 2 * t.beta * shape.n * shape.value_bytes * share + 20 * t.add * shape.n  # made dense and sparse again
    return {
        "allgather": log * t.alpha + t.beta * (P - 1) * shape.bytes(k) + merge * P * k,
        "dense": burst + log * t.alpha + summed,
        "recursive_double": _doubling(shape, t),
        "dynamic": split + gathered + t.beta * share * min(shape.skew * shape.bytes(total), shape.bytes(shape.n)),
        "halving": _halving(shape, t) + gathered + t.beta * shape.skew * share * shape.bytes(total),
    }


def oktopk_seconds(shape: Shape, t: Tuning) -> float:
    """Predicted seconds of `oktopk` between its searches: split and reduce, sizes, gather."""
    P, log, share = shape.P, rounds(shape.P), (shape.P - 1) / shape.P
    moved = t.beta * share * 2 * shape.bytes(shape.k) + (2 * t.merge + 4 * t.code) * shape.k
    return (1 + 2 * log) * t.alpha + max(P - 2, 0) * t.overhead + moved


def _doubling(shape: Shape, t: Tuning) -> float:
    core = 1 << (shape.P.bit_length() - 1)
    seconds = 0.0
    if core < shape.P:
        ends = shape.bytes(shape.k, sparse=True) + shape.bytes(shape.entries(shape.P), sparse=True)
        seconds += 2 * t.alpha + t.beta * ends
    for step in range(core.bit_length() - 1):
        held = shape.entries(2**step * shape.P / core)
        seconds += t.alpha + t.beta * shape.bytes(held, sparse=True) + 2 * (t.merge + t.code) * held
    return seconds


def _halving(shape: Shape, t: Tuning) -> float:
    seconds, summed = 0.0, 1
    for step in reversed(range(rounds(shape.P))):
        regions = min(2 ** (step + 1), shape.P) - 2**step
        held = shape.entries(summed) * regions / shape.P * min(shape.skew, shape.P / regions)
        seconds += t.alpha + t.beta * shape.bytes(held) + 2 * (t.merge + t.code) * held
        summed *= 2
    return seconds


def reach(n: int, k: int, P: int, total: int) -> float:
    """The number of coordinates at which uniform supports of k on each of P ranks would fill in to `total` entries."""
    low, high = float(max(k, 1)), float(max(n, k, 1))
    if total >= fill_in(int(high), k, P):
        return high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if fill_in(int(middle), k, P) < total else (low, middle)
    return high
