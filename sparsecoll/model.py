"""The alpha-beta network and each algorithm's closed-form volume, citing paper and equation.

Volumes are words (4 bytes) received by a rank, own part excluded, for COO with float32 values and 32-bit indices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


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
